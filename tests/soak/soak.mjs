// Mixed load on the loopback for some minutes, with faults from outside (clients that vanish, broken requests, probes in between) and from inside
// (ddtree-inject). At the end memory, file handles, pages and slots are back at their level, and every request has its row.
// usage: node tests/soak/soak.mjs [MINUTES]   (./dev soak [MINUTES]; default 30)
import { readFileSync, readdirSync } from 'node:fs';
import { Server, eventually, faultyBinary, rawPost, sleep } from '../api/support/server.mjs';

const minutes = Number(process.argv[2] ?? 30);
if (!(minutes > 0)) throw new Error(`${process.argv[2]} is no number of minutes`);

// Apart from each other by more than the proof that the ladder wants, so that a fault after a restart is not taken for its failure.
const period = 12_000;
const inject = [
  `nan-logits:after=1000,for=1,every=${period}`, `drafter-garbage:after=2500,for=400,every=${period}`, `slow-round:after=5000,for=12,ms=200,every=${period}`,
  `oom:after=6500,for=1,every=${period}`, `stuck-round:after=8000,for=1,ms=4000,every=${period}`, `device-lost:after=10000,for=1,every=${2 * period}`,
  'store-full:after=60,for=3,every=200',
];
const server = await Server.start({
  program: faultyBinary,
  args: ['--max-running-requests', '6', '--max-queued-requests', '12', '--context-length', '1024', '--recent-trees', '16', '--log-level', 'error',
    '--ladder-settle', '1', '--ladder-proof', '3', '--canary-interval', '20', '--stuck-seconds', '2', '--stuck-exit-seconds', '60',
    ...inject.flatMap((i) => ['--inject', i])],
});

let seed = 12345;
const random = (n) => { seed = (Math.imul(seed, 1103515245) + 12345) >>> 0; return (seed >>> 8) % n; };
const pick = (list) => list[random(list.length)];
const prompts = ['List the numbers from 35 to 61.', 'What is the capital of Morocco?', 'Write a Python function is_prime(n) using iteration.', 'Tell me a short story about a fox.', 'Count from 1 to 60.'];
const chat = () => ({
  messages: [{ role: 'user', content: pick(prompts) }], max_tokens: 16 + random(200), temperature: pick([0, 0, 0.8]), ignore_eos: random(4) === 0,
  ...(random(3) === 0 ? { speculative_algorithm: pick(['NONE', 'DFLASH', 'DDTREE', 'NEXTN']) } : {}),
});
const broken = [
  '{', '{"messages": 5}', { messages: [] }, { ...chat(), temperature: 9999 }, { ...chat(), model: 'nobody' }, { ...chat(), max_tokens: -1 },
  { messages: [{ role: 'user', content: 'word '.repeat(3000) }] }, { ...chat(), speculative_algorithm: 'MAGIC' }, 'null', '[]',
];

const counts = {};
const count = (what) => { counts[what] = (counts[what] ?? 0) + 1; };
const ids = new Set();
const known = (headers) => { const id = headers['x-request-id'] ?? headers.get?.('x-request-id'); if (id) ids.add(id); };
const wrong = [];

// Sends, reads `bytes` of the reply's body, and goes away.
function vanish(path, body, bytes) {
  return new Promise((done) => {
    const request = rawPost(server.port, path, body);
    const timer = setTimeout(() => { request.destroy(); done(); }, bytes < 0 ? random(40) : 30_000);
    request.on('response', (r) => {
      known(r.headers);
      let seen = 0;
      r.on('data', (d) => { seen += d.length; if (bytes >= 0 && seen > bytes) request.destroy(); });
      r.on('error', () => {});
      r.on('close', () => { clearTimeout(timer); done(); });
    });
    request.on('error', () => { clearTimeout(timer); done(); });
  });
}

const actions = [
  [10, 'chat', async () => {
    const r = await server.post('/v1/chat/completions', chat());
    known(r.headers);
    count(`chat ${r.status}`);
    if (![200, 429, 500, 503].includes(r.status)) wrong.push(`chat: ${r.status} ${r.text.slice(0, 200)}`);
  }],
  [10, 'stream', async () => {
    const r = await server.stream('/v1/chat/completions', chat());
    known(r.headers);
    const last = r.events.at(-1);
    const end = r.status !== 200 ? r.status : last === '[DONE]' ? 'done' : last?.error ? 'error event' : 'cut';
    count(`stream ${end}`);
    if (end === 'cut') wrong.push(`stream without an end: ${JSON.stringify(last).slice(0, 200)}`);
  }],
  [3, 'completion', async () => {
    const r = await server.post('/v1/completions', { prompt: [pick(prompts), pick(prompts)], max_tokens: 30, temperature: 0 });
    known(r.headers);
    count(`completion ${r.status}`);
  }],
  [4, 'broken', async () => {
    const r = await server.post(pick(['/v1/chat/completions', '/v1/completions']), pick(broken));
    count(`broken ${r.status}`);
    if (![400, 404, 413, 503].includes(r.status)) wrong.push(`broken: ${r.status} ${r.text.slice(0, 200)}`);
  }],
  [5, 'vanish', async () => { await vanish('/v1/chat/completions', { ...chat(), stream: true }, random(1500)); count('vanished in a stream'); }],
  [3, 'vanish', async () => { await vanish('/v1/chat/completions', chat(), -1); count('vanished before an answer'); }],
  [3, 'probe', async () => {
    const r = await server.get(pick(['/health', '/livez', '/readyz', '/startupz', '/health_generate', '/metrics', '/v1/models', '/admin/api/status',
      '/admin/api/requests?limit=20', '/admin/api/events?limit=20', '/admin/api/series?minutes=5', '/']));
    count(`probe ${r.status}`);
    if (![200, 503].includes(r.status)) wrong.push(`probe: ${r.status}`);
  }],
];
const deck = actions.flatMap(([weight, , act]) => Array(weight).fill(act));

const pid = server.child.pid;
const rss = () => Number(readFileSync(`/proc/${pid}/statm`, 'utf8').split(' ')[1]) * 4096 / (1 << 20);
const handles = () => readdirSync(`/proc/${pid}/fd`).length;
const threads = () => readdirSync(`/proc/${pid}/task`).length;

// A moment of rest, to see the level: requests over, engine there.
async function level(label, top = false) {
  const idle = () => eventually('ready and idle', async () => {
    try {
      if ((await server.get('/readyz')).status !== 200) return false;
      if (top && (await server.get('/health')).body.ladder.step !== 'DDTREE') return false;
      for (const name of ['num_requests_running', 'num_requests_waiting', 'num_requests_live', 'kv_pages_used', 'state_slots_used'])
        if (await server.metric(name) !== 0) return false;
      return true;
    } catch {
      if (server.exit) throw new Error(`the server ended: ${JSON.stringify(server.exit)}\n${server.log.slice(-3000)}`);
      return false;
    }
  }, 180);
  await idle();
  await sleep(2000);
  await idle();  // a canary may be running: it has pages and a slot of its own
  const l = { label, rss: rss(), handles: handles(), threads: threads(), pages: await server.metric('kv_pages_used'), slots: await server.metric('state_slots_used') };
  console.log(`${label.padEnd(14)} RSS ${l.rss.toFixed(1)} MiB, ${l.handles} handles, ${l.threads} threads, ${l.pages} pages, ${l.slots} slots, ladder ${(await server.get('/health')).body.ladder.step}`);
  return l;
}

let failed = [];
try {
  const start = await level('start');
  const levels = [];
  const end = Date.now() + minutes * 60_000;
  const stretches = Math.max(4, Math.min(10, Math.round(minutes)));
  for (let i = 0; i < stretches; ++i) {
    const until = Math.min(end, Date.now() + (minutes * 60_000) / stretches);
    await Promise.all(Array.from({ length: 8 }, async () => {
      while (Date.now() < until && !server.exit) {
        try {
          await pick(deck)();
        } catch (error) {
          if (error instanceof TypeError) count('connection failed');  // fetch's word for it
          else throw error;
        }
      }
    }));
    levels.push(await level(`stretch ${i + 1}/${stretches}`, i + 1 === stretches));
  }
  const events = {};
  for (let offset = 0; ; offset += 500) {
    const page = (await server.get(`/admin/api/events?limit=500&offset=${offset}`)).body;
    for (const e of page.events) events[e.kind] = (events[e.kind] ?? 0) + 1;
    if (offset + 500 >= page.total) break;
  }
  await eventually('the history is written', async () => await server.metric('store_writable') === 1 && await server.metric('store_queued_rows') === 0, 30);
  let missing = 0;
  for (const id of ids) if ((await server.get(`/admin/api/requests/${id}`)).status !== 200) ++missing;
  const rows = (await server.get('/admin/api/requests?limit=1')).body.total;

  console.log('\nwhat was done');
  for (const [k, v] of Object.entries(counts).sort()) console.log(`  ${k.padEnd(32)} ${v}`);
  console.log('events');
  for (const [k, v] of Object.entries(events).sort()) console.log(`  ${k.padEnd(32)} ${v}`);
  // This client's kept-alive connections end after a minute, each with its handle; threads of the pool that waited for them then go too.
  // Counted here: the questions of a level open connections again.
  let open = handles();
  await eventually('file handles are back', () => (open = Math.min(open, handles())) <= start.handles + 3, 90).catch(() => {});
  await sleep(2000);
  levels.push(await level('end'));
  const middle = levels[Math.floor(levels.length / 3)], last = levels.at(-1);
  const growth = last.rss - middle.rss;
  console.log(`\n${'check'.padEnd(34)} figure`);
  const check = (what, figure, good) => {
    console.log(`${what.padEnd(34)} ${String(figure).padEnd(40)} ${good ? 'ok' : 'FAILED'}`);
    if (!good) failed.push(what);
  };
  check('RSS since a third of the time', `${middle.rss.toFixed(1)} → ${last.rss.toFixed(1)} MiB`, growth < 24 + 0.1 * middle.rss);
  check('file handles', `${start.handles} → ${open}`, open <= start.handles + 3);
  check('threads', `${start.threads} → ${last.threads}`, last.threads <= start.threads + 16);
  check('pages', last.pages, last.pages === 0);
  check('slots', last.slots, last.slots === 0);
  check('requests with a known id, all rows', `${ids.size}, ${missing} without a row (${rows} rows)`, missing === 0 && ids.size > 0);
  check('history rows dropped', await server.metric('store_dropped_rows_total'), await server.metric('store_dropped_rows_total') === 0);
  check('unexpected answers', wrong.length, wrong.length === 0);
  check('faults were injected', Object.keys(events).filter((k) => k.startsWith('fault.')).join(' ') || 'none', Object.keys(events).some((k) => k.startsWith('fault.')));
  for (const w of wrong.slice(0, 10)) console.log(`  ${w}`);
} catch (error) {
  failed.push(error.message);
  console.log(`\n${error.stack}\n--- log of the server:\n${server.log.slice(-3000)}`);
}
const exit = await server.stop();
if (exit.code !== 0) failed.push(`exit ${JSON.stringify(exit)}`);
console.log(failed.length === 0 ? `\n${minutes} minutes: all well` : `\nFAILED: ${failed.join('; ')}`);
process.exit(failed.length === 0 ? 0 : 1);
