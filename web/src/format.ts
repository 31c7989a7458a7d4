// How numbers, times and token texts are written, in one place, so that columns line up everywhere.

const thin = "\u202f";

export function integer(n: number): string {
  const digits = Math.round(n).toString();
  return Math.abs(n) < 10000 ? digits : digits.replace(/\B(?=(\d{3})+(?!\d))/g, thin);
}

export function fixed(n: number | null | undefined, digits: number): string {
  return n == null || !Number.isFinite(n) ? "–" : n.toFixed(digits);
}

// Tokens a second: three significant figures are what a measurement is worth.
export function rate(n: number | null | undefined): string {
  if (n == null || !Number.isFinite(n)) return "–";
  return n >= 1000 ? integer(n) : n >= 100 ? n.toFixed(0) : n.toFixed(1);
}

export function percent(share: number | null | undefined): string {
  if (share == null || !Number.isFinite(share)) return "–";
  const p = share * 100;
  return p === 0 ? "0 %" : p < 0.1 ? "< 0.1 %" : `${p.toFixed(p >= 99.95 || p >= 10 ? 0 : 1)} %`;
}

export function bytes(n: number): string {
  if (n < 1024) return `${n} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = n;
  let unit = -1;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    ++unit;
  }
  return `${value.toFixed(value >= 100 ? 0 : 1)} ${units[unit]}`;
}

// 840 ms, 3.2 s, 4 min 10 s, 2 h 13 min, 3 d 4 h
export function duration(ms: number | null | undefined): string {
  if (ms == null || !Number.isFinite(ms)) return "–";
  if (ms === 0) return "0 ms";
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  const s = ms / 1000;
  if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function ago(then: number, now: number): string {
  const ms = now - then;
  return ms < 2000 ? "just now" : `${duration(ms)} ago`;
}

const two = (n: number) => n.toString().padStart(2, "0");

export function clock(ms: number): string {
  const d = new Date(ms);
  return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
}

export function day(ms: number): string {
  const d = new Date(ms);
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`;
}

// Today: the time. Earlier: the date too.
export function moment(ms: number, now = Date.now()): string {
  return day(ms) === day(now) ? clock(ms) : `${day(ms)} ${clock(ms).slice(0, 5)}`;
}

export function iso(ms: number): string {
  return new Date(ms).toISOString();
}

export const count = (n: number, one: string, many = `${one}s`) => `${integer(n)} ${n === 1 ? one : many}`;

// A token's text as marks that can be seen: blanks and line ends would vanish in a drawing.
export function visible(text: string): string {
  return text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\r/g, "␍").replace(/\t/g, "⇥").replace(/[\u0000-\u001f\u007f]/g, "�");
}
