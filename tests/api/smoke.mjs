// `ddtree smoke`: against the running server, against fake servers that are broken in one way each, and on an engine of its own.
import assert from 'node:assert/strict';
import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import net from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, describe, test } from 'node:test';
import { binary, eventually, freePort, Server } from './support/server.mjs';

const folder = mkdtempSync(join(tmpdir(), 'ddtree-smoke-'));
after(() => rmSync(folder, { recursive: true, force: true }));

async function smoke(args, { env = {}, signal } = {}) {
  const child = spawn(binary, ['smoke', ...args], { env: { ...process.env, ...env }, stdio: ['ignore', 'pipe', 'pipe'] });
  let out = '', err = '';
  child.stdout.on('data', (d) => { out += d; });
  child.stderr.on('data', (d) => { err += d; });
  const begin = performance.now();
  const closed = once(child, 'close');
  if (signal) signal(child);
  const [code] = await closed;
  const result = { code, out, err, seconds: (performance.now() - begin) / 1000 };
  if (args.includes('--json') && out.startsWith('{')) {
    result.report = JSON.parse(out);
    result.check = (name) => result.report.checks.find((c) => c.name === name);
  }
  return result;
}

// Python's expat, as strict as a CI's reader. Prints tests and failures as counted by hand.
function junit(path) {
  const script = `
import sys, json, xml.etree.ElementTree as E
r = E.parse(sys.argv[1]).getroot()
s = r.find('testsuite')
c = s.findall('testcase')
json.dump({'root': r.tag, 'tests': int(s.get('tests')), 'failures': int(s.get('failures')), 'skipped': int(s.get('skipped')), 'cases': len(c),
 'failed': [t.find('failure').get('message') for t in c if t.find('failure') is not None], 'skips': len([t for t in c if t.find('skipped') is not None]),
 'names': [t.get('name') for t in c], 'out': [t.findtext('system-out') or '' for t in c]}, sys.stdout)`;
  const r = spawnSync('python3', ['-c', script, path], { encoding: 'utf8' });
  assert.equal(r.status, 0, r.stderr);
  const x = JSON.parse(r.stdout);
  assert.deepEqual([x.root, x.cases, x.failed.length, x.skips], ['testsuites', x.tests, x.failures, x.skipped]);
  return x;
}

// --- a server that answers as OpenAI's API does, unless told otherwise ----------------------------------------------------------------
const frame = (o) => `data: ${JSON.stringify(o)}\n\n`;
const chunk = (delta, finish = null, more = {}) => ({ id: 'x', object: 'chat.completion.chunk', choices: [{ index: 0, delta, finish_reason: finish, ...more }] });

function reply(body) {
  const user = body.messages?.at(-1)?.content ?? body.prompt ?? '';
  if (body.tools) return { calls: [{ name: 'get_weather', arguments: '{"city": "Paris"}' }] };
  let text = 'The sky is blue because air scatters blue light more than red light — always — and that is all.';
  if (/Count from/.test(user)) text = Array.from({ length: 20 }, (_, i) => i + 1).join(', ');
  const gate = /north gate is (\d+)/.exec(user);
  if (gate) text = gate[1];
  if (/capital of France/.test(user)) text = 'The capital of France is Paris, on the Seine.';
  if (body.stop) text = text.split([].concat(body.stop)[0])[0];
  return { text };
}

const tokens = (text) => Math.ceil(text.length / 4) + 4;

class Fake {
  // change: { models(req, res), chat(req, res, body, sound) }, each in place of the sound answer.
  static async start(change = {}) {
    const f = new Fake();
    f.bodies = [];
    f.http = http.createServer(async (req, res) => {
      let text = '';
      for await (const d of req) text += d;
      if (req.url.endsWith('/models')) {
        if (change.models) return change.models(req, res);
        res.writeHead(200, { 'content-type': 'application/json' });
        return res.end(JSON.stringify({ object: 'list', data: [{ id: 'fake-1', object: 'model', max_model_len: 8192 }, { id: 'fake-2', object: 'model' }] }));
      }
      const body = JSON.parse(text);
      f.bodies.push(body);
      const sound = () => f.sound(res, body, change);
      return change.chat ? change.chat(req, res, body, sound) : sound();
    }).listen(0, '127.0.0.1');
    await once(f.http, 'listening');
    f.url = `http://127.0.0.1:${f.http.address().port}`;
    return f;
  }

  sound(res, body, { type = 'text/event-stream', usage = true, done = '[DONE]', eol = '\n', wrap = (t) => ({ content: t }), end = (c) => c } = {}) {
    const { text = '', calls } = reply(body);
    const prompt = tokens((body.messages ?? []).map((m) => m.content).join(' '));
    res.writeHead(200, { 'content-type': type });
    const write = (o) => res.write(frame(o).replaceAll('\n', eol));
    write(chunk({ role: 'assistant', content: '' }));
    if (calls) write(chunk({ tool_calls: calls.map((c, index) => ({ index, id: 'c1', type: 'function', function: c })) }));
    for (let i = 0; i < text.length; i += 9) write(chunk(wrap(text.slice(i, i + 9))));
    write(end(chunk({}, calls ? 'tool_calls' : body.max_tokens < tokens(text) / 3 ? 'length' : 'stop')));
    if (usage) write({ id: 'x', choices: [], usage: { prompt_tokens: prompt, completion_tokens: tokens(text), total_tokens: prompt + tokens(text) } });
    res.end(done ? `data: ${done}${eol}${eol}` : undefined);
  }

  stop() {
    this.http.closeAllConnections();
    return new Promise((ok) => { this.http.close(ok); });
  }
}

async function against(change, args = [], options = {}) {
  const fake = await Fake.start(change);
  try {
    return { ...(await smoke(['--url', fake.url, '--json', ...args], options)), bodies: fake.bodies };
  } finally {
    await fake.stop();
  }
}

describe('the running server', () => {
  let server;
  before(async () => { server = await Server.start({ args: ['--api-key', 'sesame'] }); });
  after(() => server.stop());
  const url = (more = '') => `${server.url}${more}`;

  test('passes in every mode, with JUnit and a history of its own', async () => {
    const xml = join(folder, 'server.xml'), db = join(folder, 'own.db');
    const r = await smoke(['--url', url('/v1'), '--api-key', 'sesame', '--json', '--junit', xml, '--db', db]);
    assert.equal(r.code, 0, r.out + r.err);
    assert.equal(r.report.verdict, 'pass');
    assert.equal(r.report.model, 'tiny');
    for (const name of ['coherent', 'counting', 'equals-plain', 'accounting', 'streaming', 'stop-string', 'tool-call', 'needle', 'speed'])
      assert.ok(r.report.checks.filter((c) => c.name === name).every((c) => c.verdict === 'pass'), name);
    assert.deepEqual([...new Set(r.report.checks.filter((c) => c.name === 'equals-plain').map((c) => c.mode))], ['DFLASH', 'DDTREE', 'NEXTN']);
    assert.ok(r.report.tokens_per_second > 0 && r.report.tokens_per_round > 2);
    const x = junit(xml);
    assert.equal(x.tests, r.report.checks.length);
    assert.ok(x.names.includes('equals-plain DDTREE numbers-35-61'));
    assert.ok(x.out.some((o) => o.includes('57, 58, 59, 60, 61')));
    const rows = spawnSync(binary, ['history', 'smoke', '--db', db, '--json'], { encoding: 'utf8' });
    assert.equal(rows.status, 0, rows.stderr);
    const [row] = JSON.parse(rows.stdout).runs;
    assert.deepEqual([row.subject, row.trigger, row.verdict, row.model], [url('/v1'), 'command', 'pass', 'tiny']);
  });

  test('with the key missing or wrong it is a matter of flags', async () => {
    for (const key of [[], ['--api-key', 'wrong']]) {
      const r = await smoke(['--url', url(), ...key]);
      assert.equal(r.code, 64, r.err);
      assert.match(r.err, /401.*--api-key/);
    }
    assert.equal((await smoke(['--url', url(), '--json', '--list'])).code, 64);
    const environment = await smoke(['--url', url(), '--json'], { env: { DDTREE_API_KEY: 'sesame' } });
    assert.equal(environment.code, 0, environment.err);
  });

  test('a model that it does not have', async () => {
    const r = await smoke(['--url', url(), '--api-key', 'sesame', '--model', 'other']);
    assert.equal(r.code, 64);
    assert.match(r.err, /--model other: the server has "tiny"/);
  });

  test('its own start kept input, output, figure and verdict of every check; the suite is in no client\'s books', async () => {
    const key = { authorization: 'Bearer sesame' };
    const [run] = (await server.get('/admin/api/smoke', key)).body.runs;
    assert.deepEqual([run.trigger, run.verdict, run.subject, run.mode, run.previous_version, run.before, run.warning], ['start', 'pass', '', 'DDTREE', null, null, '']);
    const of = (name) => run.checks.filter((c) => c.name === name);
    assert.match(of('counting')[0].output, /^1, 2, 3.*19, 20$/);
    assert.match(of('tool-call')[0].output, /get_weather\(\{"city": "Paris"\}\)/);
    assert.match(of('needle')[0].output, /Iris/);
    assert.equal(of('streaming')[0].output, of('coherent')[0].output);
    for (const c of run.checks) assert.ok(c.what && c.verdict && (c.input_id || ['feature-width', 'finite-logits', 'speed', 'earlier-runs'].includes(c.name)), c.name);
    assert.equal((await server.get('/admin/api/requests', key)).body.requests.filter((q) => q.client === 'smoke test').length, 0);
  });

  test('--long fills the whole context', async () => {
    const r = await smoke(['--url', url(), '--api-key', 'sesame', '--json', '--long']);
    assert.equal(r.code, 0, r.out);
    const check = r.check('full-context');
    assert.equal(check.verdict, 'pass');
    assert.ok(check.figure > 3700 && check.figure < 4096, `${check.figure}`);
  });

  test('prompts of one\'s own, and errors of their file by line and field', async () => {
    const file = join(folder, 'prompts.jsonl');
    const ask = async (lines) => {
      writeFileSync(file, lines.map((l) => (typeof l === 'string' ? l : JSON.stringify(l))).join('\n'));
      return smoke(['--url', url(), '--api-key', 'sesame', '--json', '--prompts', file]);
    };
    const good = await ask([
      { id: 'morocco', user: 'What is the capital of Morocco?', expect: 'Rabat', reject: ['Cairo'], max_tokens: 24 }, '',
      { id: 'turns', messages: [{ role: 'user', content: 'My name is Leo.' }, { role: 'assistant', content: 'Nice to meet you, Leo! How can I help you today?' }, { role: 'user', content: 'Say hello to me.' }], expect_regex: '^Hello, L[a-z]o!$' }]);
    assert.equal(good.code, 0, good.out + good.err);
    assert.deepEqual(good.report.checks.filter((c) => c.name === 'prompt').map((c) => [c.input_id, c.verdict]), [['morocco', 'pass'], ['turns', 'pass']]);
    const bad = await ask([{ id: 'a', user: 'What is the capital of Morocco?', expect: 'Oslo' }, { id: 'b', user: 'What is the capital of Morocco?', expect_regex: '^\\d+$' }, { id: 'c', user: 'What is the capital of Morocco?', reject: 'Rabat' }]);
    assert.equal(bad.code, 70);
    assert.match(bad.report.message, /^prompt, a: 'Oslo' is not in the answer/);
    assert.deepEqual(bad.report.checks.filter((c) => c.name === 'prompt').map((c) => c.verdict), ['fail', 'fail', 'fail']);
    for (const [lines, why] of [
      [[{ id: 'a', user: 'x' }, '{"id": }'], /prompts.jsonl:2: /], [[{ user: 'x' }], /:1: id: must be there/], [[{ id: 'a' }], /:1: user: give either/],
      [[{ id: 'a', user: 'x', expects: 'y' }], /:1: expects: is no field/], [[{ id: 'a', user: 'x' }, '', { id: 'a', user: 'y' }], /:3: id: "a" is/],
      [[{ id: 'a', user: 'x', expect_regex: '(' }], /:1: expect_regex: .*parenthes/], [[{ id: 'a', user: 'x', max_tokens: 0 }], /:1: max_tokens: /],
      [[{ id: 'a', messages: [{ role: 'boss', content: 'x' }] }], /:1: messages\[0\].role: is "boss"/], [[{ id: 'a', user: 'x', expect: [] }], /:1: expect: is empty/], [[''], /no prompt in it/]]) {
      const r = await ask(lines);
      assert.equal(r.code, 64, `${r.err}`);
      assert.match(r.err, why);
    }
  });
});

describe('other servers', () => {
  test('a sound one passes without ddtree\'s own fields, and is asked greedily', async () => {
    const r = await against({});
    assert.equal(r.code, 0, r.out + r.err);
    assert.equal(r.check('equals-plain').verdict, 'skip');
    assert.equal(r.check('tool-call').verdict, 'pass');
    assert.equal(r.check('needle').verdict, 'pass');
    assert.equal(r.check('finite-logits').verdict, 'skip');
    for (const b of r.bodies) {
      assert.deepEqual([b.model, b.temperature, b.stream, b.stream_options.include_usage], ['fake-1', 0, true, true]);
      assert.ok(!('return_token_ids' in b) && !('speculative_algorithm' in b));
    }
    assert.ok(r.bodies.some((b) => b.stop) && r.bodies.some((b) => b.tools) && r.bodies.some((b) => b.logprobs));
  });

  test('field variants: reasoning by either name or in tags, CRLF, no role, a usage chunk without choices is said', async () => {
    for (const wrap of [(t) => ({ content: t, reasoning_content: 'hm' }), (t) => ({ content: t, reasoning: 'hm' })]) assert.equal((await against({ wrap })).code, 0);
    assert.equal((await against({ eol: '\r\n' })).code, 0);
    const tags = await against({ chat: (q, res, body, sound) => {
      const write = res.write.bind(res);
      let first = true;
      res.write = (s) => {
        if (first && s.includes('"content":"') && !s.includes('"role"')) { first = false; write(frame(chunk({ content: '<think>\nLet me see.\n</think>\n\n' }))); }
        return write(s);
      };
      return sound();
    } });
    assert.equal(tags.code, 0, tags.out);
    const bare = await against({ chat: (q, res, body, sound) => {
      const write = res.write.bind(res);
      res.write = (s) => write(s.replace('"choices":[],', ''));
      return sound();
    } });
    assert.equal(bare.code, 70);
    assert.match(bare.check('streaming').message, /no choices/);
  });

  test('one that refuses fields it does not know is asked without them', async () => {
    const r = await against({ chat: (q, res, body, sound) => {
      if (!body.chat_template_kwargs) return sound();
      res.writeHead(400, { 'content-type': 'application/json' });
      return res.end(JSON.stringify({ error: { message: 'Unrecognized request argument supplied: chat_template_kwargs' } }));
    } });
    assert.equal(r.code, 0, r.out);
  });

  test('eight exclamation marks, slowly: fails with that reason within its time limit', async () => {
    const chat = (q, res) => {
      res.writeHead(200, { 'content-type': 'text/event-stream' });
      res.write(frame(chunk({ role: 'assistant' })));
      let n = 0;
      const timer = setInterval(() => { if (++n <= 8) res.write(frame(chunk({ content: '!' }))); }, 250);
      res.on('close', () => clearInterval(timer));
    };
    const r = await against({ chat }, ['--answer-seconds', '4']);
    assert.equal(r.code, 70);
    assert.match(r.report.message, /^coherent, capital-of-france: no end within 4\.0 s: 8 pieces of text came: '!!!!!!!!'; only 0 of 8 characters are letters or digits/);
    assert.ok(r.seconds < 60, `${r.seconds} s`);  // one answer's limit, not every check's: only a hang comes near this
    assert.ok(r.report.checks.slice(3).every((c) => c.verdict === 'skip' || c.name === 'equals-plain'), r.out);
  });

  test('eight exclamation marks that do end', async () => {
    const r = await against({ chat: (q, res) => {
      res.writeHead(200, { 'content-type': 'text/event-stream' });
      res.write(frame(chunk({ content: '!!!!!!!!' })) + frame(chunk({}, 'length')) + frame({ choices: [], usage: { prompt_tokens: 9, completion_tokens: 8, total_tokens: 17 } }));
      res.end('data: [DONE]\n\n');
    } }, ['--junit', join(folder, 'marks.xml')]);
    assert.equal(r.code, 70);
    assert.match(r.report.message, /only 0 of 8 characters are letters or digits: .*!!!!!!!!/);
    assert.ok(junit(join(folder, 'marks.xml')).failures >= 3);
  });

  test('one that dies in the middle', async () => {
    for (const clean of [true, false]) {
      const r = await against({ chat: (q, res) => {
        res.writeHead(200, { 'content-type': 'text/event-stream' });
        res.write(frame(chunk({ content: 'The capital of ' })), () => (clean ? res.end() : setTimeout(() => res.destroy(), 50)));
      } });
      assert.equal(r.code, 70);
      assert.match(r.report.message, /broke off in the middle, after 1 events and 'The capital of '/);
    }
    let answers = 0;
    const later = await against({ chat: (q, res, body, sound) => (answers++ < 3 ? sound() : res.destroy()) });
    assert.equal(later.code, 70);
  });

  test('broken framing, each by name', async () => {
    const raw = (text) => ({ chat: (q, res) => { res.writeHead(200, { 'content-type': 'text/event-stream' }); res.end(text); } });
    const said = frame(chunk({ content: 'Paris is the capital.' })), end = frame(chunk({}, 'stop')), usage = frame({ choices: [], usage: { prompt_tokens: 5, completion_tokens: 6, total_tokens: 11 } });
    for (const [text, why] of [
      [said + end + usage, /without data: \[DONE\]/], [`${said}${end}${usage}data: [DONE]\n\n${said}`, /after \[DONE\]/],
      [`${said}{"oops": 1}\n\n${end}${usage}data: [DONE]\n\n`, /no field of server-sent events/], [`${said}data: {"choices": [\n\n${end}${usage}data: [DONE]\n\n`, /no JSON object/],
      [`${said.trimEnd()}\n${end}${usage}data: [DONE]\n\n`, /two data lines/], [`${said}${end}${said}${usage}data: [DONE]\n\n`, /after finish_reason/],
      [`${said}${usage}data: [DONE]\n\n`, /no finish_reason/], [`${said}${end}${usage.replace('11', '12')}data: [DONE]\n\n`, /5 \+ 6 = 12/]]) {
      const r = await against(raw(text));
      assert.equal(r.code, 70, r.out);
      assert.match(r.check('streaming').message, why);
    }
  });

  test('characters split between events', async () => {
    const bytes = Buffer.from('The price is 5 € today.');
    const at = bytes.indexOf(0xe2) + 1;
    for (const pieces of [[bytes.subarray(0, at), bytes.subarray(at)], ['The price is 5 \ufffd', '\ufffd today.']]) {
      const r = await against({ chat: (q, res) => {
        res.writeHead(200, { 'content-type': 'text/event-stream' });
        for (const p of pieces) res.write(Buffer.concat([Buffer.from('data: {"choices":[{"index":0,"delta":{"content":"'), Buffer.from(p), Buffer.from('"}}]}\n\n')]));
        res.end(`${frame(chunk({}, 'stop'))}${frame({ choices: [], usage: { prompt_tokens: 5, completion_tokens: 6, total_tokens: 11 } })}data: [DONE]\n\n`);
      } }, ['--junit', join(folder, 'split.xml')]);
      assert.equal(r.code, 70, r.out);
      assert.match(r.check('streaming').message, /a character was split/);
      junit(join(folder, 'split.xml'));
    }
  });

  test('the wrong content type, no usage', async () => {
    const type = await against({ type: 'application/json' });
    assert.equal(type.code, 70);
    assert.match(type.check('streaming').message, /Content-Type is "application\/json".*text\/event-stream/);
    const whole = await against({ chat: (q, res) => {
      res.writeHead(200, { 'content-type': 'application/json' });
      res.end(JSON.stringify({ choices: [{ index: 0, message: { role: 'assistant', content: 'The capital of France is Paris.' }, finish_reason: 'stop' }], usage: { prompt_tokens: 5, completion_tokens: 7, total_tokens: 12 } }));
    } });
    assert.match(whole.check('streaming').message, /Content-Type/);
    assert.equal(whole.check('coherent').verdict, 'pass');
    const html = await against({ chat: (q, res) => { res.writeHead(200, { 'content-type': 'text/html' }); res.end('<html>welcome</html>'); } });
    assert.match(html.report.message, /no JSON: '<html>/);
    const usage = await against({ usage: false });
    assert.equal(usage.code, 70);
    assert.match(usage.check('streaming').message, /no usage/);
  });

  test('statuses: 401 and 404 are flags, 503 is later, 500 and 429 are said', async () => {
    const status = (code, message, where = 'chat') => against({ [where]: (q, res) => { res.writeHead(code, { 'content-type': 'application/json' }); res.end(JSON.stringify({ error: { message } })); } });
    for (const [where, code, exit, why] of [['models', 401, 64, /401: no key.*--api-key/], ['chat', 401, 64, /401: no key.*--api-key/], ['chat', 404, 64, /404: no key.*--model/], ['models', 503, 75, /not ready yet: no key/], ['models', 429, 75, /429: no key/], ['models', 502, 75, /502: no key/], ['chat', 503, 75, /503: no key/], ['chat', 429, 75, /left no room/], ['chat', 500, 70, /HTTP 500: no key/], ['models', 404, 64, /--model NAME/]]) {
      const r = await status(code, 'no key', where);
      assert.equal(r.code, exit, `${where} ${code}: ${r.out} ${r.err}`);
      assert.match(r.err + (r.report?.message ?? ''), why);
    }
  });

  test('nobody there, no URL, no TLS, flags that need an engine', async () => {
    const r = await smoke(['--url', `http://127.0.0.1:${await freePort()}`]);
    assert.deepEqual([r.code, /no connection/.test(r.err)], [75, true], r.err);
    for (const [url, why] of [['localhost:30000', /no http:\/\//], ['ftp://x', /not http/], ['http://', /no host/], ['http://x:99999', /no port/], ['http://x/?a', /query/]]) {
      const bad = await smoke(['--url', url]);
      assert.equal(bad.code, 64, bad.err);
      assert.match(bad.err, why);
    }
    const tls = await smoke(['--url', 'https://127.0.0.1:1']);
    assert.ok((tls.code === 69 && /no TLS/.test(tls.err)) || tls.code === 75, tls.err);
    const flag = await smoke(['--url', 'http://x', '--page-size', '16']);
    assert.deepEqual([flag.code, /--page-size: not with --url/.test(flag.err)], [64, true]);
  });

  test('an interrupted run says so', async () => {
    const r = await against({ chat: (q, res) => res.writeHead(200, { 'content-type': 'text/event-stream' }).write(': wait\n\n') }, [], { signal: (child) => setTimeout(() => child.kill('SIGINT'), 1500) });
    assert.equal(r.code, 130, r.out + r.err);
    assert.match(r.report.message, /stopped after/);
  });

  test('a tool that is not called only warns, unless --strict', async () => {
    const chat = (q, res, body, sound) => { delete body.tools; return sound(); };
    const xml = join(folder, 'strict.xml');
    const r = await against({ chat });
    assert.deepEqual([r.code, r.check('tool-call').verdict], [0, 'warn']);
    const strict = await against({ chat }, ['--strict', '--junit', xml]);
    assert.equal(strict.code, 70);
    assert.deepEqual(junit(xml).failed, [strict.check('tool-call').message]);
  });
});

describe('earlier runs', () => {
  test('a first start of another version is an upgrade and compared with the version before; slower than ever is degraded, and ready', async () => {
    const server = await Server.start();
    const { db } = server;
    server.folder = mkdtempSync(join(tmpdir(), 'ddtree-test-'));  // keep the history
    await server.stop();
    // As the version before left it, on a machine ten times as fast.
    const script = `
import sqlite3, sys
d = sqlite3.connect(sys.argv[1])
d.execute("UPDATE smoke_run SET version = '0.0.9', tokens_per_second = 1e7")
d.commit()`;
    const edit = spawnSync('python3', ['-c', script, db], { encoding: 'utf8' });
    assert.equal(edit.status, 0, edit.stderr);
    const again = await Server.start({ args: ['--db', db] });
    try {
      const ready = await again.get('/readyz');
      assert.equal(ready.status, 200);
      await eventually('degraded', async () => (await again.get('/health')).body.status === 'degraded');
      assert.match((await again.get('/health')).body.reason, /the smoke test passed, but slower than before: .* median of the last 1 runs of version 0\.0\.9/);
      const run = await eventually('the run is in the history', async () => (await again.get('/admin/api/smoke')).body.runs.find((r) => r.trigger === 'upgrade'));
      assert.deepEqual([run.trigger, run.verdict, run.previous_version, run.before.runs, run.before.tokens_per_second], ['upgrade', 'pass', '0.0.9', 1, 1e7]);
      assert.match(run.warning, /slower than before/);
      assert.equal(run.checks.find((c) => c.name === 'earlier-runs').verdict, 'warn');
      assert.equal((await again.get('/admin/api/events?kind=smoke.regression')).body.events.length, 1);
    } finally {
      await again.stop();
      rmSync(join(db, '..'), { recursive: true, force: true });
    }
  });

  test('--smoke-prompts belong to readiness', async () => {
    const file = join(folder, 'ready.jsonl');
    writeFileSync(file, JSON.stringify({ id: 'never', user: 'What is the capital of Morocco?', expect: 'Oslo' }));
    const server = await Server.start({ args: ['--smoke-prompts', file], ready: false });
    const { code } = await server.exited;
    assert.equal(code, 70, server.log);
    assert.match(server.log, /prompt, DDTREE, never: 'Oslo' is not in the answer/);
    await server.stop();
  });
});

test('what a server says cannot move the cursor or change colours of the terminal', async () => {
  const nasty = '\u001b[31mred\u0007\u009b2J\n';
  const server = http.createServer((request, response) => {
    response.setHeader('content-type', 'application/json');
    response.statusCode = request.url.endsWith('/models') ? 200 : 500;
    response.end(JSON.stringify(request.url.endsWith('/models') ? { object: 'list', data: [{ id: nasty }] } : { error: { message: nasty } }));
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  const r = await smoke(['--url', `http://127.0.0.1:${server.address().port}`, '--answer-seconds', '5', '--total-seconds', '20']);
  server.close();
  assert.equal(r.code, 70, r.err);
  assert.match(r.out, /model +\[31mred/);
  assert.doesNotMatch(r.out + r.err, /[\u0000-\u0009\u000b-\u001f\u007f-\u009f]/);
});

describe('an engine of its own', () => {
  test('what keeps the suite from beginning is in the JUnit file and the JSON too', async () => {
    const taken = net.createServer((c) => c.destroy()).listen(0, '127.0.0.1');
    await once(taken, 'listening');
    const broken = join(folder, 'broken.jsonl');
    writeFileSync(broken, '{"id": "a", "user": "b"}\n\n{"id": \n[]\n');
    for (const [args, code, words] of [
      [['--url', 'http://127.0.0.1:1'], 75, /127\.0\.0\.1:1: no connection/],
      [['--url', `http://127.0.0.1:${taken.address().port}`], 75, /closed|no HTTP/],
      [['--url', 'http://[::1'], 64, /'\[::1' is no host; an IPv6 address stands in brackets/],
      [['--url', 'http://[::1]x:80'], 64, /is no host/],
      [['--url', 'http://::1:80'], 64, /is no host/],
      [['--url', 'http://[fe80::zz]:80/v1'], 64, /is no host/],
      [['--url', 'http://:80'], 64, /no host in it/],
      [['--url', 'http://127.0.0.1:1', '--prompts', broken], 64, /--prompts .*broken\.jsonl:3: the line is not valid JSON/],
      [['--model-path', '/nowhere/model'], 65, /\/nowhere\/model/],
    ]) {
      const xml = join(folder, 'begin.xml');
      rmSync(xml, { force: true });
      const r = await smoke([...args, '--junit', xml, '--json']);
      assert.equal(r.code, code, args.join(' ') + r.err);
      assert.match(r.err, words);
      const x = junit(xml);
      assert.deepEqual([x.tests, x.failures, x.names], [1, 1, ['begin']]);
      assert.match(x.failed[0], words);
      assert.equal(r.report.verdict, 'fail');
      assert.match(r.report.message, words);
    }
    taken.close();
    // A right IPv6 address is asked.
    assert.equal((await smoke(['--url', 'http://[::1]:1'])).code, 75);
  });

  test('passes, table and help', async () => {
    const r = await smoke([]);
    assert.equal(r.code, 0, r.out + r.err);
    assert.match(r.out, /pass {2}tool-call +DDTREE +get_weather-Paris/);
    assert.match(r.out, /pass: \d+ checks passed, 0 failed, 0 warned, 1 skipped/);
    const help = await smoke(['--help']);
    for (const word of ['--url', '--api-key', '--model', '--long', '--prompts', '--junit', '--json', '--strict', '--answer-seconds', 'Exit codes', 'expect_regex']) assert.ok(help.out.includes(word), word);
  });
});
