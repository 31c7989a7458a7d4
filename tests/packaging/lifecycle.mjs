// The package in a minimal Debian root: installed, started inside the unit's limits, upgraded, removed, purged.
// The root comes from packaging/minimal-root.sh once and is kept as .deps/minimal-root.tar.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { appendFileSync, existsSync, copyFileSync, lstatSync, mkdirSync, readFileSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import { test } from 'node:test';
import { NotifySocket } from '../api/support/notify.mjs';
import { eventually, freePort } from '../api/support/server.mjs';
import { makePackage, run, scratch, top } from './support/installed.mjs';
import { command, environmentFile, parseUnit } from './support/unit.mjs';

// CI runs as root and has debootstrap: there a skipped test would hide what it is for.
const missing = process.getuid() !== 0 ? 'needs root (chroot, mount)' : run('sh', ['-c', 'command -v debootstrap']).status !== 0 ? 'needs debootstrap' : false;
if (missing && process.env.CI) throw new Error(`the package's life in a Debian root ${missing}`);

function minimalRoot(t) {
  const tar = join(top, '.deps/minimal-root.tar');
  const folder = scratch(t);
  if (!existsSync(tar)) {
    const made = run(join(top, 'packaging/minimal-root.sh'), [join(folder, 'made')]);
    assert.equal(made.status, 0, made.text);
    const whole = `${tar}.${process.pid}`;
    assert.equal(run('tar', ['-cf', whole, '--numeric-owner', '--xattrs', '-C', join(folder, 'made'), '--exclude=./var/cache/apt/archives/*.deb', '.']).status, 0);
    renameSync(whole, tar);  // two runs at once: the last one wins, both are whole
    rmSync(join(folder, 'made'), { recursive: true });
  }
  const root = join(folder, 'root');
  mkdirSync(root);
  const unpacked = run('tar', ['-xf', tar, '--numeric-owner', '--xattrs', '-C', root]);
  assert.equal(unpacked.status, 0, unpacked.text);
  return root;
}

test('the package in a minimal Debian root: install, start, upgrade, remove, purge', { skip: missing }, async (t) => {
  const root = minimalRoot(t);
  const at = (path) => join(root, path);
  const inside = (...args) => run('chroot', [root, 'env', '-i', 'PATH=/usr/sbin:/usr/bin:/sbin:/bin', 'LC_ALL=C.UTF-8', 'DEBIAN_FRONTEND=noninteractive', ...args]);
  const must = (...args) => {
    const r = inside(...args);
    assert.equal(r.status, 0, `${args.join(' ')}: ${r.text}`);
    return r;
  };
  const state = (name) => inside('dpkg-query', '-W', '-f', '${db:Status-Abbrev}', name).out.trim();
  const first = makePackage(join(root, 'tmp/first')).deb;
  const second = makePackage(join(root, 'tmp/second'), '--revision', 'upgrade').deb;
  const systemctl = '#!/bin/sh\necho "$*" >>/tmp/systemctl.log\n';
  const asked = () => (existsSync(at('tmp/systemctl.log')) ? readFileSync(at('tmp/systemctl.log'), 'utf8').split('\n').filter(Boolean) : []);

  await t.test('installs where no systemd is, with its user and state folder', () => {
    assert.equal(existsSync(at('usr/bin/systemctl')), false, 'a minimal root has no systemd; else this test would show less than it says');
    const r = must('dpkg', '-i', `/tmp/first/${basename(first)}`);
    assert.doesNotMatch(r.text, /warning|error/i);
    assert.equal(state('ddtree'), 'ii');
    assert.match(must('getent', 'passwd', 'ddtree').out, /^ddtree:x:\d+:\d+:[^:]*:\/var\/lib\/ddtree:\/usr\/sbin\/nologin$/m);
    const uid = Number(must('id', '-u', 'ddtree').out);
    assert.ok(uid < 1000, `a system user, found uid ${uid}`);
    const folder = statSync(at('var/lib/ddtree'));
    assert.deepEqual([folder.uid, folder.mode & 0o777], [uid, 0o750]);
    assert.match(must('/usr/bin/ddtree', '--version').out, /^ddtree \d+\.\d+\.\d+$/m);
    assert.deepEqual(must('dpkg', '--verify', 'ddtree').out, '');
    const again = must('dpkg', '-i', `/tmp/first/${basename(first)}`);
    assert.doesNotMatch(again.text, /warning|error/i);
  });

  await t.test('the unit becomes ready inside its limits: read-only root, its user, no capabilities, no new privileges', async (tt) => {
    // No systemd here, so the limits of the sandbox that matter to files and rights are set by hand.
    const unit = parseUnit(readFileSync(at('usr/lib/systemd/system/ddtree.service'), 'utf8'));
    const port = await freePort();
    const argv = command(unit, environmentFile(`DDTREE_ARGS="--port ${port}"`));
    mkdirSync(at('run/notify'));
    const heard = await NotifySocket.listen(at('run/notify/socket'));
    tt.after(() => heard.close());
    const script = `set -e
      mount --bind '${root}' '${root}'
      mount -t proc proc '${root}/proc'
      mount --bind '${root}/var/lib/ddtree' '${root}/var/lib/ddtree'
      mount -o remount,bind,ro '${root}'
      mount -t tmpfs tmpfs '${root}/tmp'
      exec chroot '${root}' setpriv --reuid ddtree --regid ddtree --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \\
        env -i PATH=/usr/bin:/bin HOME=/var/lib/ddtree NOTIFY_SOCKET=/run/notify/socket STATE_DIRECTORY=/var/lib/ddtree "$@"`;
    // Inside a chroot (packaging/fresh-root.sh) "/" is no mount point and cannot be made private: then what is mounted may show
    // outside too, and is taken off again.
    const propagation = run('unshare', ['--mount', 'true']).status === 0 ? [] : ['--propagation', 'unchanged'];
    tt.after(() => { if (propagation.length) run('umount', ['-R', root]); });
    const child = spawn('unshare', ['--mount', ...propagation, '--pid', '--fork', '--kill-child', 'sh', '-c', script, 'sh', ...argv], { stdio: ['ignore', 'pipe', 'pipe'] });
    let log = '', end = null;
    for (const pipe of [child.stdout, child.stderr]) pipe.on('data', (d) => { log += d; });
    const exited = once(child, 'exit').then(([code]) => { end = { code }; });
    tt.after(() => child.kill('SIGKILL'));
    await eventually('READY=1', () => {
      if (end) throw new Error(`the server ended with ${JSON.stringify(end)}:\n${log}`);
      return heard.said('READY=1');
    }, 240);
    const ready = await (await fetch(`http://127.0.0.1:${port}/readyz`)).json();
    assert.equal(ready.smoke, 'pass', JSON.stringify(ready));
    const server = run('sh', ['-c', `pgrep -f -- 'ddtree serve --port ${port}$' | while read p; do grep -l NoNewPrivs:.1 /proc/$p/status; done`]).out.trim().split('\n').at(-1);
    const status = readFileSync(server, 'utf8');
    assert.match(status, /^CapBnd:\s*0+$/m);
    process.kill(Number(server.split('/')[2]), 'SIGTERM');
    await exited;
    assert.deepEqual(end, { code: 0 }, log);
    assert.equal(statSync(at('var/lib/ddtree/ddtree.db')).uid, Number(must('id', '-u', 'ddtree').out));
  });

  await t.test('an upgrade keeps the settings and the history, and restarts what runs', () => {
    const settings = at('etc/default/ddtree');
    appendFileSync(settings, '# mine\nDDTREE_ARGS="--port 30001"\n');
    const edited = readFileSync(settings);
    const history = readFileSync(at('var/lib/ddtree/ddtree.db'));
    // From here on systemd "runs": the folder that says so, and a systemctl that only notes what it is told.
    mkdirSync(at('run/systemd/system'), { recursive: true });
    writeFileSync(at('usr/bin/systemctl'), systemctl, { mode: 0o755 });
    const r = must('dpkg', '-i', `/tmp/second/${basename(second)}`);
    assert.doesNotMatch(r.text, /Configuration file/, 'the shipped settings did not change: no question');
    assert.match(must('dpkg-query', '-W', '-f', '${Version}', 'ddtree').out, /\+upgrade$/);
    assert.ok(readFileSync(settings).equals(edited));
    assert.ok(readFileSync(at('var/lib/ddtree/ddtree.db')).equals(history));
    assert.deepEqual(asked(), ['daemon-reload', '--no-block try-restart ddtree.service ddtree@*.service']);
    // And back again: a downgrade is an upgrade to dpkg's scripts.
    must('dpkg', '-i', `/tmp/first/${basename(first)}`);
    assert.ok(readFileSync(settings).equals(edited));
  });

  await t.test('removing stops the servers, warns of units that need it, keeps settings and history', () => {
    rmSync(at('tmp/systemctl.log'));
    mkdirSync(at('etc/systemd/system/multi-user.target.wants'), { recursive: true });
    writeFileSync(at('etc/systemd/system/sglang.service'), '# Written by ddtree install\n[Service]\nExecStart=/usr/bin/ddtree serve\n');
    copyFileSync(at('usr/lib/systemd/system/ddtree.service'), at('etc/systemd/system/multi-user.target.wants/ddtree.service'));
    const r = must('dpkg', '-r', 'ddtree');
    assert.match(r.text, /sglang\.service runs \/usr\/bin\/ddtree.*sglang\.service\.before-ddtree/);
    assert.equal(state('ddtree'), 'rc');
    assert.equal(existsSync(at('usr/bin/ddtree')), false);
    assert.equal(existsSync(at('usr/lib/systemd/system/ddtree.service')), false);
    assert.match(readFileSync(at('etc/default/ddtree'), 'utf8'), /# mine/);
    assert.ok(existsSync(at('var/lib/ddtree/ddtree.db')));
    assert.deepEqual(asked(), ['stop ddtree.service ddtree@*.service', 'daemon-reload']);
    // Installed again, it finds both.
    must('dpkg', '-i', `/tmp/first/${basename(first)}`);
    assert.match(readFileSync(at('etc/default/ddtree'), 'utf8'), /# mine/);
  });

  await t.test('purging removes settings, history and user, and nothing else', () => {
    mkdirSync(at('var/lib/ddtree@code'));
    mkdirSync(at('var/lib/ddtree-sglang'));
    must('dpkg', '-P', 'ddtree');
    for (const gone of ['etc/default/ddtree', 'var/lib/ddtree', 'var/lib/ddtree@code', 'usr/share/doc/ddtree', 'etc/systemd/system/multi-user.target.wants/ddtree.service'])
      assert.equal(lstatSync(at(gone), { throwIfNoEntry: false }), undefined, gone);
    assert.ok(existsSync(at('etc/systemd/system/sglang.service')), "the machine's own unit");
    assert.ok(existsSync(at('var/lib/ddtree-sglang')), "that unit's history");
    assert.notEqual(inside('getent', 'passwd', 'ddtree').status, 0);
    assert.notEqual(inside('getent', 'group', 'ddtree').status, 0);
    assert.notEqual(state('ddtree').slice(0, 2), 'ii');
  });

  await t.test("a user of that name who is not the package's stays", () => {
    must('useradd', '--create-home', 'ddtree');
    must('dpkg', '-i', `/tmp/first/${basename(first)}`);
    must('dpkg', '-P', 'ddtree');
    assert.match(must('getent', 'passwd', 'ddtree').out, /:\/home\/ddtree:/);
  });
});
