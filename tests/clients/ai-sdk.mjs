// The AI SDK's OpenAI-compatible provider against the running executable.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, generateText, jsonSchema, stepCountIs, streamText, tool } from 'ai';
import { Server } from '../api/support/server.mjs';
import { city, fact, noThinking, thinking, weather } from './support/cases.mjs';

let server, provider;
before(async () => {
  server = await Server.start({ args: ['--skip-smoke'] });
  provider = createOpenAICompatible({ name: 'ddtree', baseURL: `${server.url}/v1`, includeUsage: true });
});
after(() => server.stop());

const options = (o) => ({ temperature: 0, maxRetries: 0, providerOptions: { ddtree: o } });
const system = weather.messages.find((m) => m.role === 'system')?.content;
const prompt = weather.messages.at(-1).content;

test('chat', async () => {
  const r = await generateText({ model: provider('tiny'), prompt: fact.messages[0].content, ...options(noThinking) });
  assert.equal(r.text, fact.answer);
  assert.equal(r.finishReason, 'stop');
  assert.equal(r.usage.totalTokens, r.usage.inputTokens + r.usage.outputTokens);
});

test('reasoning arrives as reasoning', async () => {
  const r = await generateText({ model: provider('tiny'), prompt: 'Calculate 97 - 81.', ...options({}) });
  assert.ok(r.reasoningText.length > 0);
  assert.ok(r.text.includes('16'), r.text);
  assert.ok(r.usage.reasoningTokens > 0 && r.usage.reasoningTokens < r.usage.outputTokens);
});

test('stream with usage', async () => {
  const r = streamText({ model: provider('tiny'), prompt: fact.messages[0].content, ...options(noThinking) });
  let text = '';
  for await (const part of r.textStream) text += part;
  assert.equal(text, fact.answer);
  const usage = await r.usage;
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
});

for (const how of ['whole', 'streamed']) {
  test(`tool call round trip, ${how}`, async () => {
    const asked = [];
    const f = weather.tools[0].function;
    const tools = { get_weather: tool({ description: f.description, inputSchema: jsonSchema(f.parameters), execute: async (input) => { asked.push(input); return { temperature: 17, sky: 'sunny' }; } }) };
    const call = { model: provider('tiny'), system, prompt, tools, stopWhen: stepCountIs(3), ...options(thinking) };
    let text;
    if (how === 'whole') {
      text = (await generateText(call)).text;
    } else {
      const r = streamText(call);
      await r.consumeStream();
      text = await r.text;
    }
    assert.deepEqual(asked[0], { city });
    assert.ok(text.includes(city), text);
  });
}

test('an error is an APICallError with the server\'s words', async () => {
  await assert.rejects(generateText({ model: provider('gpt-4'), prompt: 'Hi', maxRetries: 0 }), (e) => APICallError.isInstance(e) && e.statusCode === 404 && /not served here/.test(e.message) && !e.isRetryable);
});
