// The memory plan on the command line and in a running service: the same table, followed to the page; what does not fit is 71, with a cure
// that works.
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, test } from 'node:test';
import { Server, binary, eventually } from './support/server.mjs';

const scratch = mkdtempSync(join(tmpdir(), 'ddtree-plan-'));
after(() => rmSync(scratch, { recursive: true, force: true }));
const plan = (...args) => spawnSync(binary, ['plan', ...args], { encoding: 'utf8', timeout: 60_000 });
const big = ['--model-config', 'qwen3.6-27b'];

test('Qwen3.6-27B on an H200, without one: every row, their sum, what is left', () => {
  const table = plan(...big, '--gpu-memory', '143771MiB');
  assert.equal(table.status, 0, table.stderr);
  for (const row of ['embedding', "target's layers", 'LM head', 'MTP head', 'drafter', 'KV pages, target', 'recurrent states', 'delta-rule factors', 'logits', 'left'])
    assert.match(table.stdout, new RegExp(`^${row} +[\\d,]+\\.\\d`, 'm'));
  const json = JSON.parse(plan(...big, '--gpu-memory=143771MiB', '--json').stdout);
  assert.equal(json.fits, true);
  assert.equal(json.memory_mib, 143771);
  const sum = json.rows.reduce((n, row) => n + row.mib, 0);
  assert.ok(Math.abs(sum - json.need_mib) < 1 && json.need_mib <= json.limit_mib, `${sum} ${json.need_mib} ${json.limit_mib}`);
  assert.deepEqual(JSON.parse(plan(...big, '--gpu-memory', 'h200', '--json').stdout), json);
  // A card's own defaults without --device too: a prompt alone comes in by 1,024 rows there.
  assert.equal(json.pass_rows, 1024);
  assert.deepEqual(JSON.parse(plan(...big, '--gpu-memory', 'h200', '--device', 'cuda', '--json').stdout), json);
  assert.equal(JSON.parse(plan(...big, '--gpu-memory', 'h200', '--chunked-prefill-size', '512', '--json').stdout).pass_rows, 512);
});

test('what does not fit is 71 with the table, and every change it names fits', () => {
  for (const flags of [['--gpu-memory', 'h100'], ['--gpu-memory', 'h100', '--mem-fraction-static', '0.60', '--context-length', '32768'],
    ['--gpu-memory', '96GiB', '--max-total-tokens', '2000000'], ['--gpu-memory', 'h200', '--max-running-requests', '256', '--speculative-ddtree-budget', '255']]) {
    const refused = plan(...big, ...flags, '--json');
    assert.equal(refused.status, 71, refused.stderr);
    const json = JSON.parse(refused.stdout);
    assert.ok(json.need_mib > json.limit_mib && json.cures.length > 0);
    assert.ok(refused.stderr.includes(`${json.cures[0]} fits`), refused.stderr);
    for (const cure of json.cures) {
      assert.match(cure, /^(--[a-z-]+ [\d.]+ ?)+$/);
      const changed = plan(...big, ...flags, ...cure.trim().split(' '), '--json');  // the last of a flag's values holds
      assert.equal(changed.status, 0, `${flags.join(' ')} ${cure}: ${changed.stderr}`);
    }
  }
  const never = plan(...big, '--gpu-memory', 'a6000');
  assert.equal(never.status, 71);
  assert.match(never.stderr, /a card with at least [\d,]+ MiB fits/);
});

test('--tp-size: the plan of each rank, side by side for several, without a card', () => {
  const at = ['--gpu-memory', 'a6000', '--context-length', '16384', '--max-running-requests', '2'];
  const sizes = JSON.parse(plan(...big, ...at, '--tp-size', '1,2,4,8', '--json').stdout);
  assert.deepEqual(sizes.map((p) => p.tp_size), [1, 2, 4, 8]);
  assert.deepEqual(sizes.map((p) => p.fits), [false, true, true, true]);
  const mib = (p, name) => p.rows.find((row) => row.name === name).mib;
  for (const p of sizes) {
    assert.ok(Math.abs(mib(p, 'head_weights') - mib(sizes[0], 'head_weights') / p.tp_size) < 1);
    assert.equal(mib(p, 'drafter_weights'), mib(sizes[0], 'drafter_weights'));
    assert.deepEqual(p, JSON.parse(plan(...big, ...at, '--tp', `${p.tp_size}`, '--json').stdout));
  }
  const table = plan(...big, ...at, '--tp-size', '1,2,4,8');
  assert.equal(table.status, 0, table.stderr);
  assert.match(table.stdout, /^ranks +1 +2 +4 +8$/m);
  assert.match(table.stdout, /does not fit +fits +fits +fits$/m);
  assert.match(plan(...big, ...at, '--tp-size', '2').stdout, /each of 2 ranks/);
  assert.equal(plan(...big, ...at, '--tp-size', '1').status, 71);
  const three = plan(...big, ...at, '--tp-size', '3');
  assert.equal(three.status, 64);
  assert.match(three.stderr, /--tp-size 3: .*num_key_value_heads 4.*1, 2, 4 and 8 can/);
  assert.match(plan(...big, ...at, '--tp-size', '2,x').stderr, /--tp-size 2,x: must be numbers of ranks/);
});

test('wrong flags are 64, wrong models 65', () => {
  assert.match(plan(...big, '--gpu-memory', '80').stderr, /--gpu-memory 80: must be a size with its unit/);
  assert.match(plan(...big, '--gpu-memry', '80GB').stderr, /did you mean --gpu-memory\?/);
  assert.equal(plan(...big, 'h200').status, 64);
  assert.match(plan(...big, '--gpu-memory', 'h200', '--context-length', '300000').stderr, /262144 positions/);
  assert.equal(plan('--model-path', scratch).status, 65);
  assert.equal(plan('--help').status, 0);
});

test('a service follows the plan of the same flags, shows it and keeps it', async () => {
  const flags = ['--max-running-requests', '3', '--context-length', '1024', '--page-size', '16'];
  const planned = JSON.parse(plan(...flags, '--json').stdout);
  const server = await Server.start({ args: ['--skip-smoke', ...flags] });
  try {
    const status = (await server.get('/admin/api/status')).body;
    assert.deepEqual(status.plan, planned);
    assert.equal(status.engine.pages_total, planned.kv_pages);
    assert.equal(status.engine.slots_total, planned.state_slots);
    // The history is written a moment later.
    const kept = await eventually('the run has its plan', async () => (await server.get(`/admin/api/runs/${status.run_id}`)).body.plan, 30);
    assert.deepEqual(kept, planned);
  } finally {
    await server.stop();
  }
  const refused = spawnSync(binary, ['serve', '--port', '0', '--db', join(scratch, 'r.db'), '--mem-fraction-static', '0.0001'], { encoding: 'utf8', timeout: 60_000 });
  assert.equal(refused.status, 71, refused.stderr);
  assert.match(refused.stderr, /does not fit: at least [\d,]+ MiB are needed/);
});
