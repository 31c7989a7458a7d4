// Each injected fault ends in its documented phase, event, HTTP answer and exit code (docs/operations.md has the same table), and the
// ladder's way down and up is in the history and in the dashboard's status.
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { Server, binary, eventually, faultyBinary, joined, sleep } from '../api/support/server.mjs';

// A watch in a hurry: what takes minutes in a service takes seconds here.
const hurry = ['--ladder-settle', '0.5', '--ladder-proof', '2', '--canary-interval', '0', '--max-running-requests', '4', '--log-level', 'warning'];
const count = { messages: [{ role: 'user', content: 'List the numbers from 35 to 61.' }], chat_template_kwargs: { enable_thinking: false } };
const long = { ...count, max_tokens: 400, ignore_eos: true };

async function withServer(inject, args, body) {
  const server = await Server.start({ program: faultyBinary, args: [...hurry, ...args, ...inject.flatMap((i) => ['--inject', i])] });
  try {
    return await body(server);
  } catch (error) {
    error.message += `\n--- log of the server:\n${server.log.slice(-3000)}`;
    throw error;
  } finally {
    const exit = await server.stop();
    server.expectedExit ??= 0;
    assert.deepEqual(exit, { code: server.expectedExit, signal: null }, server.log.slice(-2000));
  }
}

const events = async (s) => (await s.get('/admin/api/events?limit=200')).body.events;
const eventOf = (s, kind) => eventually(`event ${kind}`, async () => (await events(s)).find((e) => e.kind === kind), 60);
const ladder = async (s) => (await s.get('/admin/api/status')).body.ladder;
const moves = async (s) => (await events(s)).filter((e) => e.kind === 'ladder').reverse().map((e) => (typeof e.detail === 'string' ? JSON.parse(e.detail) : e.detail));
const movesUpTo = (s, n) => eventually(`${n} moves of the ladder`, async () => {
  const list = await moves(s);
  return list.length >= n && list;
}, 60);
const health = async (s) => (await s.get('/health')).body;
const recovered = (s) => eventually('back at the top of the ladder', async () => {
  const l = await ladder(s);
  return l.step === l.steps[0] && (await health(s)).phase === 'ready';
}, 120);
// Reads a history after its process has ended, through a second server on the same file.
async function afterwards(s, read) {
  const port = s.port;
  const again = await Server.start({ args: ['--db', s.db, '--log-level', 'warning'] });
  try {
    return await read(again, port);
  } finally {
    await again.stop();
  }
}

test('release builds have no --inject', () => {
  const r = spawnSync(binary, ['serve', '--inject', 'nan-logits'], { encoding: 'utf8' });
  assert.equal(r.status, 64);
  assert.match(r.stderr, /--inject is no flag of ddtree serve/);
  assert.doesNotMatch(spawnSync(binary, ['serve', '--help'], { encoding: 'utf8' }).stdout, /inject/);
  const bad = spawnSync(faultyBinary, ['serve', '--inject', 'gremlins'], { encoding: 'utf8' });
  assert.equal(bad.status, 64);
  assert.match(bad.stderr, /must be one of nan-logits/);
});

test('nan-logits once: a 500, a step down, and up again after proof', async () => {
  await withServer(['nan-logits:after=12,for=1'], [], async (s) => {
    const before = (await s.chat({ ...count, max_tokens: 8 })).body.choices[0].message.content;
    const r = await s.chat(long);
    assert.equal(r.status, 500, r.text);
    assert.equal(r.body.error.code, 'engine_fault');
    assert.match(r.body.error.message, /not finite/);
    assert.match((await eventOf(s, 'fault.nan-logits')).message, /not finite/);
    await eventOf(s, 'ladder');
    assert.equal((await s.get('/readyz')).status, 200);
    assert.ok(await s.metric('nan_logits_total') >= 1);
    await recovered(s);
    const way = await movesUpTo(s, 2);
    assert.deepEqual(way.map((m) => [m.from, m.to, m.direction]), [['DDTREE', 'reset', 'down'], ['reset', 'DDTREE', 'up']]);
    assert.equal(way[0].fault, 'nan-logits');
    assert.equal(way[1].fault, null);
    assert.equal((await s.chat({ ...count, max_tokens: 8 })).body.choices[0].message.content, before);
  });
});

test('nan-logits in a stream: an error event ends it', async () => {
  await withServer(['nan-logits:after=12,for=1'], [], async (s) => {
    const out = joined((await s.stream('/v1/chat/completions', long)).events);
    assert.ok(out.content.length > 0);
    assert.match(out.error.message, /not finite/);
    assert.equal(out.error.code, 'engine_fault');
    assert.equal(out.done, false);
    const rows = await eventually('its row', async () => (await s.get('/admin/api/requests?error=1')).body.requests[0]);
    assert.equal(rows.finish, 'error');
  });
});

test('nan-logits for ever: down every step to exit 70, new requests 503 on the way, every request with a row', async () => {
  const server = await Server.start({ program: faultyBinary, args: [...hurry, '--inject', 'nan-logits:after=12'] });
  try {
    const states = new Set();
    while (!server.exit) {
      try {
        const h = await health(server);
        states.add(h.phase);
        states.add(h.ladder.step);
        const r = await server.chat({ ...count, max_tokens: 40 });
        assert.ok([200, 500, 503].includes(r.status), r.text);
        if (r.status === 503) assert.ok(r.headers.get('retry-after'));
      } catch (error) {
        if (error instanceof assert.AssertionError) throw error;  // else: the connection went with the process
      }
      await sleep(30);
    }
    assert.deepEqual(await server.exited, { code: 70, signal: null }, server.log.slice(-3000));
    for (const seen of ['reset', 'DFLASH', 'NONE', 'degraded']) assert.ok(states.has(seen), `${seen} was never seen: ${[...states]}`);
    assert.match(server.log, /could not be restarted|not finite/);
    await afterwards(server, async (again) => {
      const runs = (await again.get('/admin/api/runs')).body.runs;
      const run = runs.find((r) => r.exit_code === 70);
      assert.ok(run, JSON.stringify(runs));
      assert.equal(run.state, 'failed');
      const told = (await again.get(`/admin/api/events?limit=500&run=${run.id}`)).body.events;
      const steps = told.filter((e) => e.kind === 'ladder').reverse().map((e) => e.message.split(':')[0]);
      assert.deepEqual(steps.slice(0, 5), ['DDTREE → reset', 'reset → DFLASH', 'DFLASH → NONE', 'NONE → degraded', 'degraded → restart']);
      assert.ok(told.some((e) => e.kind === 'fault.nan-logits'));
    });
  } finally {
    await server.stop();
  }
});

test('nan-logits from the start: never ready, exit 70', async () => {
  const server = await Server.start({ program: faultyBinary, args: ['--inject', 'nan-logits:start=1'], ready: false });
  const statuses = new Set();
  while (!server.exit) {
    try {
      statuses.add((await fetch(`${server.url}/readyz`)).status);
    } catch { /* not listening yet, or gone */ }
    await sleep(20);
  }
  assert.deepEqual(await server.stop(), { code: 70, signal: null });
  assert.ok(!statuses.has(200));
  assert.match(server.log, /not finite/);
});

test('text that the target does not stand by: a stream ends with an error, an answer is a 500, the ladder goes down', async () => {
  const probe = await Server.start();
  const [token] = (await probe.post('/tokenize', { prompt: '!', add_special_tokens: false })).body.tokens;
  await probe.stop();
  await withServer([`garbage-text:after=12,for=330,token=${token}`], ['--canary-interval', '0'], async (s) => {
    const out = joined((await s.stream('/v1/chat/completions', { ...long, max_tokens: 450 })).events);
    assert.match(out.content, /!{32}/);
    assert.ok(out.error, `no error event: ${JSON.stringify(out).slice(0, 400)}`);
    assert.match(out.error.message, /does not stand by/);
    const e = await eventOf(s, 'text.wrong');
    assert.match(e.message, /same character '!'/);
    await eventOf(s, 'fault.wrong-text');
    const first = await eventually('a move', async () => (await moves(s))[0]);
    assert.equal(first.fault, 'wrong-text');
    assert.equal(first.to, 'reset');
    // The canary is garbled too, until the fault has gone; then the way is up again.
    await recovered(s);
  });
  await withServer([`garbage-text:after=12,for=330,token=${token}`], [], async (s) => {
    const r = await s.chat({ ...long, max_tokens: 450 });
    assert.equal(r.status, 500, r.text.slice(0, 400));
    assert.match(r.body.error.message, /does not stand by/);
  });
});

test('text that is the model\'s own is only warned of, once a stream', async () => {
  await withServer([], [], async (s) => {
    // Greedy text without an end runs into a loop sooner or later: here it does.
    const ask = { prompt: 'ha '.repeat(60), max_tokens: 400, temperature: 0, ignore_eos: true };
    const r = await s.post('/v1/completions', ask);
    assert.equal(r.status, 200, r.text);
    assert.equal(r.body.usage.completion_tokens, 400);
    const e = await eventOf(s, 'text.own');
    assert.match(e.message, /model's own: the target would have chosen otherwise at 0 of/);
    const out = joined((await s.stream('/v1/completions', ask)).events);
    assert.equal(out.content, r.body.choices[0].text);
    assert.ok(out.done);
    const told = await eventually('two warnings', async () => {
      const list = await events(s);
      return list.filter((x) => x.kind === 'text.own').length === 2 && list;
    });
    assert.ok(!told.some((x) => x.kind === 'text.wrong' || x.kind === 'ladder'), JSON.stringify(told));
  });
});

test('stuck-round for ever: /livez and /readyz 503, then exit 70 with a row for the request', async () => {
  const server = await Server.start({ program: faultyBinary, args: [...hurry, '--stuck-seconds', '1.5', '--stuck-exit-seconds', '5', '--inject', 'stuck-round:after=12,ms=0'] });
  try {
    assert.equal((await server.get('/livez')).status, 200);
    const asked = server.chat(long).then((r) => r.status, () => 'cut');
    const h = await eventually('/livez is 503', async () => {
      const r = await server.get('/livez');
      return r.status === 503 && r.body;
    }, 60);
    assert.equal((await server.get('/readyz')).status, 503);
    assert.ok(h.seconds_without_a_pass >= 1.5);
    const refused = await server.chat(count);
    assert.equal(refused.status, 503);
    assert.equal(refused.body.error.code, 'unhealthy');
    assert.match((await eventOf(server, 'fault.stuck-round')).message, /no pass has ended/);
    await eventually('phase degraded', async () => (await health(server)).phase === 'degraded');
    assert.deepEqual(await server.exited, { code: 70, signal: null }, server.log.slice(-2000));
    await asked;
    await afterwards(server, async (again) => {
      const { requests } = (await again.get('/admin/api/requests?error=1')).body;
      assert.ok(requests.some((r) => /no pass has ended/.test(r.error)), JSON.stringify(requests));
      assert.ok((await again.get('/admin/api/runs')).body.runs.some((r) => r.exit_code === 70 && /no pass has ended/.test(r.end_reason)));
    });
  } finally {
    await server.stop();
  }
});

test('stuck-round for ever, and one SIGTERM: the drain\'s time holds all the same', async () => {
  const server = await Server.start({ program: faultyBinary, args: [...hurry, '--stuck-seconds', '1.5', '--stuck-exit-seconds', '0', '--drain-timeout', '1', '--inject', 'stuck-round:after=12,ms=0'] });
  const asked = server.chat(long).then((r) => r.status, () => 'cut');
  await eventually('/livez is 503', async () => (await server.get('/livez')).status === 503, 60);
  server.signal('SIGTERM');
  const late = new Promise((done) => setTimeout(() => done('still there after 30 s'), 30_000).unref());
  assert.deepEqual(await Promise.race([server.exited, late]), { code: 0, signal: null }, server.log.slice(-2000));
  assert.match(server.log, /a round does not end/);
  await asked;
  await server.stop();
});

test('a round that is stuck for a while: not alive meanwhile, and as before afterwards', async () => {
  await withServer(['stuck-round:after=12,for=1,ms=5000'], ['--stuck-seconds', '1.5', '--stuck-exit-seconds', '60'], async (s) => {
    const asked = s.chat(long);
    await eventually('/livez is 503', async () => (await s.get('/livez')).status === 503);
    assert.equal((await asked).status, 200);
    await eventually('/livez is 200', async () => (await s.get('/livez')).status === 200);
    await eventually('ready', async () => (await health(s)).phase === 'ready');
    assert.equal((await moves(s)).length, 0);
  });
});

test('slow-round: degraded at most, and still answering', async () => {
  await withServer(['slow-round:after=6,ms=400'], ['--slow-alarm', '4', '--max-queued-requests', '8'], async (s) => {
    const load = s.chat({ ...long, max_tokens: 120, speculative_algorithm: 'NONE' });
    const e = await eventOf(s, 'fault.speed');
    assert.match(e.message, /measured costs promise/);
    const first = await eventually('a move', async () => (await moves(s))[0]);
    assert.equal(first.fault, 'speed');
    assert.equal((await s.get('/readyz')).status, 200);
    assert.equal((await load).status, 200);
  });
});

test('drafter-garbage: speed goes, answers stay, speculation is taken back and given again', async () => {
  await withServer(['drafter-garbage:after=40,for=900'], ['--speculative-ddtree-budget', '16'], async (s) => {
    const good = (await s.chat({ ...count, max_tokens: 60 })).body.choices[0].message.content;
    let down;
    await eventually('an acceptance alarm', async () => {
      const r = await Promise.all([1, 2, 3, 4].map(() => s.chat({ ...count, max_tokens: 60 })));
      for (const x of r) assert.equal(x.body.choices[0].message.content, good);
      down = (await events(s)).find((e) => e.kind === 'fault.acceptance');
      return down;
    }, 120);
    await eventually('speculation NONE', async () => (await moves(s)).some((m) => m.to === 'NONE'), 60);
    const plain = await s.chat({ ...count, max_tokens: 60 });
    assert.equal(plain.body.choices[0].message.content, good);
    assert.equal((await s.get('/readyz')).status, 200);
    // The fault ends after so many passes; the ladder finds out by itself.
    await eventually('up again', async () => {
      await s.chat({ ...count, max_tokens: 60 });
      const l = await ladder(s);
      return l.step === 'DDTREE';
    }, 180);
    assert.equal((await s.chat({ ...count, max_tokens: 60 })).body.choices[0].message.content, good);
  });
});

test('device-lost: 500, the engine is restarted while /readyz is 503; lost for good it is exit 70', async () => {
  await withServer(['device-lost:after=12,for=1'], [], async (s) => {
    const before = (await s.chat({ ...count, max_tokens: 8 })).body.choices[0].message.content;
    const r = await s.chat(long);
    assert.equal(r.status, 500, r.text);
    assert.match(r.body.error.message, /device is lost/);
    await eventually('/readyz is 503', async () => (await s.get('/readyz')).status === 503, 30);
    assert.equal((await s.get('/livez')).status, 200);
    await eventually('ready again', async () => (await s.get('/readyz')).status === 200, 120);
    assert.equal((await ladder(s)).step, 'restart');
    assert.equal((await s.chat({ ...count, max_tokens: 8 })).body.choices[0].message.content, before);
    await eventOf(s, 'fault.device-lost');
    await recovered(s);
    assert.deepEqual((await movesUpTo(s, 2)).map((m) => m.to), ['restart', 'DDTREE']);
    await s.idle();
  });
  const server = await Server.start({ program: faultyBinary, args: [...hurry, '--inject', 'device-lost:after=12'] });
  const r = await server.chat(long);
  assert.equal(r.status, 500);
  assert.deepEqual(await server.exited, { code: 70, signal: null }, server.log.slice(-2000));
  assert.match(server.log, /could not be restarted .*device is lost/);
  await server.stop();
});

test('a rank that is lost: requests fail with its name, and exit 70 at once, without a restart', async () => {
  const server = await Server.start({ program: faultyBinary, args: [...hurry, '--tp-size', '2', '--device', 'cpu', '--inject', 'rank-lost:after=12'] });
  try {
    const r = await server.chat(long);
    assert.equal(r.status, 500, r.text);
    assert.match(r.body.error.message, /rank 1 of 2: gone/);
    assert.deepEqual(await server.exited, { code: 70, signal: null }, server.log.slice(-2000));
    assert.doesNotMatch(server.log, /restart/);
    await afterwards(server, async (again) => {
      assert.ok((await again.get('/admin/api/runs')).body.runs.some((run) => run.exit_code === 70 && /rank 1 of 2/.test(run.end_reason)));
    });
  } finally {
    await server.stop();
  }
});

test('an engine that was restarted leaves nothing of itself in memory', async () => {
  await withServer(['device-lost:after=100,for=1,every=1200'], ['--ladder-proof', '0.5', '--context-length', '1024'], async (s) => {
    const resident = () => Number(readFileSync(`/proc/${s.child.pid}/statm`, 'utf8').split(' ')[1]) * 4096 / (1 << 20);
    // The first rounds fill what the engine fills once: a level is taken after them.
    await s.chat({ ...count, max_tokens: 8 });
    const start = resident();
    const after = [];
    for (let n = 0; n < 2; ++n) {
      await eventually('the device is lost', async () => (await s.chat(long)).status !== 200, 120);
      await eventually('ready again', async () => (await s.get('/readyz')).status === 200, 120);
      await recovered(s);
      after.push(resident());
    }
    // 26 and 62 MiB more while the second engine's pools came from recycled heap (src/ops/cpu/storage.h); 1 since they do not.
    assert.ok(after.at(-1) - start < 12, `${start.toFixed(1)} MiB, after each restart ${after.map((r) => r.toFixed(1)).join(', ')}`);
  });
});

test('oom: a 500 for what was in the pass, a step down, and on', async () => {
  await withServer(['oom:after=12,for=1'], [], async (s) => {
    const r = await s.chat(long);
    assert.equal(r.status, 500);
    assert.match(r.body.error.message, /no memory/);
    await eventOf(s, 'fault.out-of-memory');
    assert.equal((await eventually('a move', async () => (await moves(s))[0])).to, 'reset');
    assert.equal((await s.chat({ ...count, max_tokens: 8 })).status, 200);
    await recovered(s);
  });
});

for (const fault of ['store-full:for=6', 'store-locked:seconds=9'])
  test(`${fault}: answers as ever, the history says what it misses, and nothing is lost`, async () => {
    await withServer([fault], [], async (s) => {
      const h = await eventually('the history cannot be written', async () => {
        assert.equal((await s.chat({ ...count, max_tokens: 4 })).status, 200);
        const now = await health(s);
        return now.history.writable === false && now;
      }, 60);
      assert.ok(h.history.message);
      assert.equal((await s.get('/readyz')).status, 200);
      await eventually('the phase says it', async () => /history cannot be written/.test((await health(s)).message));
      assert.equal((await health(s)).phase, 'ready');
      await eventually('written again', async () => (await health(s)).history.writable, 60);
      const done = await s.metric('store_dropped_rows_total');
      assert.equal(done, 0);
      await eventOf(s, 'store.writable');
      const { total } = (await s.get('/admin/api/requests?limit=1')).body;
      assert.ok(total >= 1);
    });
  });

test('/health_generate on a busy server: the canary goes before all that wait; where its pages are taken, the passes are the answer', async () => {
  const slow = ['slow-round:ms=40'];
  const endless = { ...long, max_tokens: 400, speculative_algorithm: 'NONE' };
  await withServer(slow, ['--max-running-requests', '2', '--context-length', '512', '--max-queued-requests', '3', '--drain-timeout', '0', '--slow-alarm', '1e9'], async (s) => {
    const queued = Array.from({ length: 5 }, () => s.chat(endless));
    await eventually('two run, three wait', async () => await s.metric('num_requests_running') >= 2 && await s.metric('num_requests_waiting') === 3);
    assert.equal((await s.chat(endless)).status, 429);
    const r = await s.get('/health_generate');
    assert.equal(r.status, 200, r.text);
    assert.equal(r.body.verdict, 'pass', r.text);
    assert.equal(await s.metric('num_requests_waiting'), 3, 'no client has been answered meanwhile');
    s.signal('SIGTERM');
    await Promise.allSettled(queued);
  });
  // One request reserves 16 of 17 pages for its answer.
  await withServer(slow, ['--max-running-requests', '2', '--context-length', '512', '--kv-pages', '17', '--drain-timeout', '0', '--slow-alarm', '1e9'], async (s) => {
    const running = s.chat({ ...endless, max_tokens: 470 });
    await eventually('it runs', async () => await s.metric('num_requests_running') === 1);
    const r = await s.get('/health_generate');
    assert.equal(r.status, 200, r.text);
    assert.equal(r.body.verdict, 'busy', r.text);
    assert.match(r.body.reason, /1 requests run, 1 wait, and \d+ passes ended in the last 1\d s/);
    s.signal('SIGTERM');
    await Promise.allSettled([running]);
  });
});

test('/health_generate answers with text, speed and a verdict', async () => {
  await withServer(['garbage-text:after=200,token=5'], [], async (s) => {
    const r = await s.get('/health_generate');
    assert.equal(r.status, 200, r.text);
    assert.equal(r.body.verdict, 'pass');
    assert.match(r.body.text, /37, 38/);
    assert.ok(r.body.tokens_per_second > 0);
    // Together they share one canary.
    const passes = await s.metric('passes_total');
    const many = await Promise.all(Array.from({ length: 10 }, () => s.get('/health_generate')));
    for (const m of many) assert.equal(m.status, 200);
    assert.ok(await s.metric('passes_total') - passes < 140);
    assert.equal(await s.metric('canary_ok'), 1);
    await eventually('the fault shows', async () => {
      const now = await s.get('/health_generate');
      return now.status === 503 && now.body.verdict === 'fail' && /otherwise than at the start/.test(now.body.reason);
    }, 60);
    s.expectedExit = s.exit?.code ?? 0;
  });
});
