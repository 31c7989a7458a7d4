// Every endpoint of the running executable with the embedded pair, and what it refuses.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { Server, golden, joined } from './support/server.mjs';

let server;
before(async () => { server = await Server.start(); });
after(() => server.stop());

const hello = [{ role: 'user', content: 'Say hello to Carol.' }];
const kind = (name) => golden.find((g) => g.kind === name && g.messages.length <= 2);
// thinking off, as the prompt was recorded
const off = { chat_template_kwargs: { enable_thinking: false } };
const ask = (g) => ({ messages: g.messages, ...(g.tools ? { tools: g.tools } : {}), chat_template_kwargs: { enable_thinking: g.thinking } });

test('the model list, one model, the version', async () => {
  const list = await server.get('/v1/models');
  assert.equal(list.status, 200);
  assert.equal(list.body.object, 'list');
  assert.equal(list.body.data[0].id, 'tiny');
  assert.equal(list.body.data[0].max_model_len, 4096);
  assert.equal(list.body.data[0].meta.drafter, true);
  assert.equal((await server.get('/v1/models/tiny')).body.id, 'tiny');
  const missing = await server.get('/v1/models/gpt-4');
  assert.equal(missing.status, 404);
  assert.equal(missing.body.error.code, 'model_not_found');
  assert.match((await server.get('/version')).body.version, /^\d+\.\d+/);
});

test('probes say ready, with phase and smoke result', async () => {
  for (const path of ['/health', '/readyz', '/livez', '/startupz']) {
    const r = await server.get(path);
    assert.equal(r.status, 200, path);
    assert.equal(r.body.phase, 'ready');
    assert.equal(r.body.smoke, 'pass');
  }
});

test('a chat answers as the reference did', async () => {
  for (const g of [kind('small_talk'), kind('times_table'), kind('code_task')]) {
    const r = await server.chat({ ...ask(g), return_token_ids: true, max_tokens: g.greedy_ids.length });
    assert.equal(r.status, 200, r.text);
    assert.deepEqual(r.body.prompt_token_ids, g.prompt_ids);
    assert.deepEqual(r.body.choices[0].token_ids, g.greedy_ids);
  }
});

test('stream and whole reply carry the same text, ids and usage', async () => {
  for (const g of golden.filter((x, i) => i % 5 === 0)) {
    const body = { ...ask(g), max_tokens: 120, return_token_ids: true };
    const whole = (await server.chat(body)).body;
    const s = await server.stream('/v1/chat/completions', { ...body, stream_options: { include_usage: true } });
    const j = joined(s.events);
    assert.equal(j.content, whole.choices[0].message.content ?? '');
    assert.equal(j.reasoning, whole.choices[0].message.reasoning_content ?? '');
    assert.deepEqual(j.ids, whole.choices[0].token_ids);
    assert.equal(j.finish, whole.choices[0].finish_reason);
    assert.deepEqual(j.usage, whole.usage);
    assert.deepEqual(j.calls.map((c) => [c.name, c.arguments]), (whole.choices[0].message.tool_calls ?? []).map((c) => [c.function.name, c.function.arguments]));
  }
});

test('usage chunk: last, empty choices, only when asked for (G1, G2, G3)', async () => {
  const plain = await server.stream('/v1/chat/completions', { messages: hello });
  for (const e of plain.events) if (typeof e === 'object') assert.equal(e.choices.length, 1);
  assert.equal(plain.events.at(-1), '[DONE]');
  assert.equal(plain.events[0].choices[0].delta.role, 'assistant');
  const s = await server.stream('/v1/chat/completions', { messages: hello, stream_options: { include_usage: true } });
  const usage = s.events.at(-2);
  assert.deepEqual(usage.choices, []);
  assert.ok(usage.usage.total_tokens > 0);
  assert.ok(s.events.at(-3).choices[0].finish_reason);
  for (const e of s.events.slice(0, -2)) assert.equal(e.usage, null);
  for (const e of [s.events.at(-3), usage]) {
    assert.ok(e.metrics.speculative_decoding.num_spec_steps >= 1);
    assert.ok(e.timings.predicted_n >= 1);
  }
});

test('reasoning is split, counted within the completion, and both fields are equal (G5, H7, H8)', async () => {
  for (const max_tokens of [1, 2, 5, 8, 12, 30, 64]) {
    const r = (await server.chat({ messages: [{ role: 'user', content: 'Calculate 97 - 81.' }], max_tokens })).body;
    const { usage } = r;
    assert.ok(usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens);
    assert.equal(usage.prompt_tokens + usage.completion_tokens, usage.total_tokens);
    assert.equal(r.choices[0].message.reasoning, r.choices[0].message.reasoning_content);
    if (max_tokens <= 5) {
      assert.equal(r.choices[0].finish_reason, 'length');
      assert.equal(r.choices[0].message.content, null);
      assert.equal(usage.completion_tokens_details.reasoning_tokens, max_tokens);
    }
  }
  const no = (await server.chat({ messages: [{ role: 'user', content: 'Calculate 97 - 81.' }], ...off })).body;
  assert.ok(no.choices[0].message.content.length > 0);
  assert.equal(no.choices[0].message.reasoning, undefined);
  assert.equal(no.usage.completion_tokens_details.reasoning_tokens, 0);
});

test('statistics keep their identities (I3) in every mode', async () => {
  for (const speculative_algorithm of ['DDTREE', 'DFLASH', 'NEXTN', 'NONE']) {
    for (const g of [kind('times_table'), kind('small_talk')]) {
      const r = (await server.chat({ ...ask(g), speculative_algorithm })).body;
      const s = r.metrics.speculative_decoding;
      assert.equal(s.mode, speculative_algorithm);
      const h = s.acceptance_histogram;
      assert.equal(h.reduce((a, b) => a + b, 0), s.num_spec_steps);
      assert.equal(h.reduce((a, n, i) => a + n * i, 0), s.num_accepted_draft_tokens);
      // One token from the prefill, one of its own from each round; the last round has none where the end token was itself a draft.
      const own = r.usage.completion_tokens - s.num_accepted_draft_tokens;
      assert.ok(own === s.num_spec_steps + 1 || (own === s.num_spec_steps && speculative_algorithm !== 'NONE'), `${own} own tokens in ${s.num_spec_steps} rounds`);
      assert.ok(Math.abs(s.mean_acceptance_length - (1 + s.num_accepted_draft_tokens / s.num_spec_steps)) < 1e-9);
      if (speculative_algorithm === 'NONE') assert.equal(s.num_draft_tokens, 0);
      else assert.ok(s.num_draft_tokens >= s.num_accepted_draft_tokens);
      assert.equal(r.timings.draft_n, s.num_draft_tokens);
    }
  }
});

test('speculation changes no greedy text', async () => {
  for (const g of [kind('code_task'), kind('story')]) {
    const texts = new Set();
    for (const speculative_algorithm of ['NONE', 'DDTREE', 'DFLASH', 'NEXTN']) {
      const r = (await server.chat({ ...ask(g), max_tokens: 80, speculative_algorithm })).body;
      texts.add(JSON.stringify(r.choices[0].message));
    }
    assert.equal(texts.size, 1, [...texts].join('\n'));
  }
});

test('the same seed gives the same text, another seed another one', async () => {
  const body = (seed) => ({ messages: [{ role: 'user', content: 'Tell me a short story about a fox.' }], temperature: 1.5, top_p: 1, top_k: 0, max_tokens: 60, seed, ...off });
  const text = async (seed, more = {}) => (await server.chat({ ...body(seed), ...more })).body.choices[0].message.content;
  const first = await text(7);
  assert.equal(await text(7), first);
  assert.equal(await text(7, { speculative_algorithm: 'NONE' }), first);
  const others = await Promise.all([8, 9, 10, Number.MAX_SAFE_INTEGER].map((s) => text(s)));
  assert.ok(others.some((t) => t !== first));
});

test('stop strings cut text, ids and usage together (G4, G6)', async () => {
  const question = { messages: [{ role: 'user', content: 'List the numbers from 35 to 61.' }], ...off, return_token_ids: true };
  const full = (await server.chat(question)).body;
  const text = full.choices[0].message.content;
  for (const stop of ['40', ', 44', '5, 46', ['zzz', '50'], ' ']) {
    const list = [stop].flat();
    const r = (await server.chat({ ...question, stop })).body;
    const cut = Math.min(...list.map((s) => text.indexOf(s)).filter((i) => i >= 0));
    assert.equal(r.choices[0].message.content ?? '', text.slice(0, cut), `stop ${JSON.stringify(stop)}`);
    assert.equal(r.choices[0].finish_reason, 'stop');
    assert.ok(list.includes(r.choices[0].stop_reason));
    assert.equal(r.choices[0].matched_stop, r.choices[0].stop_reason);
    assert.equal(r.choices[0].token_ids.length, r.usage.completion_tokens);
    assert.deepEqual(r.choices[0].token_ids, full.choices[0].token_ids.slice(0, r.usage.completion_tokens));
    const s = joined((await server.stream('/v1/chat/completions', { ...question, stop })).events);
    assert.equal(s.content, r.choices[0].message.content ?? '');
    assert.deepEqual(s.ids, r.choices[0].token_ids);
    const kept = (await server.chat({ ...question, stop, include_stop_str_in_output: true })).body.choices[0].message.content;
    assert.equal(kept, text.slice(0, cut + r.choices[0].stop_reason.length));
  }
});

test('lengths, stop ids and end tokens: the earliest wins (G4)', async () => {
  const question = { messages: [{ role: 'user', content: 'List the numbers from 35 to 61.' }], ...off, return_token_ids: true };
  const full = (await server.chat(question)).body;
  const ids = full.choices[0].token_ids;
  assert.equal(full.choices[0].finish_reason, 'stop');
  assert.equal(full.choices[0].stop_reason, null);
  for (const n of [1, 2, 3, 5, 17, ids.length - 1, ids.length]) {
    const r = (await server.chat({ ...question, max_tokens: n })).body;
    assert.deepEqual(r.choices[0].token_ids, ids.slice(0, n));
    assert.equal(r.usage.completion_tokens, n);
    assert.equal(r.choices[0].finish_reason, n === ids.length ? 'stop' : 'length');
  }
  for (const at of [1, 4, 9]) {
    const first = ids.indexOf(ids[at]);
    const r = (await server.chat({ ...question, stop_token_ids: [ids[at]] })).body;
    assert.equal(r.choices[0].finish_reason, 'stop');
    assert.equal(r.choices[0].stop_reason, ids[at]);
    assert.equal(r.usage.completion_tokens, first + 1);
    const capped = (await server.chat({ ...question, stop_token_ids: [ids[at]], max_tokens: first })).body;
    if (first > 0) assert.equal(capped.choices[0].finish_reason, 'length');
  }
  const on = (await server.chat({ ...question, ignore_eos: true, max_tokens: ids.length + 10 })).body;
  assert.equal(on.usage.completion_tokens, ids.length + 10);
  assert.equal(on.choices[0].finish_reason, 'length');
  const min = (await server.chat({ messages: hello, ...off, min_tokens: 40, max_tokens: 60 })).body;
  assert.ok(min.usage.completion_tokens >= 40);
});

test('max_tokens is optional and bounded by the context', async () => {
  const r = (await server.chat({ messages: hello, ...off, max_tokens: 1_000_000 })).body;
  assert.equal(r.choices[0].finish_reason, 'stop');
  assert.equal((await server.chat({ messages: hello, ...off })).body.choices[0].message.content, r.choices[0].message.content);
});

test('tool calls: whole, streamed, and the round trip back', async () => {
  for (const g of golden.filter((x) => x.kind === 'tool_call' && x.messages.length <= 2)) {
    const r = (await server.chat(ask(g))).body;
    const [c] = r.choices;
    assert.equal(c.finish_reason, 'tool_calls');
    assert.equal(c.message.content, null);
    const [call] = c.message.tool_calls;
    assert.equal(call.type, 'function');
    assert.match(call.id, /^call_/);
    assert.equal(call.function.name, g.tools[0].function.name);
    const args = JSON.parse(call.function.arguments);
    assert.ok(g.text.includes(args.city));
    const j = joined((await server.stream('/v1/chat/completions', ask(g))).events);
    assert.equal(j.finish, 'tool_calls');
    assert.deepEqual(JSON.parse(j.calls[0].arguments), args);
    // arguments go back as the text they came as
    const back = await server.chat({ ...ask(g), messages: [...g.messages, c.message, { role: 'tool', tool_call_id: call.id, content: '{"temperature": 17, "sky": "sunny"}' }] });
    assert.equal(back.status, 200, back.text);
    assert.equal(back.body.choices[0].finish_reason, 'stop');
  }
  const g = golden.find((x) => x.kind === 'tool_call' && x.messages.length <= 2);
  const none = (await server.chat({ ...ask(g), tool_choice: 'none' })).body;
  assert.equal(none.choices[0].message.tool_calls, undefined);
  const required = await server.chat({ ...ask(g), tool_choice: 'required' });
  assert.equal(required.status, 400);
  assert.equal(required.body.error.param, 'tool_choice');
});

test('completions take text, ids, and lists of either', async () => {
  const g = kind('small_talk');
  const whole = await server.post('/v1/completions', { prompt: g.prompt, temperature: 0, max_tokens: 64, return_token_ids: true });
  assert.equal(whole.status, 200, whole.text);
  assert.deepEqual(whole.body.choices[0].token_ids, g.greedy_ids);
  assert.deepEqual(whole.body.choices[0].prompt_token_ids, g.prompt_ids);
  const byIds = (await server.post('/v1/completions', { prompt: g.prompt_ids, temperature: 0, max_tokens: 64 })).body;
  assert.equal(byIds.choices[0].text, whole.body.choices[0].text);
  const other = kind('times_table');
  const many = (await server.post('/v1/completions', { prompt: [g.prompt, other.prompt_ids], temperature: 0, max_tokens: 200 })).body;
  assert.equal(many.choices.length, 2);
  assert.equal(many.choices[0].text, whole.body.choices[0].text);
  assert.equal(many.usage.prompt_tokens, g.prompt_ids.length + other.prompt_ids.length);
  const s = await server.stream('/v1/completions', { prompt: g.prompt, max_tokens: 64, stream_options: { include_usage: true } });
  const j = joined(s.events);
  assert.equal(j.content, whole.body.choices[0].text);
  assert.deepEqual(j.usage, whole.body.usage);
  assert.ok(j.done);
});

test('continue_final_message goes on with the last message', async () => {
  const r = await server.chat({ messages: [{ role: 'user', content: 'List the numbers from 35 to 61.' }, { role: 'assistant', content: '35, 36, 37' }], continue_final_message: true, add_generation_prompt: false, max_tokens: 12, ...off });
  assert.equal(r.status, 200, r.text);
  assert.match(r.body.choices[0].message.content, /^, 38/);
});

test('tokenize and detokenize', async () => {
  const g = kind('small_talk');
  const t = (await server.post('/tokenize', { prompt: g.prompt })).body;
  assert.deepEqual(t.tokens, g.prompt_ids);
  assert.equal(t.count, g.prompt_ids.length);
  assert.equal((await server.post('/detokenize', { tokens: t.tokens })).body.prompt, g.prompt);
  assert.deepEqual((await server.post('/tokenize', { messages: g.messages, chat_template_kwargs: { enable_thinking: g.thinking } })).body.tokens, g.prompt_ids);
});

test('a prompt that does not fit: 400 with both numbers, also for streams (G12)', async () => {
  const content = 'word '.repeat(6000);
  for (const stream of [false, true]) {
    const r = await server.chat({ messages: [{ role: 'user', content }], stream });
    assert.equal(r.status, 400);
    assert.equal(r.headers.get('content-type'), 'application/json');
    assert.equal(r.body.error.code, 'context_length_exceeded');
    assert.equal(r.body.error.param, 'messages');
    assert.equal(r.body.error.n_ctx, 4096);
    assert.ok(r.body.error.n_prompt_tokens >= 4096);
    const p = await server.post('/v1/completions', { prompt: content, stream });
    assert.equal(p.body.error.code, 'context_length_exceeded');
    assert.equal(p.body.error.param, 'prompt');
  }
});

test('errors have one shape, name their field, and are never a 500', async () => {
  const cases = [
    [{ messages: hello, model: 'nope' }, 404, 'model_not_found', 'model'],
    [{ messages: hello, n: 2 }, 400, 'unsupported_parameter', 'n'],
    [{ messages: hello, logprobs: true }, 400, 'unsupported_parameter', 'logprobs'],
    [{ messages: hello, logprobs: true, top_logprobs: 5 }, 400, 'unsupported_parameter', 'logprobs'],
    [{ messages: hello, logit_bias: { 5: 1 } }, 400, 'unsupported_parameter', 'logit_bias'],
    [{ messages: hello, response_format: { type: 'json_object' } }, 400, 'unsupported_parameter', 'response_format'],
    [{ messages: hello, temperature: -1 }, 400, 'invalid_value', 'temperature'],
    [{ messages: hello, stop: [''] }, 400, 'invalid_value', 'stop'],
    [{ messages: hello, max_tokens: 0 }, 400, 'invalid_value', 'max_tokens'],
    [{ messages: 'hi' }, 400, 'invalid_value', 'messages'],
    [{}, 400, 'invalid_value', 'messages'],
    [{ messages: [{ role: 'wizard', content: 'hi' }] }, 400, 'invalid_value', 'messages'],
    [{ messages: [{ role: 'user', content: [{ type: 'image_url', image_url: { url: 'x' } }] }] }, 400, 'unsupported_parameter', 'messages[0].content[0].type'],
    [{ messages: [{ role: 'assistant', tool_calls: [{ function: { name: 'f', arguments: '{' } }] }, ...hello] }, 400, 'invalid_value', 'messages'],
    ['{"messages": ', 400, 'invalid_json', null],
    ['[]', 400, 'invalid_json', null],
    ['', 400, 'invalid_json', null],
    ['[' .repeat(200000), 400, 'invalid_json', null],
    ['{"messages": 1e99999}', 400, 'invalid_json', null],
    [Uint8Array.from([0x7b, 0x22, 0xff, 0x22, 0x3a, 0x31, 0x7d]), 400, 'invalid_json', null],
  ];
  for (const [body, status, code, param] of cases) {
    const label = typeof body === 'string' ? body.slice(0, 30) : JSON.stringify(body).slice(0, 100);
    const r = await server.post('/v1/chat/completions', body);
    assert.equal(r.status, status, `${label}: ${r.text}`);
    assert.equal(r.body.error.code, code, label);
    assert.equal(r.body.error.param, param, label);
    assert.equal(r.body.error.type, 'invalid_request_error');
    assert.equal(typeof r.body.error.message, 'string');
  }
  const ok = await server.chat({ messages: hello, shoe_size: 43, n: 1, logprobs: false, response_format: { type: 'text' } });
  assert.equal(ok.status, 200);
  assert.equal(ok.headers.get('x-ignored-fields'), 'shoe_size');
  assert.equal((await server.get('/v1/nothing')).status, 404);
  assert.equal((await server.get('/v1/chat/completions')).status, 405);
});

test('random bodies are answered with 200 or 4xx', async () => {
  // A fixed generator: a failure can be repeated.
  let state = 12345;
  const random = (n) => { state = (Math.imul(state, 1103515245) + 12345) >>> 0; return (state >>> 8) % n; };
  const values = [null, true, false, 0, -1, 1, 1e308, -0.5, '', 'x', '\u0000', '💩', [], {}, [[]], { a: { b: [] } }, 2 ** 53, 'a'.repeat(5000), [null], ['x', 1]];
  const names = ['model', 'messages', 'stream', 'stream_options', 'temperature', 'top_p', 'top_k', 'min_p', 'seed', 'stop', 'stop_token_ids', 'max_tokens', 'max_completion_tokens', 'min_tokens', 'tools', 'tool_choice',
    'response_format', 'chat_template_kwargs', 'n', 'logit_bias', 'presence_penalty', 'repetition_penalty', 'reasoning_effort', 'documents', 'continue_final_message', 'add_generation_prompt', 'speculative_algorithm', 'speculative_budget',
    'parallel_tool_calls', 'return_token_ids', 'ignore_eos', 'skip_special_tokens', 'prompt', 'user'];
  for (let i = 0; i < 400; ++i) {
    const body = { messages: hello, max_tokens: 2, prompt: 'x' };
    for (let k = random(4); k >= 0; --k) {
      if (random(5) === 0) {
        body.messages = [{ role: ['user', 'assistant', 'tool', 'system', 'developer', 5][random(6)], content: values[random(values.length)], tool_calls: values[random(values.length)], name: values[random(values.length)] }, ...hello];
      } else {
        body[names[random(names.length)]] = values[random(values.length)];
      }
    }
    const path = random(3) ? '/v1/chat/completions' : '/v1/completions';
    const r = await server.post(path, body);
    assert.ok(r.status === 200 || (r.status >= 400 && r.status < 500), `${path} ${JSON.stringify(body).slice(0, 300)}: ${r.status} ${r.text.slice(0, 300)}`);
  }
  assert.equal((await server.get('/readyz')).status, 200);
});

test('eight streams run together and give what they give alone', async () => {
  const some = golden.filter((x) => !x.tools).slice(0, 8);
  const alone = [];
  for (const g of some) alone.push((await server.chat({ ...ask(g), max_tokens: 60 })).body.choices[0].message);
  const together = await Promise.all(some.map((g) => server.stream('/v1/chat/completions', { ...ask(g), max_tokens: 60 })));
  together.forEach((s, i) => {
    const j = joined(s.events);
    assert.equal(j.content, alone[i].content ?? '');
    assert.equal(j.reasoning, alone[i].reasoning_content ?? '');
    assert.ok(j.done);
  });
  await server.idle();
});

test('/metrics counts tokens and drafts, and gauges fall back to zero', async () => {
  await server.idle();
  const tokens = await server.metric('generation_tokens_total');
  const drafts = await server.metric('spec_decode_num_drafts_total');
  const r = (await server.chat({ messages: hello, ...off })).body;
  assert.equal(await server.metric('generation_tokens_total') - tokens, r.usage.completion_tokens);
  assert.equal(await server.metric('spec_decode_num_drafts_total') - drafts, r.metrics.speculative_decoding.num_spec_steps);
  await server.idle();
});

test('/metrics names counters _total and nothing else so, as Prometheus\'s conventions have it', async () => {
  const types = [...(await server.get('/metrics')).text.matchAll(/^# TYPE (ddtree:\S+) (\S+)$/gm)];
  assert.ok(types.length > 40);
  assert.equal(new Set(types.map((t) => t[1])).size, types.length, 'a name twice');
  for (const [, name, type] of types) assert.equal(name.endsWith('_total'), type === 'counter', `${name} is a ${type}`);
});
