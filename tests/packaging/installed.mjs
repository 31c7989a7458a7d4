// The package's files, and its unit started as systemd would: what systemd hears, how it ends, and what the unit's rules
// make of that end.
import assert from 'node:assert/strict';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import net from 'node:net';
import { join } from 'node:path';
import { before, test } from 'node:test';
import { eventually, freePort } from '../api/support/server.mjs';
import { StartedUnit, drafterWith, makePackage, run, scratch, top } from './support/installed.mjs';
import { restarts, resultOf } from './support/unit.mjs';

let folder, root, packages;
before((t) => {
  folder = scratch(t);
  packages = makePackage(join(folder, 'out'));
  root = join(folder, 'root');
  mkdirSync(root);
  assert.equal(run('dpkg-deb', ['-x', packages.deb, root]).status, 0);
});

test('the package says what it needs and holds what it should', () => {
  const field = (name) => run('dpkg-deb', ['-f', packages.deb, name]).out.trim();
  const version = /project\(ddtree VERSION ([\d.]+)/.exec(readFileSync(join(top, 'CMakeLists.txt'), 'utf8'))[1];
  assert.equal(field('Version'), version);
  // glibc by the symbols that the executable uses, never a CUDA package: a machine without a card can install it.
  assert.match(field('Depends'), /^libc6 \(>= 2\.\d+\), passwd$/);
  assert.equal(field('Recommends'), '');
  const files = run('dpkg-deb', ['-c', packages.deb]).out.split('\n').map((l) => l.split(/\s+/)).filter((w) => w.length > 5);
  for (const w of files) assert.equal(w[1], 'root/root', w.join(' '));
  const names = files.map((w) => w[5]);
  for (const f of ['usr/bin/ddtree', 'usr/lib/systemd/system/ddtree.service', 'usr/lib/systemd/system/ddtree@.service', 'etc/default/ddtree', 'usr/share/man/man1/ddtree.1.gz', 'usr/share/doc/ddtree/copyright', 'usr/share/doc/ddtree/install.md'])
    assert.ok(names.includes(`./${f}`), f);
  assert.equal(run('dpkg-deb', ['-I', packages.deb, 'conffiles']).out.trim(), '/etc/default/ddtree');
  assert.equal(run(join(root, 'usr/bin/ddtree'), ['--version']).out.trim(), `ddtree ${version}`);
  assert.doesNotMatch(run('readelf', ['-S', join(root, 'usr/bin/ddtree')]).out, /\.debug_info/, 'stripped');
  // Faults on demand are for tests; what is shipped has none.
  assert.equal(run(join(root, 'usr/bin/ddtree'), ['serve', '--inject', 'oom']).status, 64);
  // The manual page is one that man can set without a warning.
  const page = run('sh', ['-c', `zcat ${join(root, 'usr/share/man/man1/ddtree.1.gz')} | man --warnings -l -`], { env: { ...process.env, MANWIDTH: '120', LC_ALL: 'C.UTF-8' } });
  assert.equal(page.status, 0, page.text);
  assert.match(page.text, /--speculative-algorithm/);
  assert.doesNotMatch(page.text, /warning:/);
});

test('the tarball holds the same executable, the unit and a note', () => {
  const names = run('tar', ['-tzf', packages.tarball]).out.split('\n');
  const name = names[0].split('/')[0];
  for (const f of ['bin/ddtree', 'systemd/ddtree.service', 'default/ddtree', 'man/ddtree.1', 'INSTALL.md', 'LICENSE', 'third-party/cpp-httplib']) assert.ok(names.includes(`${name}/${f}`), f);
  const target = join(folder, 'tar');
  mkdirSync(target);
  run('tar', ['-xzf', packages.tarball, '-C', target]);
  assert.ok(readFileSync(join(target, name, 'bin/ddtree')).equals(readFileSync(join(root, 'usr/bin/ddtree'))));
});

test('where all this began: a drafter of the wrong feature width never becomes ready, exits 65 and is not restarted', async (t) => {
  // Trained on three of the target's layers, told that it is fed two.
  const draft = drafterWith(join(folder, 'narrow drafter'), (c) => { c.dflash_config.target_layer_ids = [1, 3]; });
  const unit = await StartedUnit.start(t, root, `DDTREE_ARGS="--model-path ${join(top, 'models/tiny/target')} --speculative-draft-model-path '${draft}' --port ${await freePort()}"\n`);
  assert.deepEqual(await unit.untilEnd(), { code: 65 }, unit.log);
  assert.equal(unit.ready, false, unit.heard.lines.join('\n'));
  assert.match(unit.log, /\b768\b/);
  assert.match(unit.log, /\b512\b/);
  assert.equal(resultOf(unit.unit, unit.end, unit.ready), 'exit-code');
  assert.equal(restarts(unit.unit, unit.end, { ready: unit.ready }), false);
});

test('the same start with the right drafter becomes ready, and ends with 0 when asked to', async (t) => {
  const draft = drafterWith(join(folder, 'right drafter'), () => {});
  const port = await freePort();
  const unit = await StartedUnit.start(t, root, `# one of the unit's own comments\nDDTREE_ARGS="--model-path ${join(top, 'models/tiny/target')} --speculative-draft-model-path '${draft}' --port ${port}"\n`);
  await unit.untilReady();
  // What the unit's TimeoutStartSec= and WatchdogSec= count on.
  const ready = unit.heard.lines.indexOf('READY=1');
  assert.ok(unit.heard.lines.slice(0, ready).some((l) => l.startsWith('EXTEND_TIMEOUT_USEC=')), unit.heard.lines.join('\n'));
  await eventually('WATCHDOG=1 while idle', () => unit.heard.lines.slice(ready).includes('WATCHDOG=1'));
  const models = await (await fetch(`http://127.0.0.1:${port}/v1/models`)).json();
  assert.equal(models.data.length, 1);
  unit.child.kill('SIGTERM');
  assert.deepEqual(await unit.untilEnd(), { code: 0 }, unit.log);
  assert.ok(unit.heard.said('STOPPING=1'));
  assert.equal(restarts(unit.unit, unit.end, { ready: true }), false);
});

test('an address in use, a wrong flag and a crash: not restarted, not restarted, restarted', async (t) => {
  const taken = net.createServer().listen(0, '127.0.0.1');
  await new Promise((r) => taken.once('listening', r));
  t.after(() => taken.close());
  const busy = await StartedUnit.start(t, root, `DDTREE_ARGS=--port ${taken.address().port}\n`);
  assert.deepEqual(await busy.untilEnd(), { code: 69 }, busy.log);
  assert.equal(restarts(busy.unit, busy.end, { ready: busy.ready }), false);
  const flag = await StartedUnit.start(t, root, 'DDTREE_ARGS=--contxt-length 512\n');
  assert.deepEqual(await flag.untilEnd(), { code: 64 }, flag.log);
  assert.match(flag.log, /--context-length/);
  assert.equal(restarts(flag.unit, flag.end, { ready: flag.ready }), false);
  const crash = await StartedUnit.start(t, root, `DDTREE_ARGS="--skip-smoke --port ${await freePort()}"\n`);
  await crash.untilReady();
  crash.child.kill('SIGSEGV');
  assert.deepEqual(await crash.untilEnd(), { signal: 'SIGSEGV' });
  assert.equal(restarts(crash.unit, crash.end, { ready: true }), true);
});
