// 500 clients that vanish at random moments (while sending, queued, waiting for the whole, after any number of streamed bytes) leave no
// sequence, page or slot behind.
import assert from 'node:assert/strict';
import net from 'node:net';
import { test } from 'node:test';
import { Server, eventually, golden, sleep } from '../api/support/server.mjs';

const kTotal = 500;
const kAtOnce = 24;  // three times what runs: some are always queued

// A fixed generator: a failure can be repeated.
let state = 20240611;
function random(n) {
  state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
  return Math.floor((state / 2 ** 32) * n);
}

// Sends one request and cuts it off; says where.
function abandon(port) {
  return new Promise((done) => {
    const chat = random(3) > 0;
    const g = golden[random(golden.length)];
    const body = JSON.stringify({
      ...(chat ? { messages: g.messages, ...(g.tools ? { tools: g.tools } : {}) } : { prompt: random(2) ? g.prompt : [g.prompt, g.prompt_ids] }),
      max_tokens: 50 + random(400), ignore_eos: random(2) === 1, stream: random(3) > 0, temperature: random(2), seed: random(1000),
      speculative_algorithm: ['DDTREE', 'DFLASH', 'NEXTN', 'NONE'][random(4)],
    });
    const request = Buffer.from(`POST /v1/${chat ? 'chat/' : ''}completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`);
    const how = random(10);
    const socket = net.connect(port, '127.0.0.1');
    let received = 0;
    const cut = () => {
      if (random(2)) socket.resetAndDestroy();
      else socket.destroy();
    };
    socket.on('error', () => {});
    socket.on('close', done);
    if (how === 0) {  // in the middle of its own request
      socket.write(request.subarray(0, random(request.length)));
      setTimeout(cut, random(20));
    } else if (how <= 3) {  // at any time, whatever it waits for
      socket.write(request);
      setTimeout(cut, random(120));
    } else if (how === 4) {  // at once
      socket.write(request, cut);
    } else {  // after some bytes of the reply
      const bytes = 1 + random(random(2) ? 400 : 20_000);
      socket.write(request);
      socket.on('data', (d) => {
        received += d.length;
        if (received >= bytes) cut();
      });
      setTimeout(cut, 4000);  // a short reply never reaches it
    }
  });
}

test(`${kTotal} random disconnects leave nothing behind (J1, J2)`, async () => {
  const server = await Server.start({ args: ['--skip-smoke', '--max-running-requests', '8', '--context-length', '1024', '--recent-trees', '8'] });
  try {
    const ask = { messages: [{ role: 'user', content: 'List the first 16 even numbers.' }], chat_template_kwargs: { enable_thinking: false } };
    const before = (await server.chat(ask)).body.choices[0].message.content;
    await server.idle();
    const pages = await server.metric('kv_pages');
    let begun = 0, sawWaiting = false, sawRunning = false;
    const worker = async () => {
      while (begun < kTotal) {
        ++begun;
        await abandon(server.port);
      }
    };
    const watch = (async () => {
      while (begun < kTotal) {
        sawWaiting ||= await server.metric('num_requests_waiting') > 0;
        sawRunning ||= await server.metric('num_requests_running') > 0;
        await sleep(50);
      }
    })();
    await Promise.all([watch, ...Array.from({ length: kAtOnce }, worker)]);
    assert.ok(sawRunning && sawWaiting, 'the load never filled the batch: the test proves nothing');
    await server.idle();
    assert.equal(await server.metric('kv_pages'), pages);
    assert.ok(await server.metric('requests_cancelled_total') > kTotal / 10);
    assert.equal(await server.metric('requests_failed_total'), 0);
    // And it still answers as before, on all eight slots at once.
    const replies = await Promise.all(Array.from({ length: 8 }, () => server.chat(ask)));
    for (const r of replies) assert.equal(r.body.choices[0].message.content, before);
    assert.equal((await server.get('/readyz')).status, 200);
    await eventually('idle again', async () => await server.metric('kv_pages_used') === 0);
  } finally {
    assert.deepEqual(await server.stop(), { code: 0, signal: null });
  }
});
