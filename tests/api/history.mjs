// The past: `ddtree history` beside a server that writes it, a disk that fills while requests run, smoke tests that are no clients'.
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { Server, binary, eventually } from './support/server.mjs';

const ask = (text, more = {}) => ({ messages: [{ role: 'user', content: text }], temperature: 0, max_tokens: 24, ...more });
const history = (...args) => spawnSync(binary, ['history', ...args], { encoding: 'utf8', env: { ...process.env, TZ: 'UTC' } });

let server;
before(async () => {
  server = await Server.start();
});
after(async () => {
  await server?.stop();
});

test('ddtree history reads beside the server, as text and as the API\'s JSON', async () => {
  const ids = [];
  for (const name of ['Ann', 'Bob', 'Eve', 'Max', 'Zoe']) ids.push((await server.chat(ask(`Say hello to ${name}.`))).body.id);
  const admin = async (path) => (await server.get(`/admin/api/${path}`)).body;
  await eventually('the rows are written', async () => (await admin('requests')).total === 5);
  const at = ['--db', server.db];
  const json = (...args) => {
    const r = history(...args, ...at, '--json');
    assert.equal(r.status, 0, r.stderr);
    return JSON.parse(r.stdout);
  };
  const requests = json('requests', '--limit', '3');
  assert.equal(requests.total, 5);
  assert.deepEqual(requests.requests.map((r) => r.id), ids.slice(2).reverse());
  assert.deepEqual(requests.summary, await admin('requests/summary'));
  assert.deepEqual(json('acceptance'), await admin('acceptance'));
  assert.deepEqual(json('smoke').runs, (await admin('smoke')).runs);
  const runs = json('runs').runs;
  assert.equal(runs.length, 1);
  assert.equal(runs[0].state, 'running');
  assert.deepEqual(runs[0].phases.map((p) => p.phase), (await admin('runs/1')).phases.map((p) => p.phase));
  assert.equal(json('requests', '--since', '1m').total, 5);
  assert.equal(json('requests', '--since', '2999-01-01').total, 0);
  assert.equal(json('requests', '--run', '1').total, 5);
  for (const view of ['requests', 'events', 'acceptance', 'smoke', 'runs']) assert.equal(history(view, '--run', '7', ...at).status, 64, view);
  assert.ok(Array.isArray(json('events').events));

  const text = (...args) => {
    const r = history(...args, ...at);
    assert.equal(r.status, 0, r.stderr);
    return r.stdout;
  };
  assert.match(text(), /running +0\.1\.0[^\n]*pass +5 +0[\s\S]*weights [\d.]+ m?s[\s\S]*ready /);
  assert.match(text('requests'), /5 requests, 0 with an error[\s\S]*p50 +p90 +p95 +p99[\s\S]*tokens a round/);
  const acceptance = await admin('acceptance');
  assert.ok(text('acceptance').includes(`${acceptance.speculative.rounds} rounds of 5 requests, ${acceptance.speculative.tokens_per_round.toFixed(2)} tokens a round`));
  assert.match(text('acceptance'), /mode +requests[\s\S]*DDTREE +5/);
  assert.match(text('smoke'), /start +0\.1\.0 +pass/);
  assert.match(text('events'), /No event is recorded|severity/);

  // Wrong words name themselves and say what would be right.
  for (const [args, words] of [[['days'], /"days" is no view; it must be runs, events/], [['--since', 'noon'], /--since is "noon", but must be like 90m/], [['--limit', '0'], /--limit is "0", but must be/], [['--limt'], /no flag --limt/], [['--db'], /--db needs a value/],
    [['runs', '1'], /nothing to stand beside/], [['events', '1', '2'], /only with the views runs and smoke/], [['runs', '1', '99'], /no start 99/]]) {
    const r = history(...args, ...(args.includes('--db') ? [] : at));
    assert.equal(r.status, 64, `${args}: ${r.stderr}`);
    assert.match(r.stderr, words);
  }
  const nowhere = history('--db', join(tmpdir(), 'no-such.db'));
  assert.equal(nowhere.status, 69);
  assert.match(nowhere.stderr, /there is no history yet/);
  assert.match(history('--help').stdout, /usage: ddtree history[\s\S]*--since[\s\S]*--json[\s\S]*Exit codes: 0 [\s\S]*64 [\s\S]*69 [\s\S]*75 /);
});

test('a smoke test beside the traffic is in no counter of the clients\'', async () => {
  const counters = async () => {
    const { engine } = (await server.get('/admin/api/status')).body;
    return Object.fromEntries(['finished', 'cancelled', 'failed', 'prompt_tokens', 'completion_tokens', 'rounds', 'drafted', 'accepted', 'accepted_at'].map((n) => [n, engine[n]]));
  };
  const own = async () => Number(/^ddtree:own_requests_total (\d+)/m.exec((await server.get('/metrics')).text)[1]);
  const [before_, ownBefore] = [await counters(), await own()];
  assert.equal(before_.finished, 5);
  assert.ok(before_.rounds > 0 && ownBefore > 0);
  assert.equal((await server.post('/admin/api/smoke/run', {})).status, 202);
  await eventually('the second smoke run', async () => (await server.get('/admin/api/smoke')).body.total === 2, 120);
  assert.deepEqual(await counters(), before_);
  assert.ok((await own()) > ownBefore);
  const { runs } = (await server.get('/admin/api/smoke')).body;
  const compared = history('smoke', `${runs[1].id}`, `${runs[0].id}`, '--db', server.db);
  assert.equal(compared.status, 0, compared.stderr);
  assert.match(compared.stdout, /equals-plain +DDTREE[^\n]*the same/);
});

test('a disk that fills while requests run costs history, never an answer; and it recovers', async (t) => {
  const disk = mkdtempSync(join(tmpdir(), 'ddtree-disk-'));
  if (spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=2m', 'none', disk]).status !== 0) {
    rmSync(disk, { recursive: true });
    return t.skip('this user may not mount a small disk');
  }
  t.after(() => {
    spawnSync('umount', ['-l', disk]);
    rmSync(disk, { recursive: true, force: true });
  });
  const small = await Server.start({ args: ['--skip-smoke', '--db', join(disk, 'h.db')] });
  t.after(() => small.stop());
  assert.equal((await small.chat(ask('Say hello to Ann.'))).status, 200);
  const filler = join(disk, 'filler');
  assert.throws(() => { for (let size = 4096; ; size += 4096) writeFileSync(filler, 'x'.repeat(4096), { flag: 'a' }); }, /ENOSPC/);
  await eventually('the history says that it cannot be written', async () => {
    const r = await small.chat(ask('Say hello to Bob.'));
    assert.equal(r.status, 200);
    assert.ok(r.body.choices[0].message.content.length > 0);
    return (await small.get('/health')).body.history.writable === false;
  });
  const health = await small.get('/health');
  assert.equal(health.status, 200, 'a full disk is no reason to be unready');
  assert.match(health.body.history.message, /full|I\/O/);
  const status = (await small.get('/admin/api/status')).body.store;
  assert.ok(status.failing_since > 0 && status.queued_rows >= 0);
  const events = (await small.get('/admin/api/events')).body.events;
  assert.ok(events.some((e) => e.kind === 'store.unwritable'), JSON.stringify(events));
  assert.match((await small.get('/metrics')).text, /^ddtree:store_writable 0$/m);
  const last = (await small.chat(ask('Say hello to Eve.'))).body.id;
  assert.equal(small.log.split('\n').filter((l) => /history: cannot be written/.test(l)).length, 1, 'said more than once');
  rmSync(filler);
  await eventually('the history can be written', async () => (await small.get('/health')).body.history.writable);
  await eventually('what waited is there', async () => (await small.get(`/admin/api/requests/${last}`)).body.id === last && (await small.get('/admin/api/requests?limit=1')).body.requests[0].id === last);
  await eventually('both events are kept', async () => (await small.get('/admin/api/events?kind=store.')).body.events.map((e) => e.kind).join() === 'store.writable,store.unwritable');
});
