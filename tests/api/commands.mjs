// The subcommands that answer on a terminal: what they refuse, in whose words, and with which exit code.
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { closeSync, existsSync, mkdirSync, mkdtempSync, openSync, readdirSync, rmSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, test } from 'node:test';
import { binary } from './support/server.mjs';

const scratch = mkdtempSync(join(tmpdir(), 'ddtree-commands-'));
after(() => rmSync(scratch, { recursive: true, force: true }));
const run = (args, options = {}) => spawnSync(binary, args, { encoding: 'utf8', timeout: 240_000, input: '', ...options });
const db = join(scratch, 'h.db');

test('a folder in place of a template is 65, with its name', () => {
  const folder = join(scratch, 'folder.jinja');
  mkdirSync(folder);
  const template = run(['template', folder], { input: '{}' });
  assert.equal(template.status, 65);
  assert.match(template.stderr, /^ddtree template: .*folder\.jinja is a folder/);
  for (const args of [['serve', '--port', '0', '--db', db], ['run', 'hello'], ['smoke'], ['bench']]) {
    const r = run([...args, '--chat-template', folder]);
    assert.equal(r.status, 65, `${args[0]}: ${r.stderr}`);
    assert.match(r.stderr, /folder\.jinja/);
    assert.match(r.stderr, /folder(?!\.)/);
  }
});

test('output that cannot be written is 69, whatever the command', () => {
  const hello = join(scratch, 'hello.jinja');
  writeFileSync(hello, 'hello');
  const commands = [
    [['run', '--no-think', '--max-tokens', '4', 'Say hello.'], ''],
    [['run', '--json', '--max-tokens', '4', 'Say hello.'], ''],
    [['template', hello], '{}'],
    [['template', '--lines'], '{"template": "a", "variables": {}}\n'],
    [['tokenize'], '"a"\n'],
    [['detokenize'], '[1]\n'],
    [['smoke', '--list'], ''],
    [['bench', '--modes', 'none', '--streams', '1', '--kinds', 'code', '--repeat', '1', '--max-tokens', '2'], ''],
    [['serve', '--help'], ''],
    [['install', '--from-unit', join(import.meta.dirname, '../data/units/plain.service')], ''],  // more than stdio's buffer holds
  ];
  for (const [args, input] of commands) {
    assert.equal(run(args, { input }).status, 0, args.join(' '));
    const full = openSync('/dev/full', 'w');
    const r = run(args, { input, stdio: ['pipe', full, 'pipe'] });
    closeSync(full);
    assert.equal(r.status, 69, `${args.join(' ')}: ${r.stderr}`);
    assert.match(r.stderr, new RegExp(`ddtree ${args[0]}: .*(could not be written|closed)`));
  }
});

test('an unknown flag is said in the words of its own command, with the nearest of its flags', () => {
  for (const [command, slip, near] of [
    ['serve', '--pot', '--port'], ['run', '--max-tokes', '--max-tokens'], ['run', '--temprature', '--temperature'], ['run', '--budgt', '--budget'],
    ['bench', '--strems', '--streams'], ['bench', '--modle-path', '--model-path'], ['smoke', '--lst', '--list'], ['smoke', '--jsn', '--json'],
  ]) {
    const r = run([command, slip]);
    assert.equal(r.status, 64, command);
    assert.equal(r.stderr, `ddtree ${command}: ${slip} is no flag of ddtree ${command}; did you mean ${near}?\n`);
  }
  for (const command of ['serve', 'run', 'bench', 'smoke']) {
    const r = run([command, '--bogus-and-nothing-like-it-at-all']);
    assert.equal(r.status, 64, command);
    assert.equal(r.stderr, `ddtree ${command}: --bogus-and-nothing-like-it-at-all is no flag of ddtree ${command}; ddtree ${command} --help lists them\n`);
  }
});

test('run: a pipe gets the answer alone, reasoning goes to standard error', () => {
  const asked = ['run', '--think', '--temperature', '0', '--max-tokens', '60', 'Say hello.'];
  const whole = JSON.parse(run([...asked, '--json']).stdout);
  assert.ok(whole.reasoning.length > 0 && whole.text.length > 0);
  const r = run(asked);
  assert.equal(r.status, 0);
  assert.equal(r.stdout, `${whole.text.trimEnd()}\n`);
  assert.ok(r.stderr.startsWith(whole.reasoning.trimEnd()), r.stderr);
});

test("a bench mode's budget is what the flag takes", () => {
  for (const budget of ['0', '257', '511', '1.5', 'x', '']) {
    const r = run(['bench', '--modes', `none,ddtree:${budget}`]);
    assert.equal(r.status, 64, budget);
    assert.match(r.stderr, /ddtree:N with N from 1 to 256/);
  }
  const r = run(['bench', '--modes', 'ddtree:256', '--streams', '1', '--kinds', 'code', '--repeat', '1', '--max-tokens', '2', '--json']);
  assert.equal(r.status, 0, r.stderr);
  assert.equal(JSON.parse(r.stdout).streams[0].modes[0].mode, 'DDTREE 256');
});

test('broken JSON is said in our words: line, column, what is wrong', () => {
  const hello = join(scratch, 'again.jinja');
  writeFileSync(hello, 'hello');
  for (const broken of ['{oops', '[1', '"\\ud800"', '1e999', 'nul', '{"a" 1}', '']) {
    for (const args of [['tokenize'], ['detokenize'], ['template', hello], ['template', '--chat', hello]]) {
      if (broken === '' && args[0] !== 'template') continue;  // no line at all
      const r = run(args, { input: `${broken}\n` });
      assert.equal(r.status, 64, `${args[0]} ${broken}: ${r.stderr}`);
      assert.match(r.stderr, /not valid JSON: /);
      assert.doesNotMatch(r.stderr, /json\.exception|parse error|while parsing/);
    }
  }
  assert.equal(run(['tokenize'], { input: '"a"\n{oops\n' }).stderr,
    "ddtree tokenize: line 2: not valid JSON: line 1, column 2: invalid literal; last read: '{o'; expected string literal\n");
  // Model files too.
  const model = join(scratch, 'model');
  mkdirSync(model);
  writeFileSync(join(model, 'config.json'), '{"a": }');
  const r = run(['run', '--model-path', model, 'hello']);
  assert.equal(r.status, 65);
  assert.match(r.stderr, /config\.json: not valid JSON: line 1, column 7: /);
  const tokenizer = join(scratch, 'tokenizer.json');
  writeFileSync(tokenizer, '{"a": }');
  const t = run(['tokenize', '--tokenizer', tokenizer]);
  assert.equal(t.status, 65);
  assert.match(t.stderr, /tokenizer\.json: not valid JSON: line 1, column 7: /);
});

test('doctor: each line with its verdict, a complaint with its cure, the exit code by the lines', () => {
  for (const args of [[], ['--device', 'cuda']]) {
    const r = run(['doctor', '--json', '--db', db, ...args]);
    const d = JSON.parse(r.stdout);
    assert.equal(r.status, d.exit_code);
    assert.equal(d.checks.filter((c) => c.verdict === 'fail').length, d.failures);
    assert.equal(d.failures === 0, d.exit_code === 0);
    for (const c of d.checks) {
      assert.ok(['ok', 'warn', 'fail'].includes(c.verdict) && c.check && c.found, JSON.stringify(c));
      if (c.verdict !== 'ok') assert.ok(c.wanted && c.cure, JSON.stringify(c));
    }
    for (const name of ['build', 'cpu', 'limits', 'disk (history)']) assert.ok(d.checks.some((c) => c.check === name), name);
    const words = run(['doctor', '--db', db, ...args]);
    assert.equal(words.status, d.exit_code);
    for (const c of d.checks) assert.ok(words.stdout.includes(c.check));
  }
  const wrong = run(['doctor', '--device', 'tpu']);
  assert.equal(wrong.status, 64);
  assert.match(wrong.stderr, /^ddtree doctor: --device tpu: must be cpu, cuda or cuda:N/);
  assert.equal(run(['doctor', '--verbose']).status, 64);
});

test('bench --only load: a checkpoint is written, read and loaded, and taken away unless it is kept', () => {
  const folder = join(scratch, 'load');
  const args = ['bench', '--only', 'load', '--size', '0.02', '--repeat', '1', '--readers', '2', '--dir', folder, '--json'];
  const kept = run([...args, '--keep']);
  assert.equal(kept.status, 0, kept.stderr);
  const shards = readdirSync(folder).filter((f) => f.endsWith('.safetensors'));
  assert.ok(shards.length > 1, 'more than one shard');
  const { load } = JSON.parse(kept.stdout);
  const written = shards.reduce((sum, f) => sum + statSync(join(folder, f)).size, 0);
  assert.ok(load.bytes > 0.9 * written && load.bytes <= written, `${load.bytes} of ${written}`);
  assert.equal(load.load_seconds.length, 1);
  assert.ok(load.ratio > 0);
  const again = run(args);
  assert.equal(again.status, 0, again.stderr);
  assert.equal(JSON.parse(again.stdout).load.bytes, load.bytes);
  assert.ok(existsSync(folder), 'what was there before stays');
  truncateSync(join(folder, shards[0]), 1000);
  const cut = run(args);
  assert.equal(cut.status, 65);
  assert.match(cut.stderr, new RegExp(shards[0]));
  const fresh = join(scratch, 'fresh');
  assert.equal(run(['bench', '--only', 'load', '--size', '0.02', '--repeat', '1', '--dir', fresh]).status, 0);
  assert.ok(!existsSync(fresh));
  writeFileSync(join(scratch, 'other'), 'x');
  assert.equal(run(['bench', '--only', 'load', '--dir', scratch]).status, 64);
});
