// Made-up data behind the dashboard's routes, for working on its look without a server (`npm run dev`). Never part of a build: nothing
// under src/ imports it. Shapes are those of docs/admin-api.md.
import type { IncomingMessage, ServerResponse } from "node:http";
import type { Plugin } from "vite";

let seed = 7;
const random = () => {
  seed = (seed * 1664525 + 1013904223) >>> 0;
  return seed / 2 ** 32;
};
const pick = <T>(list: T[]): T => list[Math.floor(random() * list.length)]!;

const answer = `Here is a function that returns the median of items:\n\n\`\`\`python\ndef median(items):\n    ordered = sorted(items)\n    middle = len(ordered) // 2\n    if len(ordered) % 2 == 1:\n        return ordered[middle]\n    return (ordered[middle - 1] + ordered[middle]) / 2\n\`\`\`\n<img src=x onerror=alert(1)> is text.`;
const tokens = answer.match(/ ?[A-Za-z]+|\s*\n\s*| ?[^\sA-Za-z]+|\s+/g)!;
const vocabulary = [...new Set(tokens)];
const idOf = (text: string) => 200 + vocabulary.indexOf(text);
const texts = Object.fromEntries(vocabulary.map((t) => [idOf(t), t]));

function round(number: number, at: number, budget: number) {
  const token = [idOf(tokens[at]!)];
  const parent = [-1];
  const log_prob = [0];
  const accepted = [1];
  const depth = [0];
  const good = Math.min(tokens.length - at - 2, Math.floor(random() * random() * 14));
  let spine = 0;
  for (let d = 1; d <= 15 && token.length <= budget; ++d) {
    token.push(d <= good ? idOf(tokens[at + d]!) : idOf(pick(vocabulary)));
    parent.push(spine);
    log_prob.push(log_prob[spine]! - random() * 0.25 * (d > good ? 4 : 1));
    accepted.push(d <= good ? 1 : 0);
    depth.push(d);
    spine = token.length - 1;
    if (d > good + 3) break;
  }
  while (token.length <= budget) {
    const p = Math.floor(random() ** 2 * token.length);
    if (depth[p]! >= 15) continue;
    let t = idOf(pick(vocabulary));
    while (parent.some((q, i) => q === p && token[i] === t) || (accepted[p] && at + depth[p]! + 1 < tokens.length && t === idOf(tokens[at + depth[p]! + 1]!))) t = idOf(pick(vocabulary));
    token.push(t);
    parent.push(p);
    log_prob.push(log_prob[p]! - 0.7 - random() * 4);
    accepted.push(0);
    depth.push(depth[p]! + 1);
  }
  const end = at + good + 1 >= tokens.length - 1;
  const draft = 2 + random();
  const verify = 6 + random() * 4;
  return { round: number, start: 40 + at, token, parent, log_prob, accepted, next: end ? -1 : idOf(tokens[at + good + 1]!), draft_ms: draft, verify_ms: verify, total_ms: draft + verify + 0.6, good };
}
const rounds: ReturnType<typeof round>[] = [];
for (let at = 0; at < tokens.length - 1; ) {
  const made = round(rounds.length, at, [16, 31, 31, 63, 31][rounds.length % 5]!);
  rounds.push(made);
  if (made.next === -1) break;
  at += made.good + 1;
}

const started = Date.now() - 3 * 3600e3;
const acceptedAt = [931, 842, 760, 691, 630, 571, 520, 466, 420, 371, 330, 280, 241, 190, 150];
const finishes = ["stop", "stop", "stop", "stop", "length", "tool_calls", "cancelled", "error"];
const requests = Array.from({ length: 137 }, (_, i) => {
  const finish = i === 0 ? "stop" : pick(finishes);
  const mode = pick(["DDTREE", "DDTREE", "DDTREE", "DFLASH", "NEXTN", "NONE"]);
  const completion = finish === "error" ? 0 : 20 + Math.floor(random() * 900);
  const n = i === 0 ? rounds.length : Math.ceil(completion / (mode === "NONE" ? 1 : 3 + random() * 5));
  const received = Date.now() - i * 191e3 - 4000;
  const decode = completion * (mode === "NONE" ? 9 : 2 + random());
  return {
    id: `chatcmpl-${(0x9f3a71c2 - i * 7919).toString(16)}${i}`, run_id: 3, received, finished: received + decode + 90, endpoint: "/v1/chat/completions", client: pick(["openai-python/2.8", "curl/8.5", "127.0.0.1"]),
    model: "tiny", stream: random() > 0.3, thinking: random() > 0.5, http_status: finish === "error" ? 500 : 200, finish, error: finish === "error" ? "engine fault: logits of row 3 are not finite" : "",
    mode: i === 0 ? "DDTREE" : mode, budget: 0, temperature: 0.7, prompt_tokens: 12 + Math.floor(random() * 4000), completion_tokens: completion, cached_tokens: 0, reasoning_tokens: 0,
    rounds: n, drafted: n * 31, accepted: Math.max(0, completion - n - 1), tokens_per_round: n ? 1 + Math.max(0, completion - n - 1) / n : null,
    queue_ms: random() * 3, prefill_ms: 20 + random() * 60, decode_ms: decode, ttft_ms: 24 + random() * 60, total_ms: decode + 90, tokens_per_second: completion ? (completion * 1000) / decode : 0, trees: i < 64 && mode !== "NONE" ? rounds.length : i === 0 ? rounds.length : 0,
  };
});
const runs = [
  { state: "running", from: started, ready: 4100, to: null, end_reason: "", exit_code: null },
  { state: "crashed", from: started - 8 * 3600e3, ready: 4300, to: started - 12e3, end_reason: "ended without notice", exit_code: null },
  { state: "stopped", from: started - 30 * 3600e3, ready: 3900, to: started - 9 * 3600e3, end_reason: "asked to stop", exit_code: 0 },
  { state: "failed", from: started - 31 * 3600e3, ready: null, to: started - 31 * 3600e3 + 1800, end_reason: "failed: tensor fc.weight in model.safetensors is [64, 192], expected [64, 256]", exit_code: 65 },
].map((r, i) => ({ id: 4 - i, version: "0.1.0", host: "gpu-03", pid: 4121 - i * 311, model: "embedded:tiny", drafter: "embedded:tiny", mode: "DDTREE", started: r.from, ready: r.ready ? r.from + r.ready : null, heartbeat: r.to ?? Date.now(), ended: r.to, state: r.state, end_reason: r.end_reason, exit_code: r.exit_code, smoke: r.ready ? "pass" : "", requests: r.ready ? 137 + i : 0, errors: r.ready ? 4 : 0 }));
let smokeUntil = 0;
const smoke = Array.from({ length: 4 }, (_, i) => ({
  id: 9 - i, run_id: 4 - i, trigger: i === 0 ? "dashboard" : "start", started: started - i * 9 * 3600e3, finished: started - i * 9 * 3600e3 + 3120, verdict: i === 2 ? "fail" : "pass", version: "0.1.0", model: "embedded:tiny",
  message: i === 2 ? "equals-plain failed for DDTREE: token 14 is 498 with speculation and 276 without" : "", tokens_per_second: 612 - i * 9, tokens_per_round: 6.31 - i * 0.1,
  checks: [
    { name: "feature-width", what: "the drafter's fc input is as wide as the target's captured features", mode: "", verdict: "pass", input_id: "", output: "", figure: 256, unit: "columns", ms: 0.01, message: "" },
    { name: "coherent", what: "greedy answers to known questions are sensible text", mode: "NONE", verdict: "pass", input_id: "gcd", output: "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a", figure: 118, unit: "tokens/s", ms: 412, message: "" },
    { name: "equals-plain", what: "speculation writes the same tokens as plain decoding", mode: "DDTREE", verdict: i === 2 ? "fail" : "pass", input_id: "gcd", output: "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a", figure: 7.12, unit: "tokens a round", ms: 88, message: i === 2 ? "token 14 is 498 with speculation and 276 without" : "" },
    { name: "equals-plain", what: "speculation writes the same tokens as plain decoding", mode: "NEXTN", verdict: "skip", input_id: "", output: "", figure: null, unit: "", ms: 0, message: "the model has no MTP head" },
  ],
}));

const empty = () => process.env.MOCK_EMPTY === "1";
function reply(path: string, query: URLSearchParams, method: string): unknown {
  const now = Date.now();
  const page = <T>(list: T[]) => {
    const limit = Number(query.get("limit") ?? 50);
    const offset = Number(query.get("offset") ?? 0);
    return { total: list.length, offset, limit, rows: list.slice(offset, offset + limit) };
  };
  if (path === "status") {
    const none = empty();
    return {
      now, version: "0.1.0", run_id: 4, started, ready: true, ready_since: started + 4100, smoke_skipped: false, phase: { word: "ready", sentence: "Ready.", since: started + 4100, progress: null },
      model: { name: "tiny", path: "embedded:tiny", architecture: "Qwen3_5ForConditionalGeneration", backend: "cpu", parameters: 1710000, layers: 8, hidden_size: 64, vocab_size: 4100, context_length: 2048, block_size: 16, has_drafter: true, has_mtp: true },
      engine: { mode: "DDTREE", budget: 0, shadow_linear: false, seed_chain: false, nextn_steps: 3, max_running: 8, max_queue: 256, running: none ? 0 : 3, waiting: none ? 0 : 1, pages_used: none ? 0 : 61, pages_total: 512, slots_used: none ? 0 : 3, slots_total: 8, finished: none ? 0 : 137, cancelled: 2, failed: 0, prompt_tokens: 91321, completion_tokens: 48211, rounds: none ? 0 : 1021, drafted: 31651, accepted: acceptedAt.reduce((a, b) => a + b), accepted_at: none ? [] : acceptedAt, fallbacks: 1, prefill_tps_1m: none ? 0 : 1893, decode_tps_1m: none ? 0 : 588 + Math.sin(now / 5000) * 30, tokens_per_round_1m: none ? 0 : 6.84 },
      live: none ? [] : [0, 1, 2, 3].map((i) => ({ id: `chatcmpl-51aa0${i}f2c9`, endpoint: "chat", client: "127.0.0.1", stream: true, started: now - 900 - i * 700, prompt_tokens: 211 + i * 57, completion_tokens: i === 3 ? 0 : 310 - i * 97, max_tokens: 1024, mode: i === 1 ? "NONE" : "DDTREE" })),
      smoke: none ? null : smoke[0], smoke_running: smokeUntil > now ? { started: smokeUntil - 5000 } : null, ladder: { step: "NONE", mode: "NONE", since_ms: now - 700e3, reason: "wrong-text: the tail of a stream is not the target's", steps: ["DDTREE", "reset", "DFLASH", "NONE", "degraded", "restart", "exit"] },
      store: { path: "/var/lib/ddtree/ddtree.db", open: true, writable: true, message: "", failing_since: null, queued_rows: 0, file_bytes: 4e6, dropped_rows: 0, dropped_trees: 0, store_text: false },
    };
  }
  if (path === "series") {
    const time = empty() ? [] : Array.from({ length: 720 }, (_, i) => now - 3600e3 + i * 5000);
    const busy = time.map((_, i) => (Math.sin(i / 60) > -0.4 ? 1 : 0));
    return { from: now - 3600e3, to: now, time, decode_tps: time.map((_, i) => busy[i]! * (430 + 150 * Math.sin(i / 23) + 40 * Math.sin(i * 1.7))), prefill_tps: time.map((_, i) => busy[i]! * Math.max(0, 300 * Math.sin(i / 3))), tokens_per_round: time.map((_, i) => (busy[i] ? 6 + Math.sin(i / 40) : null)), running: time.map((_, i) => busy[i]! * 3) };
  }
  if (path === "events")
    return { total: 3, events: empty() ? [] : [
      { id: 3, run_id: 4, time: now - 400e3, severity: "info", kind: "speculation.fallback", message: "chatcmpl-7d01 decodes plainly: its drafts gain 1.1 tokens a round, 1.6 would pay" },
      { id: 2, run_id: 4, time: now - 3000e3, severity: "warning", kind: "stream.repetition", message: "chatcmpl-88c2 repeats “ha ha”; the target agrees, it is the model's own text" },
      { id: 1, run_id: 4, time: started, severity: "error", kind: "run.crashed", message: "the run before ended without notice" },
    ] };
  if (path === "timeline") {
    const p = page(empty() ? [] : runs);
    const move = (id: number, at: number, from: string, to: string, direction: string) => ({ id, run_id: 4, time: at, severity: direction === "down" ? "warning" : "info", kind: "ladder", message: `${from} to ${to}`, detail: { from, to, direction, fault: null, reason: "" } });
    return { ...p, events_left_out: 0, runs: p.rows.map((r) => ({ ...r, phases: [{ phase: "starting", reason: "", at: r.started, lasted_ms: 4000 }, ...(r.ready ? [{ phase: "ready", reason: "", at: r.ready, lasted_ms: 1 }] : [])], events: r.id === 4 ? [move(9, now - 5000e3, "DDTREE", "reset", "down"), move(10, now - 4000e3, "reset", "DFLASH", "down"), move(11, now - 700e3, "DFLASH", "NONE", "down")] : [] })) };
  }
  if (path === "requests/summary") {
    const of = (n: number) => ({ count: 137, p50: n, p90: n * 2, p95: n * 2.4, p99: n * 3.1 });
    return { totals: { requests: empty() ? 0 : 137, errors: 9 }, ttft_ms: of(38), total_ms: of(900), tokens_per_second: of(410), tokens_per_round: of(3.1) };
  }
  if (path === "acceptance") {
    const group = (name: string, scale: number) => ({ name, requests: 40, errors: 0, prompt_tokens: 9000, completion_tokens: 8000, cached_tokens: 0, rounds: 1021, drafted: 31651, accepted: Math.round(scale * acceptedAt.reduce((a, b) => a + b)), tokens_per_round: 1 + (scale * acceptedAt.reduce((a, b) => a + b)) / 1021, tokens_per_second: 400 * scale, accepted_at: acceptedAt.map((n) => Math.round(n * scale)), histogram: [] });
    const none = { ...group("", 0), requests: 0, rounds: 0 };
    return empty() ? { speculative: none, by_mode: [], by_thinking: [], by_context: [] } : { speculative: group("", 1), by_mode: ["DDTREE", "DFLASH", "NEXTN"].map((n, i) => group(n, 1 - i * 0.2)), by_thinking: ["on", "off"].map((n, i) => group(n, 0.8 + i * 0.2)), by_context: ["256", "512", "1024", "4096", "16384"].map((n, i) => group(n, 1 - i * 0.08)) };
  }
  if (path === "runs/compare") {
    const two = (query.get("ids") ?? "").split(",").map((id) => runs.find((r) => r.id === Number(id)) ?? runs[0]!);
    return { runs: two, rows: [{ section: "flags", name: "--speculative-ddtree-budget", unit: "", values: ["32", "auto"], differs: true, measured: false }, { section: "requests", name: "tok/s, median", unit: "tok/s", values: [388.2, 431.9], differs: true, measured: true }, { section: "start", name: "model", unit: "", values: ["tiny", "tiny"], differs: false, measured: false }] };
  }
  if (path === "smoke/compare") {
    const two = (query.get("ids") ?? "").split(",").map((id) => smoke.find((r) => r.id === Number(id)) ?? smoke[0]!);
    return { runs: two, rows: smoke[0]!.checks.map((c, i) => ({ name: c.name, mode: c.mode, input_id: c.input_id, what: c.what, cells: two.map((r) => r.checks[i]!), differs: new Set(two.map((r) => r.checks[i]!.verdict)).size > 1 })) };
  }
  if (path === "runs") { const p = page(empty() ? [] : runs); return { ...p, runs: p.rows }; }
  if (path.startsWith("runs/")) {
    const run = runs.find((r) => r.id === Number(path.slice(5)))!;
    return { ...run, phases: [["starting", 40], ["devices", 12], ["weights", 1430], ["graphs", 820], ["smoke", 1790], ["ready", 3 * 3600e3]].map(([phase, ms], i) => ({ phase, reason: i === 5 ? "" : "", at: run.started, lasted_ms: ms })), devices: { cpu: "16 threads, AVX-512" }, flags: [["--host", "0.0.0.0"], ["--speculative-algorithm", "DDTREE"], ["--speculative-ddtree-budget", "auto"]], plan: { fits: true, device: "this machine", memory_mib: 64000, mem_fraction: 0.95, limit_mib: 60800, need_mib: 786.1, left_mib: 63213.9, pinned_host_mib: 0, context_length: 4096, max_running: 8, kv_pages: 1032, page_size: 32, kv_tokens: 33024, state_slots: 9, pass_rows: 512, rows: [{ name: "target_kv", label: "KV pages, target", mib: 516, detail: "33,024 tokens × 16.0 KiB" }, { name: "states", label: "recurrent states", mib: 14.1, detail: "9 slots × 1608.0 KiB" }, { name: "runtime", label: "the process itself", mib: 256, detail: "tokenizer, connections, history" }] } };
  }
  if (path === "requests") {
    const list = requests.filter((r) => (!query.get("finish") || r.finish === query.get("finish")) && (!query.get("mode") || r.mode === query.get("mode")) && (!query.get("error") || (r.error !== "") === (query.get("error") === "1")));
    const p = page(empty() ? [] : list);
    return { ...p, requests: p.rows };
  }
  const one = /^requests\/([^/]+)(\/rounds)?$/.exec(path);
  if (one) {
    const found = requests.find((r) => r.id === one[1]);
    if (!found) return null;
    if (!one[2]) return { ...found, accepted_at: [...acceptedAt.map((n) => Math.round((n / 1021) * found.rounds))], histogram: [], tree_gain: 0, shadow_disagreements: 0, near_ties: 0, smallest_gap: 0.31, prompt_text: null, answer_text: null };
    const p = page(rounds);
    return { total: p.total, offset: p.offset, rounds: p.rows, texts };
  }
  if (path === "smoke/run" && method === "POST") {
    smokeUntil = now + 5000;
    return { started: now };
  }
  if (path === "smoke") { const p = page(empty() ? [] : smoke); return { ...p, runs: p.rows, running: smokeUntil > now ? { started: smokeUntil - 5000 } : null }; }
  return null;
}

export function mockApi(): Plugin {
  return {
    name: "mock-admin-api",
    configureServer(server) {
      server.middlewares.use("/admin/api/", (request: IncomingMessage, response: ServerResponse) => {
        const url = new URL(request.url ?? "/", "http://localhost");
        const body = reply(url.pathname.slice(1), url.searchParams, request.method ?? "GET");
        response.statusCode = body === null ? 404 : 200;
        response.setHeader("Content-Type", "application/json");
        response.end(JSON.stringify(body ?? { error: { message: "There is no such thing.", type: "invalid_request_error", code: "not_found" } }));
      });
    },
  };
}
