// LangChain's OpenAI client against the running executable.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { HumanMessage, SystemMessage, ToolMessage } from '@langchain/core/messages';
import { ChatOpenAI } from '@langchain/openai';
import { Server } from '../api/support/server.mjs';
import { city, fact, noThinking, thinking, weather, weatherText } from './support/cases.mjs';

let server;
before(async () => { server = await Server.start({ args: ['--skip-smoke'] }); });
after(() => server.stop());

const model = (modelKwargs, more = {}) => new ChatOpenAI({ model: 'tiny', apiKey: 'any', temperature: 0, maxRetries: 0, configuration: { baseURL: `${server.url}/v1` }, modelKwargs, ...more });

test('chat', async () => {
  const r = await model(noThinking).invoke(fact.messages[0].content);
  assert.equal(r.content, fact.answer);
  assert.ok(r.usage_metadata.total_tokens > 0);
});

test('stream counts usage once', async () => {
  const whole = await model(noThinking).invoke(fact.messages[0].content);
  let sum = null;
  for await (const chunk of await model(noThinking, { streamUsage: true }).stream(fact.messages[0].content)) sum = sum ? sum.concat(chunk) : chunk;
  assert.equal(sum.content, fact.answer);
  assert.equal(sum.usage_metadata.total_tokens, whole.usage_metadata.total_tokens);
  assert.equal(sum.usage_metadata.output_tokens, whole.usage_metadata.output_tokens);
});

test('tool call round trip', async () => {
  const llm = model(thinking).bindTools(weather.tools);
  const messages = weather.messages.map((m) => (m.role === 'system' ? new SystemMessage(m.content) : new HumanMessage(m.content)));
  const r = await llm.invoke(messages);
  assert.equal(r.tool_calls.length, 1);
  assert.equal(r.tool_calls[0].name, 'get_weather');
  assert.deepEqual(r.tool_calls[0].args, { city });
  let streamed = null;
  for await (const chunk of await llm.stream(messages)) streamed = streamed ? streamed.concat(chunk) : chunk;
  assert.deepEqual(streamed.tool_calls.map((c) => [c.name, c.args]), [['get_weather', { city }]]);
  const answer = await llm.invoke([...messages, r, new ToolMessage({ tool_call_id: r.tool_calls[0].id, content: weatherText })]);
  assert.ok(answer.content.includes(city), answer.content);
});

test('an error carries its status and code', async () => {
  await assert.rejects(model({}, { model: 'gpt-4' }).invoke('Hi'), (e) => e.status === 404 && e.code === 'model_not_found');
});
