// The service around the answers: start-up phases, keys, limits, queue, draining, exit codes.
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import net from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { test } from 'node:test';
import { Server, binary, eventually, rawPost } from './support/server.mjs';

const hello = [{ role: 'user', content: 'Say hello to Carol.' }];
const long = { messages: [{ role: 'user', content: 'Tell me a short story about a horse.' }], ignore_eos: true, temperature: 0 };

test('until the smoke test has passed everything is a 503 with the phase; then READY', async () => {
  const server = await Server.start({ ready: false });
  try {
    const seen = new Set();
    await eventually('ready', async () => {
      let r;
      try {
        r = await server.get('/v1/models');
      } catch {
        return false;  // not listening yet
      }
      if (r.status === 200) return true;
      assert.equal(r.status, 503);
      assert.ok(Number(r.headers.get('retry-after')) > 0);
      assert.equal(r.body.error.code, 'loading');
      seen.add(r.body.error.phase);
      // A phase may end between two requests; whatever it is, a chat is answered in the same words.
      const chat = await server.chat({ messages: hello });
      if (chat.status !== 200) assert.equal(chat.status, 503);
      return false;
    }, 240);
    assert.ok(seen.size >= 1, 'no phase was seen before ready');
    assert.match(server.log, /dashboard is at http:\/\/127\.0\.0\.1:\d+\//);
  } finally {
    assert.deepEqual(await server.stop(), { code: 0, signal: null });
  }
});

test('--skip-smoke serves, and says so wherever readiness is shown', async () => {
  const server = await Server.start({ args: ['--skip-smoke', '--served-model-name', 'a', 'b', '--context-length', '512'] });
  try {
    const ready = (await server.get('/readyz')).body;
    assert.equal(ready.smoke, 'skipped');
    assert.match(ready.warning, /skip/);
    const models = (await server.get('/v1/models')).body;
    assert.equal(models.smoke, 'skipped');
    assert.deepEqual(models.data.map((m) => m.id), ['a', 'b']);
    assert.equal(models.data[0].max_model_len, 512);
    assert.match(server.log, /smoke test was skipped/);
    const r = await server.chat({ model: 'b', messages: hello });
    assert.equal(r.body.model, 'b');
    assert.equal((await server.chat({ model: 'tiny', messages: hello })).status, 404);
  } finally {
    await server.stop();
  }
});

test('with --api-key everything but the probes asks for it', async () => {
  const server = await Server.start({ args: ['--skip-smoke', '--api-key', 's3cret'] });
  try {
    assert.equal((await server.get('/health')).status, 200);
    const no = await server.get('/v1/models');
    assert.equal(no.status, 401);
    assert.equal(no.body.error.type, 'authentication_error');
    assert.equal((await server.get('/v1/models', { authorization: 'Bearer s3cret' })).status, 200);
    assert.equal((await server.get('/v1/models', { authorization: 'Bearer s3cret2' })).status, 401);
    assert.equal((await server.chat({ messages: hello })).status, 401);
    assert.equal((await server.get('/metrics')).status, 401);
    assert.ok(!server.log.includes('s3cret'));
  } finally {
    await server.stop();
  }
});

test('limits: body 413, queue 429 with Retry-After, and none hangs (J4)', async () => {
  const server = await Server.start({ args: ['--skip-smoke', '--max-body-size', '100KiB', '--max-running-requests', '2', '--max-queued-requests', '4'] });
  try {
    const big = await server.post('/v1/chat/completions', { messages: [{ role: 'user', content: 'x'.repeat(200_000) }] });
    assert.equal(big.status, 413);
    assert.equal(big.body.error.code, 'request_too_large');
    const replies = await Promise.all(Array.from({ length: 30 }, () => server.chat({ ...long, max_tokens: 300 })));
    const count = (status) => replies.filter((r) => r.status === status).length;
    assert.equal(count(200) + count(429), 30);
    assert.ok(count(200) >= 6, `only ${count(200)} were served`);
    assert.ok(count(429) >= 1, 'the queue never filled');
    for (const r of replies.filter((x) => x.status === 429)) {
      assert.equal(r.body.error.code, 'server_overloaded');
      assert.equal(r.body.error.type, 'rate_limit_error');
      assert.ok(Number(r.headers.get('retry-after')) >= 1);
    }
    assert.equal(new Set(replies.filter((r) => r.status === 200).map((r) => r.body.choices[0].message.content)).size, 1);
    await server.idle();
  } finally {
    await server.stop();
  }
});

test('eight abandoned streams free their slots (J1)', async () => {
  const server = await Server.start({ args: ['--skip-smoke'] });
  try {
    const requests = Array.from({ length: 8 }, () => rawPost(server.port, '/v1/chat/completions', { ...long, max_tokens: 3000, stream: true }));
    await Promise.all(requests.map((r) => new Promise((first) => r.on('response', (res) => res.once('data', first)))));
    assert.ok(await server.metric('num_requests_running') > 0);
    for (const r of requests) r.destroy();
    await server.idle();
    assert.equal(await server.metric('requests_cancelled_total'), 8);
    assert.equal((await server.chat({ messages: hello })).status, 200);
  } finally {
    await server.stop();
  }
});

test('SIGTERM drains: running requests finish, new ones are a 503, exit 0', async () => {
  const server = await Server.start({ args: ['--skip-smoke'] });
  let response = '';
  const request = rawPost(server.port, '/v1/chat/completions', { ...long, max_tokens: 1500, stream: true });
  const ended = new Promise((done) => request.on('response', (res) => { res.on('data', (d) => { response += d; }); res.on('end', done); res.on('error', done); }));
  await eventually('the stream began', () => response.includes('"content"'));
  server.signal('SIGTERM');
  const refused = await eventually('draining', async () => {
    const r = await server.chat({ messages: hello });
    return r.status === 503 && r;
  });
  assert.equal(refused.body.error.code, 'draining');
  assert.equal(refused.body.error.phase, 'draining');
  assert.ok(Number(refused.headers.get('retry-after')) > 0);
  await ended;
  assert.match(response, /"finish_reason":"length"/);
  assert.match(response, /data: \[DONE\]\n\n$/);
  assert.deepEqual(await server.exited, { code: 0, signal: null });
  await server.stop();
});

test('a drain that takes too long cancels what runs', async () => {
  const server = await Server.start({ args: ['--skip-smoke', '--drain-timeout', '0.2'] });
  const request = rawPost(server.port, '/v1/chat/completions', { ...long, max_tokens: 3500, stream: true });
  let response = '';
  request.on('response', (res) => res.on('data', (d) => { response += d; }).on('error', () => {}));
  await eventually('the stream began', () => response.includes('"content"'));
  const whole = server.chat({ ...long, max_tokens: 3500 });
  await eventually('both run', async () => (await server.get('/admin/api/status')).body.engine.running === 2);
  server.signal('SIGTERM');
  // Half an answer must not pass for a whole one.
  const cut = await whole;
  assert.equal(cut.status, 503);
  assert.equal(cut.body.error.code, 'draining');
  assert.deepEqual(await server.exited, { code: 0, signal: null });
  assert.match(response, /"code":"draining"/);
  assert.doesNotMatch(response, /\[DONE\]|"finish_reason":"c/);
  await server.stop();
});

test('a second signal stops at once', async () => {
  const server = await Server.start({ args: ['--skip-smoke'] });
  const request = rawPost(server.port, '/v1/chat/completions', { ...long, max_tokens: 3500, stream: true });
  let began = false;
  request.on('response', (res) => res.on('data', () => { began = true; }).on('error', () => {}));
  await eventually('the stream began', () => began);
  server.signal('SIGINT');
  await eventually('draining', async () => (await server.get('/readyz')).status === 503);
  await sleep(150);  // at once it would be the same wish
  server.signal('SIGINT');
  assert.equal((await server.exited).code, 0);
  await server.stop();
});

test('two signals within a moment, as timeout(1) sends them to a process and its group, are one wish: it drains', async () => {
  const server = await Server.start({ args: ['--skip-smoke'] });
  const running = server.chat({ ...long, max_tokens: 1200, speculative_algorithm: 'NONE' });
  await eventually('it runs', async () => await server.metric('num_requests_running') === 1);
  server.signal('SIGTERM');
  await sleep(5);  // the first has been taken: two that wait are one for the kernel already
  server.signal('SIGTERM');
  const answer = await running;
  assert.equal(answer.status, 200, 'the running request may finish');
  assert.equal(answer.body.metrics.speculative_decoding.num_spec_tokens, 0, 'NONE drafts nothing');
  assert.deepEqual(await server.exited, { code: 0, signal: null }, server.log);
  assert.doesNotMatch(server.log, /stopped at once/);
  await server.stop();
});

test('a closed terminal drains; signals that mean nothing here are named in the log and change nothing; nohup holds', async () => {
  const server = await Server.start({ args: ['--skip-smoke'], env: { NOTIFY_SOCKET: '/nowhere/notify', WATCHDOG_USEC: '60s' } });
  for (const name of ['SIGUSR1', 'SIGUSR2', 'SIGALRM', 'SIGVTALRM', 'SIGIO', 'SIGPWR']) {
    server.signal(name);
    await eventually(`${name} is in the log`, () => new RegExp(` W ${name} was sent and is ignored; SIGTERM stops`).test(server.log));
    assert.equal((await server.get('/readyz')).status, 200, name);
  }
  assert.equal(server.log.match(/WATCHDOG_USEC is "60s", but must be a whole number of microseconds/g).length, 1);
  assert.equal(server.log.match(/NOTIFY_SOCKET=\/nowhere\/notify: No such file or directory/g).length, 1);
  const running = server.chat({ ...long, max_tokens: 1200, speculative_algorithm: 'NONE' });
  await eventually('it runs', async () => await server.metric('num_requests_running') === 1);
  server.signal('SIGHUP');
  await eventually('draining', async () => (await server.get('/readyz')).status === 503);
  server.signal('SIGHUP');  // the shell tells it, and so does the kernel: no second signal that stops at once
  assert.equal((await running).status, 200, 'the running request may finish');
  assert.deepEqual(await server.exited, { code: 0, signal: null }, server.log);
  assert.match(server.log, /SIGHUP: draining/);
  assert.doesNotMatch(server.log, /stopped at once/);
  await server.stop();

  const folder = mkdtempSync(join(tmpdir(), 'ddtree-nohup-'));
  const program = join(folder, 'nohup-ddtree');
  writeFileSync(program, `#!/bin/sh\ntrap '' HUP\nexec '${binary}' "$@"\n`, { mode: 0o755 });
  const kept = await Server.start({ args: ['--skip-smoke'], program });
  kept.signal('SIGHUP');
  kept.signal('SIGUSR2');
  await eventually('what came after it is heard', () => /SIGUSR2 was sent/.test(kept.log));
  assert.equal((await kept.get('/readyz')).status, 200);
  assert.deepEqual(await kept.stop(), { code: 0, signal: null });
  rmSync(folder, { recursive: true });
});

test('a stop while loading is heard at once and is no failure', async () => {
  for (const after of [0, 100, 400, 1000]) {
    const server = await Server.start({ ready: false });
    await eventually('it listens', async () => {
      try {
        return (await server.get('/livez')).status > 0;
      } catch {
        return false;
      }
    });
    await new Promise((done) => setTimeout(done, after));
    server.signal('SIGTERM');
    assert.deepEqual(await server.exited, { code: 0, signal: null }, server.log);
    assert.doesNotMatch(server.log, /[Ff]ailed/);
    assert.doesNotMatch(server.log, /stopped at once/);  // one signal: the history is closed, the run did not crash
    await server.stop();
  }
});

// The last moments before ready: the canary's first answers are asked for, and an engine that drains takes none.
test('a stop just before the server is ready is heard at once too', async () => {
  for (const after of [0, 10, 50, 150]) {
    const server = await Server.start({ ready: false, args: ['--skip-smoke'] });
    await eventually('costs are measured', () => /measured in/.test(server.log));
    await new Promise((done) => setTimeout(done, after));
    server.signal('SIGTERM');
    const late = new Promise((done) => setTimeout(() => done('still there after 20 s'), 20_000).unref());
    assert.deepEqual(await Promise.race([server.exited, late]), { code: 0, signal: null }, server.log);
    await server.stop();
  }
});

test('exit codes: flags 64, model files 65, a port in use 69', async () => {
  const run = (...args) => spawnSync(binary, ['serve', ...args], { encoding: 'utf8', timeout: 60_000 });
  const unknown = run('--modle-path', 'x');
  assert.equal(unknown.status, 64);
  assert.match(unknown.stderr, /did you mean --model-path\?/);
  const tp = run('--tp-size', '2');
  assert.equal(tp.status, 64);
  assert.match(tp.stderr, /--tp-size 2 is not built for CUDA cards/);
  const eight = run('--tp-size', '8', '--device', 'cpu', '--port', '0');
  assert.equal(eight.status, 64);
  assert.match(eight.stderr, /--tp-size 8: .*num_attention_heads 4 does not divide by it; 1, 2 and 4 can/);
  assert.equal(run('--help').status, 0);
  const folder = mkdtempSync(join(tmpdir(), 'ddtree-exit-'));
  const db = join(folder, 'h.db');
  const occupied = net.createServer().listen(0, '127.0.0.1');
  await once(occupied, 'listening');
  const port = `${occupied.address().port}`;
  const busy = run('--port', port, '--db', db);
  assert.equal(busy.status, 69);
  assert.match(busy.stderr, new RegExp(`127\\.0\\.0\\.1:${port} is in use`));
  occupied.close();
  const missing = run('--port', '0', '--db', db, '--model-path', '/nowhere/model');
  assert.equal(missing.status, 65);
  assert.match(missing.stderr, /\/nowhere\/model/);
  assert.equal(run('--port', '0', '--db', db, '--speculative-algorithm', 'DFLASH', '--speculative-draft-model-path', '/nowhere').status, 65);
  rmSync(folder, { recursive: true, force: true });
});

test('the history keeps requests over a restart, text only if asked for', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'ddtree-history-'));
  const db = join(folder, 'h.db');
  const args = ['--skip-smoke', '--db', db];
  const first = await Server.start({ args });
  const id = (await first.chat({ messages: hello })).body.id;
  await first.stop();
  const bytes = spawnSync('python3', ['-c', `import sqlite3,json
c=sqlite3.connect(${JSON.stringify(db)})
print(json.dumps([list(r) for r in c.execute("select * from request")], default=str))`], { encoding: 'utf8' });
  assert.equal(bytes.status, 0, bytes.stderr);
  assert.ok(bytes.stdout.includes(id));
  assert.ok(!bytes.stdout.includes('Carol'), 'text was stored although --store-text was not given');
  const second = await Server.start({ args: [...args, '--store-text'] });
  await second.chat({ messages: hello });
  await second.stop();
  const again = spawnSync('python3', ['-c', `import sqlite3,json
c=sqlite3.connect(${JSON.stringify(db)})
print(json.dumps([list(r) for r in c.execute("select * from request")], default=str))`], { encoding: 'utf8' });
  assert.ok(again.stdout.includes(id));
  assert.ok(again.stdout.includes('Carol'));
  rmSync(folder, { recursive: true, force: true });
});
