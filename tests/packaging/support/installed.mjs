// What a .deb holds, unpacked without installing, and a start of its unit as systemd would make it. Not a test file.
import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { cpSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { NotifySocket } from '../../api/support/notify.mjs';
import { binary, eventually } from '../../api/support/server.mjs';
import { command, environmentFile, parseUnit, value, values } from './unit.mjs';

export const top = resolve(dirname(fileURLToPath(import.meta.url)), '../../..');

export function run(program, args, options = {}) {
  const r = spawnSync(program, args, { encoding: 'utf8', maxBuffer: 1 << 26, ...options });
  if (r.error) throw new Error(`${program}: ${r.error.message} (packaging/setup.sh test installs it)`);
  return { status: r.status, text: r.stdout + r.stderr, out: r.stdout };
}

// The package of the executable that the other tests use too; FOLDER gets a .deb and a tarball.
export function makePackage(folder, ...options) {
  const r = run(join(top, 'packaging/package.sh'), ['--fast', '--binary', binary, '--out', folder, ...options], { cwd: top });
  if (r.status !== 0) throw new Error(`package.sh: exit ${r.status}\n${r.text}`);
  const find = (end) => join(folder, readdirSync(folder).find((f) => f.endsWith(end)));
  return { deb: find('.deb'), tarball: find('.tar.gz') };
}

export function scratch(t) {
  const folder = mkdtempSync(join(tmpdir(), 'ddtree-packaging-'));
  t.after(() => rmSync(folder, { recursive: true, force: true }));
  return folder;
}

// A unit of an unpacked package, started with this text as its environment file: the argv that systemd would make of
// ExecStart=, with the executable from `root`. Knows nothing of the sandbox: see lifecycle.mjs.
export class StartedUnit {
  static async start(t, root, settings, file = join(root, 'usr/lib/systemd/system/ddtree.service')) {
    const s = new StartedUnit();
    const folder = scratch(t);
    s.unit = parseUnit(readFileSync(file, 'utf8'));
    const environment = environmentFile(settings);
    const [program, ...args] = command(s.unit, environment);
    if (!value(s.unit, 'Service', 'StateDirectory')) throw new Error('no StateDirectory=: where would the history go?');
    mkdirSync(join(folder, 'state'));
    s.heard = await NotifySocket.listen(join(folder, 'notify'));
    t.after(() => s.heard.close());
    const watchdog = values(s.unit, 'Service', 'WatchdogSec').length ? { WATCHDOG_USEC: '2000000' } : {};
    s.child = spawn(join(root, program), args, {
      env: { PATH: '/usr/bin:/bin', ...environment, ...watchdog, NOTIFY_SOCKET: join(folder, 'notify'), STATE_DIRECTORY: join(folder, 'state') },
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    s.log = '';
    for (const pipe of [s.child.stdout, s.child.stderr]) pipe.on('data', (d) => { s.log += d; });
    s.exited = once(s.child, 'exit').then(([code, signal]) => { s.end = signal ? { signal } : { code }; return s.end; });
    t.after(() => s.child.kill('SIGKILL'));
    return s;
  }

  get ready() { return this.heard.said('READY=1'); }

  async untilReady() {
    await eventually('READY=1', () => {
      if (this.end) throw new Error(`the server ended with ${JSON.stringify(this.end)}:\n${this.log}`);
      return this.ready;
    }, 240);
  }

  // A hang is a failure; how long an end takes is not judged.
  async untilEnd() {
    await eventually('the server ends', () => this.end, 240);
    return this.end;
  }
}

// The demo pair's drafter in a folder of its own, with its config changed.
export function drafterWith(folder, change) {
  cpSync(join(top, 'models/tiny/draft'), folder, { recursive: true });
  const path = join(folder, 'config.json');
  const config = JSON.parse(readFileSync(path, 'utf8'));
  change(config);
  writeFileSync(path, JSON.stringify(config));
  return folder;
}
