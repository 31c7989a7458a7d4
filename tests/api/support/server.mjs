// Starts the real executable on a free loopback port with a history of its own, and talks to it. Not a test file.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import http from 'node:http';
import net from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';

const top = resolve(dirname(fileURLToPath(import.meta.url)), '../../..');
export const binary = process.env.DDTREE_BIN ?? join(top, 'build/ddtree');
// The same with --inject: faults on demand (tests/inject).
export const faultyBinary = join(dirname(binary), 'ddtree-inject');
export const golden = readFileSync(join(top, 'tests/data/golden/golden.jsonl'), 'utf8')
  .trim().split('\n').map((line) => JSON.parse(line));

export async function freePort() {
  const probe = net.createServer().listen(0, '127.0.0.1');
  await once(probe, 'listening');
  const { port } = probe.address();
  probe.close();
  await once(probe, 'close');
  return port;
}

export const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// Waits for something that has to happen; the limit only turns a hang into a failure.
export async function eventually(what, check, seconds = 60) {
  const end = performance.now() + seconds * 1000;
  for (;;) {
    const value = await check();
    if (value) return value;
    if (performance.now() > end) throw new Error(`did not happen within ${seconds} s: ${what}`);
    await sleep(20);
  }
}

export class Server {
  // ready: false returns as soon as the process runs.
  static async start({ args = [], ready = true, env = {}, program = binary } = {}) {
    if (!existsSync(program)) throw new Error(`${program} is not there: build it (./dev build, ninja -C build) or set DDTREE_BIN`);
    const s = new Server();
    s.folder = mkdtempSync(join(tmpdir(), 'ddtree-test-'));
    s.db = join(s.folder, 'history.db');
    s.port = await freePort();
    s.url = `http://127.0.0.1:${s.port}`;
    s.log = '';
    s.child = spawn(program, ['serve', '--port', `${s.port}`, '--db', s.db, ...args], { env: { ...process.env, ...env }, stdio: ['ignore', 'pipe', 'pipe'] });
    for (const pipe of [s.child.stdout, s.child.stderr]) pipe.on('data', (d) => { s.log += d; });
    s.exited = once(s.child, 'exit').then(([code, signal]) => ({ code, signal }));
    s.exited.then((e) => { s.exit = e; });
    if (ready) await s.untilReady();
    return s;
  }

  async untilReady() {
    await eventually('the server is ready', async () => {
      if (this.exit) throw new Error(`the server ended with ${JSON.stringify(this.exit)}:\n${this.log}`);
      try {
        return (await fetch(`${this.url}/readyz`)).status === 200;
      } catch {
        return false;
      }
    }, 240);
  }

  async get(path, headers = {}) {
    const r = await fetch(this.url + path, { headers });
    const text = await r.text();
    return { status: r.status, headers: r.headers, text, body: parse(text) };
  }

  async post(path, body, headers = {}) {
    const r = await fetch(this.url + path, {
      method: 'POST', headers: { 'content-type': 'application/json', ...headers },
      body: typeof body === 'string' || body instanceof Uint8Array ? body : JSON.stringify(body),
    });
    const text = await r.text();
    return { status: r.status, headers: r.headers, text, body: parse(text) };
  }

  chat(body) { return this.post('/v1/chat/completions', { temperature: 0, ...body }); }

  // Parsed events of a streamed reply, in order; "[DONE]" and comments as strings.
  async stream(path, body) {
    const r = await this.post(path, { temperature: 0, ...body, stream: true });
    if (r.status !== 200) return { ...r, events: [] };
    const frames = r.text.split('\n\n').filter((f) => f !== '');
    return { ...r, events: frames.map((f) => (f.startsWith('data: {') ? JSON.parse(f.slice(6)) : f.replace(/^data: /, ''))) };
  }

  // One value of /metrics.
  async metric(name) {
    const { text } = await this.get('/metrics');
    const line = text.split('\n').find((l) => l.startsWith(`ddtree:${name} `) || l.startsWith(`ddtree:${name}{`));
    if (!line) throw new Error(`/metrics has no ${name}`);
    return Number(line.slice(line.lastIndexOf(' ') + 1));
  }

  async idle() {
    await eventually('running, waiting, pages and slots are back to 0', async () => {
      for (const name of ['num_requests_running', 'num_requests_waiting', 'num_requests_live', 'kv_pages_used', 'state_slots_used'])
        if (await this.metric(name) !== 0) return false;
      return true;
    }, 30);
  }

  signal(name) { this.child.kill(name); }

  async stop() {
    if (!this.exit) {
      this.child.kill('SIGTERM');
      // Longer than any drain in these tests: a server that does not stop is killed, and its exit shows that.
      const patience = setTimeout(() => this.child.kill('SIGKILL'), 40_000);
      await this.exited;
      clearTimeout(patience);
    }
    const result = await this.exited;
    rmSync(this.folder, { recursive: true, force: true });
    return result;
  }
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

// A streamed chat put together again.
export function joined(events) {
  const out = { content: '', reasoning: '', ids: [], calls: [], finish: null, usage: null, last: null, done: false };
  for (const e of events) {
    if (e === '[DONE]') { out.done = true; continue; }
    if (typeof e === 'string') continue;
    if (e.error) { out.error = e.error; continue; }
    if (e.choices.length === 0) { out.usage = e.usage; continue; }
    const [c] = e.choices;
    out.content += c.delta?.content ?? c.text ?? '';
    out.reasoning += c.delta?.reasoning_content ?? '';
    out.ids.push(...(c.token_ids ?? []));
    for (const t of c.delta?.tool_calls ?? []) {
      out.calls[t.index] ??= { id: '', name: '', arguments: '' };
      if (t.id) out.calls[t.index].id = t.id;
      if (t.function.name) out.calls[t.index].name = t.function.name;
      out.calls[t.index].arguments += t.function.arguments;
    }
    if (c.finish_reason) { out.finish = c.finish_reason; out.last = e; }
  }
  return out;
}

// A request whose connection the test can cut.
export function rawPost(port, path, body) {
  const text = JSON.stringify(body);
  const request = http.request({ host: '127.0.0.1', port, path, method: 'POST', agent: false, headers: { 'content-type': 'application/json', 'content-length': Buffer.byteLength(text) } });
  request.on('error', () => {});
  request.end(text);
  return request;
}
