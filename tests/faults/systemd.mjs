// What systemd would hear: a stub of its socket, read beside the real server.
import assert from 'node:assert/strict';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import { NotifySocket } from '../api/support/notify.mjs';
import { Server, eventually, faultyBinary, sleep } from '../api/support/server.mjs';

const long = { messages: [{ role: 'user', content: 'List the numbers from 35 to 61.' }], max_tokens: 400, ignore_eos: true };

async function withStub(body) {
  const folder = mkdtempSync(join(tmpdir(), 'ddtree-notify-'));
  const socket = await NotifySocket.listen(join(folder, 'notify'));
  try {
    await body(socket.path, socket.heard);
  } finally {
    await socket.close();
    rmSync(folder, { recursive: true, force: true });
  }
}

const at = (heard, line) => heard.findIndex((h) => h.line === line);
const starts = (heard, prefix) => heard.filter((h) => h.line.startsWith(prefix));

test('EXTEND_TIMEOUT_USEC in phases, READY=1 after the smoke test, WATCHDOG=1 while idle and progressing, STOPPING=1', async () => {
  await withStub(async (path, heard) => {
    const s = await Server.start({ args: ['--drain-timeout', '5'], env: { NOTIFY_SOCKET: path, WATCHDOG_USEC: '2000000' } });
    await eventually('READY=1', () => at(heard, 'READY=1') >= 0);
    const ready = at(heard, 'READY=1');
    const before = heard.slice(0, ready).map((h) => h.line);
    for (const words of [/^STATUS=Loading weights/, /^STATUS=Measuring costs/, /^STATUS=Running the smoke test/])
      assert.ok(before.some((l) => words.test(l)), `${words} was not said before READY=1: ${before}`);
    assert.ok(before.filter((l) => l.startsWith('EXTEND_TIMEOUT_USEC=')).length >= 3, before.join('\n'));
    assert.ok(!before.some((l) => l === 'STOPPING=1'));
    assert.equal((await s.get('/health')).body.smoke, 'pass');
    // Idle.
    const idle = starts(heard, 'WATCHDOG=1').length;
    await eventually('pings while idle', () => starts(heard, 'WATCHDOG=1').length >= idle + 3, 30);
    // Progressing.
    const busy = starts(heard, 'WATCHDOG=1').length;
    const load = (async () => {
      while (starts(heard, 'WATCHDOG=1').length < busy + 3) assert.equal((await s.chat(long)).status, 200);
    })();
    await eventually('pings under load', () => starts(heard, 'WATCHDOG=1').length >= busy + 3, 60);
    await load;
    assert.equal(starts(heard, 'READY=1').length, 1);
    assert.deepEqual(await s.stop(), { code: 0, signal: null });
    await eventually('STOPPING=1', () => at(heard, 'STOPPING=1') > ready);
    assert.ok(heard.some((h) => h.line.startsWith('STATUS=Stopped')), heard.slice(-4).map((h) => h.line).join('\n'));
  });
});

test('a stuck round: no more pings, /livez 503 within its time', async () => {
  await withStub(async (path, heard) => {
    const args = ['--stuck-seconds', '3', '--stuck-exit-seconds', '0', '--inject', 'stuck-round:after=12,ms=0', '--drain-timeout', '0'];
    const s = await Server.start({ program: faultyBinary, args, env: { NOTIFY_SOCKET: path, WATCHDOG_USEC: '1000000' } });
    const asked = s.chat(long).catch(() => {});
    const begun = performance.now();
    await eventually('/livez is 503', async () => (await s.get('/livez')).status === 503, 60);
    assert.ok(performance.now() - begun < 60_000);
    await sleep(300);  // a ping that was on its way
    const pings = starts(heard, 'WATCHDOG=1').length;
    assert.ok(pings > 0);
    await sleep(4000);  // eight pings' time
    assert.equal(starts(heard, 'WATCHDOG=1').length, pings);
    assert.ok(heard.some((h) => /^STATUS=.*a round is stuck/.test(h.line)));
    // A second signal stops it at once, stuck as it is.
    s.signal('SIGTERM');
    await eventually('it drains', () => s.log.includes('draining'));
    await sleep(150);  // at once it would be the same wish
    s.signal('SIGTERM');
    assert.deepEqual(await s.exited, { code: 0, signal: null });
    await asked;
    await s.stop();
  });
});

test('a model that fails the smoke test never says READY=1', async () => {
  await withStub(async (path, heard) => {
    const s = await Server.start({ program: faultyBinary, args: ['--inject', 'nan-logits:start=1'], ready: false, env: { NOTIFY_SOCKET: path } });
    assert.deepEqual(await s.exited, { code: 70, signal: null });
    await s.stop();
    await eventually('its failure is said', () => heard.some((h) => /^STATUS=Failed: /.test(h.line)));
    assert.equal(at(heard, 'READY=1'), -1);
  });
});
