// The unit's rules: which ends of the server lead to a new start. The evaluator itself first, against the table of
// systemd.service(5), then the unit that is shipped.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { command, environmentFile, parseUnit, restarts, resultOf, seconds, value, words } from './support/unit.mjs';

const shipped = parseUnit(readFileSync(new URL('../../packaging/systemd/ddtree.service', import.meta.url), 'utf8'));
const unit = (...lines) => parseUnit(['[Service]', ...lines].join('\n'));

test('the evaluator agrees with the table of Restart= in systemd.service(5)', () => {
  const ends = { clean: { code: 0 }, 'clean signal': { signal: 'SIGTERM' }, 'unclean code': { code: 1 }, signal: { signal: 'SIGKILL' }, 'core dump': { signal: 'SIGSEGV', core: true }, timeout: { timeout: true }, watchdog: { watchdog: true } };
  const table = {
    no: [],
    always: Object.keys(ends),
    'on-success': ['clean', 'clean signal'],
    'on-failure': ['unclean code', 'signal', 'core dump', 'timeout', 'watchdog'],
    'on-abnormal': ['signal', 'core dump', 'timeout', 'watchdog'],
    'on-abort': ['signal', 'core dump'],
    'on-watchdog': ['watchdog'],
  };
  for (const [policy, causes] of Object.entries(table))
    for (const [name, end] of Object.entries(ends))
      assert.equal(restarts(unit(`Restart=${policy}`), end), causes.includes(name), `Restart=${policy}, ${name}`);
  assert.equal(restarts(unit('Type=simple'), { code: 1 }), false, 'Restart= is no by default');
});

test('exceptions to Restart=: prevent before force, names and numbers, success status, stop, reset', () => {
  const both = unit('Restart=on-failure', 'RestartPreventExitStatus=64 DATAERR', 'RestartPreventExitStatus=SIGKILL', 'RestartForceExitStatus=64 0');
  assert.equal(restarts(both, { code: 64 }), false);
  assert.equal(restarts(both, { code: 65 }), false);
  assert.equal(restarts(both, { signal: 'SIGKILL' }), false);
  assert.equal(restarts(both, { code: 0 }), true);
  assert.equal(restarts(both, { code: 66 }), true);
  assert.equal(restarts(both, { code: 66 }, { stopped: true }), false);
  assert.equal(restarts(unit('Restart=on-failure', 'SuccessExitStatus=75'), { code: 75 }), false);
  assert.equal(restarts(unit('Restart=on-failure', 'RestartPreventExitStatus=65', 'RestartPreventExitStatus='), { code: 65 }), true);
});

test('a notify service that ends before READY=1 never was: protocol, not success', () => {
  const notify = unit('Type=notify', 'Restart=on-failure');
  assert.equal(resultOf(notify, { code: 0 }, false), 'protocol');
  assert.equal(restarts(notify, { code: 0 }, { ready: false }), true);
  assert.equal(resultOf(notify, { code: 0 }, true), 'success');
  assert.equal(resultOf(unit('Type=simple'), { code: 0 }, false), 'success');
});

test('unit files and command lines are read as systemd.syntax(7) says', () => {
  const u = parseUnit('[Service]\n# note\nExecStart=/bin/a --x "b c" \\\n# in between\n  $MORE ${ONE} it\\\'s\n[Unit]\nAfter=a\nAfter=\nAfter=b\n');
  assert.deepEqual(command(u, { MORE: 'p "q r"', ONE: 's t' }), ['/bin/a', '--x', 'b c', 'p', 'q r', 's t', "it's"]);
  assert.equal(value(u, 'Unit', 'After'), 'b');
  assert.deepEqual(environmentFile('# c\nA="x y"\n;B=1\nC=\'z\'\n'), { A: 'x y', C: 'z' });
  assert.deepEqual(words(''), []);
  assert.equal(seconds('1min 30s'), 90);
});

test('the shipped unit restarts where that can help, and only there', () => {
  // design.md section 7's exit codes.
  for (const code of [64, 65, 69, 71]) for (const ready of [false, true]) assert.equal(restarts(shipped, { code }, { ready }), false, `exit ${code}`);
  for (const code of [70, 75, 1]) for (const ready of [false, true]) assert.equal(restarts(shipped, { code }, { ready }), true, `exit ${code}`);
  assert.equal(restarts(shipped, { code: 0 }), false, 'asked to stop');
  assert.equal(restarts(shipped, { signal: 'SIGSEGV', core: true }), true);
  assert.equal(restarts(shipped, { signal: 'SIGKILL' }), true, "the kernel's OOM killer");
  assert.equal(restarts(shipped, { watchdog: true }), true);
  assert.equal(restarts(shipped, { timeout: true }), true);
});

test('the shipped unit gives starts, drains and restarts the time they need', () => {
  assert.equal(value(shipped, 'Service', 'Type'), 'notify');
  assert.ok(seconds(value(shipped, 'Service', 'TimeoutStopSec')) > 30, 'a drain takes up to 30 s by default');
  assert.ok(seconds(value(shipped, 'Service', 'TimeoutStartSec')) >= 120);
  // Longer than --stuck-seconds (30): the server itself says first that it is stuck, and why.
  assert.ok(seconds(value(shipped, 'Service', 'WatchdogSec')) > 30);
  // Starts that end at once must reach the limit: otherwise they go on for ever.
  const burst = Number(value(shipped, 'Unit', 'StartLimitBurst'));
  assert.ok(burst * seconds(value(shipped, 'Service', 'RestartSec')) < seconds(value(shipped, 'Unit', 'StartLimitIntervalSec')));
  assert.ok(burst * seconds(value(shipped, 'Service', 'RestartMaxDelaySec')) < seconds(value(shipped, 'Unit', 'StartLimitIntervalSec')));
});
