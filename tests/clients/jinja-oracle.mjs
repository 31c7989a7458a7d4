// Compares `ddtree template --lines` with Python's jinja2, set up as Hugging Face sets it up (jinja-oracle.py): every chat template of
// tests/data/templates and the tiny pair's, over generated requests; fixed snippets, one for each feature; and random snippets.
//
//   node --test tests/clients/jinja-oracle.mjs      SEED=n (or random) sets the seed, SNIPPETS=n how many random ones
//   DDTREE=path of the executable (default build/ddtree)
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { existsSync, readFileSync, readdirSync } from 'node:fs';
import { dirname, join } from 'node:path';
import test from 'node:test';
import { fileURLToPath } from 'node:url';
import { fixedSnippets, randomSnippet } from './jinja-snippets.mjs';
import { randomRequest, requests } from './jinja-requests.mjs';
import { Random } from './jinja-random.mjs';

const here = dirname(fileURLToPath(import.meta.url));
const top = join(here, '..', '..');
const ddtree = process.env.DDTREE ?? join(top, 'build', 'ddtree');
const seed = process.env.SEED === 'random' ? Date.now() % 1_000_000_007 : Number(process.env.SEED ?? 20260607);
const snippets = Number(process.env.SNIPPETS ?? 1500);

function run(command, args, cases) {
  const input = cases.map((c) => JSON.stringify(c)).join('\n') + '\n';
  const out = spawnSync(command, args, { input, encoding: 'utf8', maxBuffer: 1 << 30 });
  assert.equal(out.error, undefined, `${command} did not run: ${out.error}`);
  assert.equal(out.status, 0, `${command} ${args.join(' ')}: exit ${out.status}\n${out.stderr}`);
  const lines = out.stdout.split('\n').filter(Boolean).map((l) => JSON.parse(l));
  assert.equal(lines.length, cases.length, `${command}: one answer a line`);
  return lines;
}

// Objects without a text of their own print an address in Python; every such text counts as one.
const plain = (text) => text.replace(/<[^<>]* at 0x[0-9a-f]+>|<(?:generator|function|Cycler|Joiner) object>|&lt;[^<>]*? at 0x[0-9a-f]+&gt;/g, '<object>');

// Texts equal; or both refuse, with the same message where the template raised it itself.
function difference(ours, theirs) {
  if (ours.ok !== theirs.ok) return 'one refuses';
  if (ours.ok) return plain(ours.text) === plain(theirs.text) ? null : 'texts differ';
  if ((ours.kind === 'raised') !== (theirs.kind === 'raised')) return 'kinds differ';
  return ours.kind === 'raised' && ours.error !== theirs.error ? 'messages differ' : null;
}

function compare(cases, context) {
  const bare = cases.map(({ template, variables }) => ({ template, variables }));
  const ours = run(ddtree, ['template', '--lines'], bare);
  const theirs = run('/usr/bin/python3', [join(here, 'jinja-oracle.py')], bare);
  const wrong = [];
  let rendered = 0;
  cases.forEach((c, i) => {
    const what = difference(ours[i], theirs[i]);
    if (theirs[i].ok) rendered += 1;
    if (what) wrong.push({ what, name: c.name, template: c.template.length < 1500 ? c.template : undefined, variables: c.template.length < 1500 ? undefined : c.variables, ours: ours[i], theirs: theirs[i] });
  });
  const first = wrong.slice(0, Number(process.env.SHOW ?? 3)).map((w) => JSON.stringify(w, null, 1)).join('\n');
  assert.equal(wrong.length, 0, `${wrong.length} of ${cases.length} differ (${context})\n${first}`);
  return rendered;
}

test('the executable and the oracle are there', () => {
  assert.ok(existsSync(ddtree), `${ddtree} is missing: build it first, or set DDTREE`);
  const out = spawnSync('/usr/bin/python3', ['-c', 'import jinja2'], { encoding: 'utf8' });
  assert.equal(out.status, 0, `Debian's python3-jinja2 is missing (packaging/setup.sh test installs it): ${out.stderr}`);
});

test('every chat template renders every request alike', (t) => {
  const folder = join(top, 'tests', 'data', 'templates');
  const files = readdirSync(folder).filter((f) => f.endsWith('.jinja')).map((f) => join(folder, f));
  files.push(join(top, 'models', 'tiny', 'target', 'chat_template.jinja'));
  assert.ok(files.length >= 10, `only ${files.length} templates found in ${folder}`);
  const random = new Random(seed);
  const bodies = [...requests(), ...Array.from({ length: 150 }, () => randomRequest(random))];
  const cases = files.flatMap((file) => {
    const template = readFileSync(file, 'utf8');
    return bodies.map((variables, i) => ({ name: `${file} request ${i}`, template, variables }));
  });
  const rendered = compare(cases, `SEED=${seed}`);
  t.diagnostic(`${cases.length} renderings, ${rendered} of them succeeded, SEED=${seed}`);
  assert.ok(rendered > cases.length / 3, 'most requests should render: the generator is off');
});

test('fixed snippets, one for each feature', (t) => {
  const cases = fixedSnippets();
  const rendered = compare(cases, 'fixed snippets');
  t.diagnostic(`${cases.length} snippets, ${rendered} of them succeeded`);
});

test('random snippets', (t) => {
  const random = new Random(seed);
  const cases = Array.from({ length: snippets }, (_, i) => ({ name: `snippet ${i}`, ...randomSnippet(random) }));
  const rendered = compare(cases, `SEED=${seed} SNIPPETS=${snippets}`);
  t.diagnostic(`${cases.length} snippets, ${rendered} of them succeeded, SEED=${seed}`);
  assert.ok(rendered > cases.length / 4, 'a good part of the snippets should render: the generator is off');
});
