// ddtree install and ddtree rollback as a person runs them, on units of many shapes.
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { chmodSync, chownSync, copyFileSync, existsSync, mkdirSync, readFileSync, readdirSync, statSync, utimesSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import { binary, freePort } from '../api/support/server.mjs';
import { StartedUnit, run, scratch, top } from './support/installed.mjs';
import { parseUnit, restarts, value } from './support/unit.mjs';

const samples = join(top, 'tests/data/units');
function ddtree(args, env = {}) {
  const r = spawnSync(binary, args, { encoding: 'utf8', env: { ...process.env, ...env } });
  return { status: r.status, out: r.stdout, err: r.stderr };
}
// Everything that a rollback has to bring back.
const print = (path) => {
  const s = statSync(path, { bigint: true });
  return { text: readFileSync(path, 'latin1'), mode: s.mode, uid: s.uid, gid: s.gid, mtime: s.mtimeNs, inode: s.ino };
};
function placed(t, name, as = name) {
  const unit = join(scratch(t), as);
  copyFileSync(join(samples, name), unit);
  chmodSync(unit, 0o640);
  if (process.getuid() === 0) chownSync(unit, 7, 8);
  utimesSync(unit, 1_600_000_000, 1_500_000_000.123);
  return unit;
}

test('every new unit is one that systemd accepts, with an exposure of 4.0 at most', (t) => {
  const folder = scratch(t);
  const version = Number(/^systemd (\d+)/.exec(run('systemd-analyze', ['--version']).text)[1]);
  for (const [name, ...more] of [['plain.service'], ['wrapped.service', '--leave-out', '--tp'], ['variables@.service'], ['refused.service']]) {
    const r = ddtree(['install', '--from-unit', join(samples, name), '--executable', '/usr/bin/ddtree', '--json', ...more]);
    assert.equal(r.status, name === 'refused.service' ? 64 : 0, r.err);
    const { unit, written, blockers } = JSON.parse(r.out);
    assert.equal(written, false);
    assert.equal(blockers.length, name === 'refused.service' ? 4 : 0, blockers.join('\n'));
    const file = join(folder, name);
    writeFileSync(file, unit.replaceAll('/usr/bin/ddtree', '/bin/true'));
    const verify = run('systemd-analyze', ['verify', '--man=no', file], { env: { ...process.env, SYSTEMD_COLORS: '0' } });
    const said = verify.text.split('\n').filter((l) => l !== '' && !(version < 254 && /Unknown key '(RestartSteps|RestartMaxDelaySec)'/.test(l)));
    assert.deepEqual([verify.status, said], [0, []]);
    const security = run('systemd-analyze', ['security', '--offline=true', '--threshold=40', '--no-pager', file]);
    assert.equal(security.status, 0, security.text);
    const parsed = parseUnit(unit);
    assert.equal(restarts(parsed, { code: 65 }, { ready: false }), false);
    assert.equal(value(parsed, 'Service', 'Type'), 'notify');
  }
});

test('showing writes nothing; applying keeps the old unit; rolling back brings back the same file', (t) => {
  const unit = placed(t, 'plain.service', 'sglang.service');
  const folder = join(unit, '..');
  const before = print(unit);
  const shown = ddtree(['install', '--from-unit', unit]);
  assert.equal(shown.status, 0, shown.err);
  assert.match(shown.out, /Nothing was written\. --apply replaces the unit/);
  assert.match(shown.out, /changed {2}--mem-fraction-static 0\.85\n +it bounds all memory/);
  assert.deepEqual(readdirSync(folder), ['sglang.service']);
  assert.deepEqual(print(unit), before);

  const applied = ddtree(['install', '--from-unit', unit, '--apply']);
  assert.equal(applied.status, 0, applied.err);
  assert.match(applied.out, /systemctl daemon-reload\n +systemctl restart sglang\.service/);
  assert.match(readFileSync(unit, 'utf8'), /^# Written by ddtree install/);
  assert.deepEqual(print(`${unit}.before-ddtree`), before);
  assert.equal(statSync(unit).mode & 0o777, 0o640);

  // A second install finds ddtree there, and a hand-made return to SGLang finds the backup.
  assert.equal(ddtree(['install', '--from-unit', unit, '--apply']).status, 64);
  const taken = placed(t, 'plain.service', 'taken.service');
  writeFileSync(`${taken}.before-ddtree`, 'kept');
  const refused = ddtree(['install', '--from-unit', taken, '--apply']);
  assert.equal(refused.status, 64);
  assert.match(refused.err, /taken\.service\.before-ddtree is there already/);
  const seen = ddtree(['install', '--from-unit', taken, '--json']);
  assert.equal(seen.status, 64);
  assert.match(JSON.parse(seen.out).blockers[0], /taken\.service\.before-ddtree is there already/);
  assert.equal(readFileSync(`${taken}.before-ddtree`, 'utf8'), 'kept');
  assert.doesNotMatch(readFileSync(taken, 'utf8'), /ddtree/);

  const back = ddtree(['rollback', unit, '--json']);
  assert.equal(back.status, 0, back.err);
  assert.deepEqual(JSON.parse(back.out), { unit, was_in_place: false, put_aside: `${unit}.after-ddtree`, systemctl: ['systemctl daemon-reload', 'systemctl restart sglang.service'], error: null });
  assert.deepEqual(print(unit), before);
  assert.equal(existsSync(`${unit}.before-ddtree`), false);
  const again = ddtree(['rollback', unit]);
  assert.equal(again.status, 64);
  assert.match(again.err, /nothing to roll back/);

  // Once more, with an edit in between: both ddtree units are kept.
  assert.equal(ddtree(['install', '--from-unit', unit, '--apply']).status, 0);
  writeFileSync(unit, `${readFileSync(unit, 'utf8')}# edited\n`);
  assert.match(ddtree(['rollback', unit]).out, /ddtree's is .*sglang\.service\.after-ddtree\.2$/m);
  assert.match(readFileSync(`${unit}.after-ddtree.2`, 'utf8'), /# edited\n$/);
  assert.doesNotMatch(readFileSync(`${unit}.after-ddtree`, 'utf8'), /# edited/);
  // Somebody's own unit in the place of ddtree's is not taken for it.
  assert.equal(ddtree(['install', '--from-unit', unit, '--apply']).status, 0);
  writeFileSync(unit, '[Service]\nExecStart=/bin/mine\n');
  const other = ddtree(['rollback', unit, '--json']);
  assert.equal(other.status, 64);
  assert.match(JSON.parse(other.out).error, /is not the unit that ddtree install wrote/);
  assert.equal(readFileSync(unit, 'utf8'), '[Service]\nExecStart=/bin/mine\n');
});

test('systemctl runs when asked, in order, and what it says is passed on', (t) => {
  const unit = placed(t, 'plain.service', 'sglang.service');
  const folder = scratch(t);
  const log = join(folder, 'log');
  const fake = (code) => {
    writeFileSync(join(folder, 'systemctl'), `#!/bin/sh\nprintf '%s %s\\n' "$*" "$(head -c 9 '${unit}')" >>'${log}'\nexit ${code}\n`, { mode: 0o755 });
    return { PATH: `${folder}:${process.env.PATH}` };
  };
  const json = ddtree(['install', '--from-unit', unit, '--apply', '--now', '--json'], fake(0));
  assert.equal(json.status, 0, json.err);
  assert.equal(JSON.parse(json.out).written, true);
  // The unit was in place before systemd was told.
  assert.deepEqual(readFileSync(log, 'utf8').trim().split('\n'), ['daemon-reload # Written', 'restart sglang.service # Written']);
  const failed = ddtree(['rollback', unit, '--now'], fake(3));
  assert.equal(failed.status, 69);
  assert.match(failed.err, /`systemctl daemon-reload` failed \(exit 3\)/);
  assert.doesNotMatch(readFileSync(unit, 'utf8'), /^# Written/, 'the old unit is back whatever systemctl said');
});

test('what stands in the way is named, --apply is refused, --leave-out agrees', (t) => {
  const unit = placed(t, 'refused.service');
  const before = print(unit);
  const r = ddtree(['install', '--from-unit', unit, '--apply']);
  assert.equal(r.status, 64);
  assert.match(r.err, /not applied: --tp-size 4: not built/);
  for (const flag of ['--tp-size', '--kv-cache-dtype', '--hicache-ratio', '--max-running-request']) assert.match(r.out, new RegExp(`refused {2}${flag} `));
  assert.deepEqual(print(unit), before);
  const agreed = ddtree(['install', '--from-unit', unit, '--apply', ...['--tp-size', '--kv-cache-dtype', '--hicache-ratio', '--max-running-request'].flatMap((f) => ['--leave-out', f])]);
  assert.equal(agreed.status, 0, agreed.err);
  for (const f of readdirSync(join(samples, 'other'))) {
    const other = placed(t, join('other', f), f);
    const no = ddtree(['install', '--from-unit', other, '--apply']);
    assert.equal(no.status, 64, f);
    assert.match(no.err, new RegExp(`${f}:\\d+`), 'file and line');
    assert.deepEqual(readdirSync(join(other, '..')), [f]);
  }
});

test('beside: a unit of its own, the old one untouched; wrong options are named', (t) => {
  const unit = placed(t, 'plain.service', 'sglang.service');
  const before = print(unit);
  mkdirSync(`${unit}.d`);
  writeFileSync(`${unit}.d/card.conf`, '[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=5\n');
  const beside = join(unit, '../new.service');
  const r = ddtree(['install', '--from-unit', unit, '--to', beside, '--apply']);
  assert.equal(r.status, 0, r.err);
  assert.match(r.out, /systemctl start new\.service/);
  const text = readFileSync(beside, 'utf8');
  assert.match(text, /^Conflicts=sglang\.service$/m);
  assert.match(text, /^Environment=CUDA_VISIBLE_DEVICES=5$/m);
  assert.deepEqual(print(unit), before);
  assert.equal(ddtree(['install', '--from-unit', unit, '--to', beside, '--apply']).status, 64, 'never over a file that is there');
  const shown = ddtree(['install', '--from-unit', unit, '--to', beside]);
  assert.equal(shown.status, 64);
  assert.match(shown.err, /new\.service is there already; --to needs a name that is free/);
  const huge = join(unit, '../huge.service');
  writeFileSync(huge, '# '.padEnd((1 << 20) + 2, 'x'));
  for (const args of [['install', '--from-unit', huge, '--json'], ['install', '--json', '--from-unit', join(unit, '../none.service')], ['install', '--json'], ['rollback', '--json', huge]]) {
    const r = ddtree(args);
    assert.equal(r.status, 64, args.join(' '));
    const said = JSON.parse(r.out);
    assert.equal(said.written, false);
    assert.equal(r.err, `ddtree ${args[0]}: ${said.error}\n`);
  }
  assert.match(JSON.parse(ddtree(['install', '--from-unit', huge, '--json']).out).error, /is over 1 MiB/);
  for (const [args, words] of [
    [['install'], /--from-unit FILE/],
    [['install', '--from-unit'], /--from-unit needs a value/],
    [['install', '--from-unit', unit, '--aply'], /'--aply' is no option/],
    [['install', '--from-unit', unit, '--now'], /--now needs --apply/],
    [['install', '--from-unit', '/nowhere/x.service'], /\/nowhere\/x\.service: No such file/],
    [['install', '--from-unit', unit, '--executable', 'ddtree'], /must be an absolute path/],
    [['rollback'], /which unit/],
    [['rollback', unit, unit], /one unit at a time/],
  ]) {
    const wrong = ddtree(args);
    assert.equal(wrong.status, 64, args.join(' '));
    assert.match(wrong.err, words);
  }
});

test('a migrated unit serves: its command becomes ready under the name and on the port of the old one', async (t) => {
  const root = scratch(t);
  const port = await freePort();
  const unit = join(root, 'sglang.service');
  writeFileSync(unit, `[Service]\nType=simple\nEnvironment=TARGET=${join(top, 'models/tiny/target')}\nExecStart=/bin/bash -c 'exec python3 -m sglang.launch_server --model-path "$\${TARGET}" --speculative-algorithm DFLASH --speculative-draft-model-path ${join(top, 'models/tiny/draft')} --mem-fraction-static 0.8 --device cpu --served-model-name old-name --port ${port}'\n`);
  const r = ddtree(['install', '--from-unit', unit, '--executable', binary, '--apply']);
  assert.equal(r.status, 0, r.err);
  const started = await StartedUnit.start(t, '/', `TARGET=${join(top, 'models/tiny/target')}\n`, unit);
  await started.untilReady();
  const models = await (await fetch(`http://127.0.0.1:${port}/v1/models`)).json();
  assert.deepEqual(models.data.map((m) => m.id), ['old-name']);
  started.child.kill('SIGTERM');
  assert.deepEqual(await started.untilEnd(), { code: 0 }, started.log);
});
