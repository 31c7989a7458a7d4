// OpenAI's own client against the running executable.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import OpenAI from 'openai';
import { Server } from '../api/support/server.mjs';
import { city, fact, noThinking, thinking, weather, weatherText } from './support/cases.mjs';

let server, client;
before(async () => {
  server = await Server.start({ args: ['--skip-smoke', '--api-key', 'k'] });
  client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'k', maxRetries: 0 });
});
after(() => server.stop());

test('chat', async () => {
  const r = await client.chat.completions.create({ model: 'tiny', messages: fact.messages, temperature: 0, ...noThinking });
  assert.equal(r.choices[0].message.content, fact.answer);
  assert.equal(r.usage.total_tokens, r.usage.prompt_tokens + r.usage.completion_tokens);
});

test('models', async () => {
  const names = [];
  for await (const m of client.models.list()) names.push(m.id);
  assert.deepEqual(names, ['tiny']);
});

test('stream with usage, and the stream helper puts the same message together', async () => {
  const stream = await client.chat.completions.create({ model: 'tiny', messages: fact.messages, temperature: 0, stream: true, stream_options: { include_usage: true }, ...noThinking });
  let text = '', usage = null, finish = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? '';
    finish = chunk.choices[0]?.finish_reason ?? finish;
    if (chunk.usage) usage = chunk.usage;
  }
  assert.equal(text, fact.answer);
  assert.equal(finish, 'stop');
  assert.ok(usage.completion_tokens > 0);
  const helper = client.chat.completions.stream({ model: 'tiny', messages: fact.messages, temperature: 0, stream_options: { include_usage: true }, ...noThinking });
  const whole = await helper.finalChatCompletion();
  assert.equal(whole.choices[0].message.content, fact.answer);
  assert.deepEqual(whole.usage, usage);
});

test('tool call round trip, whole and streamed', async () => {
  const ask = { model: 'tiny', messages: weather.messages, tools: weather.tools, temperature: 0, ...thinking };
  const r = await client.chat.completions.create(ask);
  assert.equal(r.choices[0].finish_reason, 'tool_calls');
  const [call] = r.choices[0].message.tool_calls;
  assert.equal(call.function.name, 'get_weather');
  assert.deepEqual(JSON.parse(call.function.arguments), { city });
  const helper = client.chat.completions.stream(ask);
  const whole = await helper.finalChatCompletion();
  assert.equal(whole.choices[0].message.tool_calls[0].function.name, 'get_weather');
  assert.deepEqual(JSON.parse(whole.choices[0].message.tool_calls[0].function.arguments), { city });
  const answer = await client.chat.completions.create({ ...ask, messages: [...weather.messages, r.choices[0].message, { role: 'tool', tool_call_id: call.id, content: weatherText }] });
  assert.equal(answer.choices[0].finish_reason, 'stop');
  assert.ok(answer.choices[0].message.content.includes(city), answer.choices[0].message.content);
});

test('completions', async () => {
  const r = await client.completions.create({ model: 'tiny', prompt: [weather.prompt, weather.prompt_ids], max_tokens: 8, temperature: 0 });
  assert.equal(r.choices.length, 2);
  assert.equal(r.choices[0].text, r.choices[1].text);
});

test('errors become the classes of their status', async () => {
  const chat = (body, c = client) => c.chat.completions.create({ model: 'tiny', messages: fact.messages, ...body });
  await assert.rejects(chat({ temperature: 9 }), (e) => e instanceof OpenAI.BadRequestError && e.code === 'invalid_value' && e.param === 'temperature');
  await assert.rejects(chat({ n: 3 }), (e) => e instanceof OpenAI.BadRequestError && e.code === 'unsupported_parameter');
  await assert.rejects(chat({ model: 'gpt-4' }), (e) => e instanceof OpenAI.NotFoundError && e.code === 'model_not_found');
  await assert.rejects(chat({ messages: [{ role: 'user', content: 'word '.repeat(6000) }], stream: true }), (e) => e instanceof OpenAI.BadRequestError && e.code === 'context_length_exceeded');
  await assert.rejects(chat({}, new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'wrong', maxRetries: 0 })), (e) => e instanceof OpenAI.AuthenticationError && e.code === 'invalid_api_key');
});

test('an aborted stream frees its slot', async () => {
  const stream = await client.chat.completions.create({ model: 'tiny', messages: fact.messages, stream: true, ignore_eos: true, max_tokens: 3000 });
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta?.content || chunk.choices[0]?.delta?.reasoning_content) break;
  }
  stream.controller.abort();
  // /metrics asks for the key too
  for (;;) {
    const text = (await server.get('/metrics', { authorization: 'Bearer k' })).text;
    if (/ddtree:num_requests_live 0\n/.test(text) && /ddtree:kv_pages_used 0\n/.test(text)) break;
  }
});
