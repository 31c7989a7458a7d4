// What can be said of the scripts and the unit without installing them.
import assert from 'node:assert/strict';
import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';

const top = resolve(dirname(fileURLToPath(import.meta.url)), '../..');
const unitFile = join(top, 'packaging/systemd/ddtree.service');
const unitText = readFileSync(unitFile, 'utf8');
const run = (command, args) => {
  const r = spawnSync(command, args, { cwd: top, encoding: 'utf8', env: { ...process.env, SYSTEMD_COLORS: '0', LC_ALL: 'C.UTF-8' } });
  if (r.error) throw new Error(`${command}: ${r.error.message} (packaging/setup.sh test installs it)`);
  return { status: r.status, text: r.stdout + r.stderr };
};
const version = Number(/^systemd (\d+)/.exec(run('systemd-analyze', ['--version']).text)[1]);
// What systemd before 254 says about the two settings that came with it; nothing else may be said.
const known = (line) => version < 254 && /Unknown key '(RestartSteps|RestartMaxDelaySec)'/.test(line);

test('shellcheck has nothing to say about any script', () => {
  const tracked = run('git', ['ls-files', '--cached', '--others', '--exclude-standard']).text.split('\n').filter(Boolean);
  const scripts = tracked.filter((f) => {
    if (/\.sh$/.test(f)) return true;
    if (/\.\w+$/.test(f)) return false;
    try {
      return /^#!.*\b(sh|bash)$/.test(readFileSync(join(top, f), 'utf8').split('\n', 1)[0]);
    } catch {
      return false;  // a link to a folder
    }
  });
  for (const f of ['dev', 'packaging/package.sh', 'packaging/debian/postinst', 'packaging/debian/prerm', 'packaging/debian/postrm']) assert.ok(scripts.includes(f), f);
  const r = run('shellcheck', ['-S', 'warning', ...scripts]);
  assert.equal(r.status, 0, r.text);
});

// verify wants the command to be there; the installed one is checked in installed.mjs.
function verify(text, name = 'ddtree.service') {
  const folder = mkdtempSync(join(tmpdir(), 'ddtree-unit-'));
  try {
    writeFileSync(join(folder, name), text.replace('/usr/bin/ddtree', '/bin/true'));
    const r = run('systemd-analyze', ['verify', '--man=no', join(folder, name)]);
    return { status: r.status, lines: r.text.split('\n').filter((l) => l !== '' && !known(l)) };
  } finally {
    rmSync(folder, { recursive: true });
  }
}

test('systemd-analyze verify has nothing to say about the unit, plain or as a template', () => {
  for (const name of ['ddtree.service', 'ddtree@.service']) assert.deepEqual(verify(unitText, name), { status: 0, lines: [] });
  // It does find what it should find.
  assert.match(verify(unitText.replace('Restart=on-failure', 'Restart=on-failures')).lines.join('\n'), /on-failures/);
});

test('systemd-analyze security: 4.0 at most, and the card stays in reach', () => {
  const exposure = (file) => run('systemd-analyze', ['security', '--offline=true', '--threshold=40', '--no-pager', file]);
  const r = exposure(unitFile);
  assert.equal(r.status, 0, r.text);
  const level = Number(/exposure level for \S+: ([\d.]+)/.exec(r.text)[1]);
  assert.ok(level <= 4, r.text);
  // Without the sandbox the same command says no: the threshold is in force.
  const folder = mkdtempSync(join(tmpdir(), 'ddtree-unit-'));
  const bare = join(folder, 'ddtree.service');
  writeFileSync(bare, unitText.slice(0, unitText.indexOf('# --- the sandbox')));
  assert.notEqual(exposure(bare).status, 0);
  rmSync(folder, { recursive: true });
  // What would lower the figure further and take the card away.
  assert.doesNotMatch(unitText, /^PrivateDevices=(yes|true|1)/m);
  assert.doesNotMatch(unitText, /^ProcSubset=pid/m);
  assert.match(unitText, /^DeviceAllow=char-nvidia\* rw$/m);
});

test('two ./dev builds in one checkout take turns, and the one that waits says so', async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'ddtree-dev-'));
  t.after(() => rmSync(folder, { recursive: true }));
  mkdirSync(join(folder, 'packaging'));
  mkdirSync(join(folder, 'bin'));
  copyFileSync(join(top, 'dev'), join(folder, 'dev'));
  const script = (path, text) => writeFileSync(join(folder, path), `#!/bin/sh\n${text}\n`, { mode: 0o755 });
  script('packaging/setup.sh', 'true');
  script('bin/cmake', 'mkdir -p build; touch build/build.ninja; printf "#!/bin/sh\\n" >build/ddtree; chmod 755 build/ddtree');
  // A build that another one runs into fails.
  script('bin/ninja', 'mkdir building || exit 9; sleep 1; rmdir building; echo built >>log');
  const dev = (...args) => {
    const child = spawn(join(folder, 'dev'), args, { env: { ...process.env, PATH: `${join(folder, 'bin')}:${process.env.PATH}` } });
    let err = '';
    child.stderr.on('data', (d) => { err += d; });
    return once(child, 'close').then(([code]) => ({ code, err }));
  };
  const done = await Promise.all([dev('build'), dev('build'), dev('serve')]);
  assert.deepEqual(done.map((d) => d.code), [0, 0, 0], JSON.stringify(done));
  assert.equal(done.filter((d) => /another \.\/dev is building here; waiting/.test(d.err)).length, 2, JSON.stringify(done));
  assert.equal(readFileSync(join(folder, 'log'), 'utf8'), 'built\nbuilt\nbuilt\n');
  assert.doesNotMatch((await dev('build')).err, /waiting/, 'nobody holds the lock any more');
});
