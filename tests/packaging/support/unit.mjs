// A unit file as systemd reads it, and what its rules make of a process's end: systemd.service(5) in 80 lines, for machines
// where no systemd runs. Knows what these tests need and says so where it does not. Not a test file.
import assert from 'node:assert/strict';

// Section → name → values, in the file's order. An empty value forgets the ones before (lists are reset by it).
export function parseUnit(text) {
  const unit = new Map();
  let section = null, line = '';
  for (const raw of text.split('\n')) {
    if (/^\s*[#;]/.test(raw)) continue;  // also in the middle of a continued line
    line += raw;
    if (line.endsWith('\\')) { line = line.slice(0, -1) + ' '; continue; }
    const trimmed = line.trim();
    line = '';
    if (trimmed === '') continue;
    const header = /^\[(.+)\]$/.exec(trimmed);
    if (header) { section = header[1]; continue; }
    const at = trimmed.indexOf('=');
    assert.ok(section && at > 0, `no assignment in a section: ${trimmed}`);
    const name = trimmed.slice(0, at).trim(), value = trimmed.slice(at + 1).trim();
    if (!unit.has(section)) unit.set(section, new Map());
    const values = unit.get(section);
    values.set(name, value === '' ? [] : [...(values.get(name) ?? []), value]);
  }
  return unit;
}

export const values = (unit, section, name) => unit.get(section)?.get(name) ?? [];
export const value = (unit, section, name, otherwise) => values(unit, section, name).at(-1) ?? otherwise;

// Words of a command line or of a variable's value: quotes and backslashes as in systemd.syntax(7).
export function words(text) {
  const out = [];
  let word = null, quote = null;
  for (let i = 0; i < text.length; ++i) {
    const c = text[i];
    if (c === '\\' && quote !== "'" && i + 1 < text.length) { word = (word ?? '') + text[++i]; continue; }
    if (quote) { if (c === quote) quote = null; else word += c; continue; }
    if (c === '"' || c === "'") { quote = c; word ??= ''; continue; }
    if (/\s/.test(c)) { if (word !== null) out.push(word); word = null; continue; }
    word = (word ?? '') + c;
  }
  assert.equal(quote, null, `a quote is open at the end of: ${text}`);
  if (word !== null) out.push(word);
  return out;
}

// NAME=VALUE lines of an EnvironmentFile=.
export function environmentFile(text) {
  const out = {};
  for (const line of text.split('\n')) {
    const m = /^\s*([A-Za-z_][A-Za-z0-9_]*)=(.*)$/.exec(line);
    if (m && !/^\s*[#;]/.test(line)) out[m[1]] = words(m[2]).join(' ');
  }
  return out;
}

// ExecStart= as argv: ${NAME} stays one word, $NAME alone is split at spaces.
export function command(unit, environment) {
  const lines = values(unit, 'Service', 'ExecStart');
  assert.equal(lines.length, 1, 'one ExecStart=');
  return words(lines[0].replace(/^[-@:+!]+/, '')).flatMap((w) => {
    const alone = /^\$([A-Za-z_]\w*)$/.exec(w);
    if (alone) return words(environment[alone[1]] ?? '');
    return [w.replace(/\$\{([A-Za-z_]\w*)\}/g, (_, name) => environment[name] ?? '')];
  });
}

const exitNames = { SUCCESS: 0, FAILURE: 1, USAGE: 64, DATAERR: 65, NOINPUT: 66, UNAVAILABLE: 69, SOFTWARE: 70, OSERR: 71, TEMPFAIL: 75 };
// Does a list such as "1 SIGKILL TEMPFAIL" name this end?
function lists(entries, end) {
  return entries.flatMap((e) => e.split(/\s+/)).some((e) => {
    if (e.startsWith('SIG')) return end.signal === e;
    const code = /^\d+$/.test(e) ? Number(e) : exitNames[e];
    assert.notEqual(code, undefined, `exit status ${e} is not known here`);
    return end.code === code;
  });
}

// end: { code } or { signal, core } of the main process, or { timeout: true }, { watchdog: true } where systemd ended it itself;
// ready: it had said READY=1; stopped: by systemctl stop. The service's result in systemd's words.
export function resultOf(unit, end, ready) {
  if (end.watchdog) return 'watchdog';
  if (end.timeout) return 'timeout';
  const clean = end.code === 0 || ['SIGHUP', 'SIGINT', 'SIGTERM', 'SIGPIPE'].includes(end.signal) || lists(values(unit, 'Service', 'SuccessExitStatus'), end);
  // A service of Type=notify that goes before it said READY=1 was never there, however politely it went.
  if (clean) return value(unit, 'Service', 'Type', 'simple') === 'notify' && !ready ? 'protocol' : 'success';
  if (end.signal) return end.core ? 'core-dump' : 'signal';
  return 'exit-code';
}

export function restarts(unit, end, { ready = true, stopped = false } = {}) {
  if (stopped) return false;
  if (lists(values(unit, 'Service', 'RestartPreventExitStatus'), end)) return false;
  if (lists(values(unit, 'Service', 'RestartForceExitStatus'), end)) return true;
  const result = resultOf(unit, end, ready);
  switch (value(unit, 'Service', 'Restart', 'no')) {
    case 'no': return false;
    case 'always': return true;
    case 'on-success': return result === 'success';
    case 'on-failure': return result !== 'success';
    case 'on-abnormal': return !['success', 'exit-code'].includes(result);
    case 'on-abort': return ['signal', 'core-dump'].includes(result);
    case 'on-watchdog': return result === 'watchdog';
    default: throw new Error(`Restart=${value(unit, 'Service', 'Restart')} is not known here`);
  }
}

export function seconds(span) {
  if (span === 'infinity') return Infinity;
  const unit = { '': 1, s: 1, sec: 1, ms: 0.001, m: 60, min: 60, h: 3600, d: 86400 };
  return [...span.matchAll(/(\d+(?:\.\d+)?)\s*([a-z]*)/g)].reduce((sum, [, n, u]) => {
    assert.ok(u in unit, `time span ${span}: unit '${u}' is not known here`);
    return sum + Number(n) * unit[u];
  }, 0);
}
