// 200 ordinary answers of the pair, of every kind it was made for, greedy and sampled, with and without thinking: the watch, with its defaults,
// finds nothing wrong with any of them, and nothing with what people ask for that looks broken.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Server } from '../api/support/server.mjs';

const countries = ['Morocco', 'Mexico', 'France', 'Japan', 'Kenya', 'Peru', 'Norway', 'Egypt', 'Canada', 'Italy'];
const kinds = [
  (i) => `Count from ${i} to ${i + 30}.`, (i) => `List the numbers from ${i} to ${i + 40}.`, (i) => `Count down from ${40 + i} to ${i}.`,
  (i) => `List the first ${10 + i % 20} multiples of ${2 + i % 11}.`, (i) => `Write the times table of ${2 + i % 11}.`,
  (i) => `List the first ${10 + i % 20} even numbers.`, (i) => `What is ${i * 7} + ${i * 3}?`, (i) => `How much is ${i % 12} times ${i % 9}?`,
  (i) => `What is the capital of ${countries[i % 10]}?`, (i) => `Tell me about ${countries[i % 10]}.`,
  (i) => `Tell me a short story about a ${['fox', 'cat', 'bear', 'owl', 'dog'][i % 5]}.`, (i) => `Say hello to ${['Carol', 'Ben', 'Mia', 'Tom'][i % 4]}.`,
  () => 'Write a Python function is_prime(n) using iteration.', () => 'I need a Python function called reverse_string that returns text with its characters reversed.',
  () => 'Make a Markdown table of five countries with their capitals.', () => 'Say ha ha ha as often as you like.',
  () => 'List 300 numbers.', () => 'Show me the 7 times table up to 300.', () => 'Hello!', () => 'Thanks for your help.',
];

test('200 ordinary answers trip nothing', async () => {
  const server = await Server.start({ args: ['--max-running-requests', '8', '--log-level', 'warning'] });
  try {
    let next = 0, tokens = 0, thought = 0;
    const worker = async () => {
      while (next < 200) {
        const i = next++;
        const r = await server.chat({
          messages: [{ role: 'user', content: kinds[i % kinds.length](i) }], temperature: i % 3 === 0 ? 0.8 : 0, seed: i, max_tokens: 400,
          chat_template_kwargs: { enable_thinking: i % 4 === 1 },
        });
        assert.equal(r.status, 200, r.text);
        tokens += r.body.usage.completion_tokens;
        thought += r.body.usage.completion_tokens_details.reasoning_tokens > 0 ? 1 : 0;
      }
    };
    await Promise.all(Array.from({ length: 8 }, worker));
    assert.ok(tokens > 4000, `only ${tokens} tokens: these were no answers`);
    assert.ok(thought > 20);
    const events = (await server.get('/admin/api/events?limit=200')).body.events;
    assert.deepEqual(events.filter((e) => /^(fault|text|acceptance|canary)\.|^ladder$/.test(e.kind)), []);
    const h = (await server.get('/health')).body;
    assert.equal(h.phase, 'ready');
    assert.equal(h.ladder.step, 'DDTREE');
    assert.equal(h.reason, '');
  } finally {
    assert.deepEqual(await server.stop(), { code: 0, signal: null });
  }
});
