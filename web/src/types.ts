// The JSON of /admin/api/*, as docs/admin-api.md describes it. Times are Unix milliseconds, durations milliseconds.

export interface Phase {
  word: string; // starting, devices, weights, collectives, graphs, smoke, ready, degraded, draining, stopped, failed
  sentence: string; // in words, for people
  since: number | null;
  progress: number | null; // 0 … 1 where the phase measures it
}

export interface ModelInfo {
  name: string;
  path: string;
  architecture: string;
  backend: string;
  parameters: number;
  layers: number;
  hidden_size: number;
  vocab_size: number;
  context_length: number;
  block_size: number;
  has_drafter: boolean;
  has_mtp: boolean;
}

export interface EngineNow {
  mode: string;
  budget: number; // 0: auto
  shadow_linear: boolean;
  seed_chain: boolean;
  nextn_steps: number;
  max_running: number;
  max_queue: number;
  running: number;
  waiting: number;
  pages_used: number;
  pages_total: number;
  slots_used: number;
  slots_total: number;
  finished: number;
  cancelled: number;
  failed: number;
  prompt_tokens: number;
  completion_tokens: number;
  rounds: number;
  drafted: number;
  accepted: number;
  accepted_at: number[];
  fallbacks: number;
  prefill_tps_1m: number;
  decode_tps_1m: number;
  tokens_per_round_1m: number;
}

export interface LiveRequest {
  id: string;
  endpoint: string;
  client: string;
  stream: boolean;
  started: number;
  prompt_tokens: number;
  completion_tokens: number;
  max_tokens: number;
  mode: string;
}

export interface ServiceEvent {
  id: number;
  run_id: number;
  time: number;
  severity: "info" | "warning" | "error";
  kind: string;
  message: string;
  detail?: unknown; // of kind "ladder": {from, to, direction, fault, reason}
}

// Where the fault ladder stands: steps are all of this service's, top to bottom; empty before the engine is there.
export interface LadderNow {
  step: string;
  mode: string;
  since_ms: number | null;
  reason: string;
  steps: string[];
}

export interface EventPage {
  total: number;
  events: ServiceEvent[];
}

export interface SmokeCheck {
  name: string;
  what: string; // one line: what the check is for
  mode: string;
  verdict: "pass" | "fail" | "skip" | "warn";
  input_id: string;
  output: string;
  figure: number | null;
  unit: string;
  ms: number;
  message: string;
}

export interface SmokeRun {
  id: number;
  run_id: number;
  trigger: string;
  started: number;
  finished: number | null;
  verdict: "pass" | "fail" | "skipped";
  version: string;
  model: string;
  drafter: string;
  subject: string; // "": this program's own engine; else the URL of the server that was asked
  mode: string; // configured speculation; "" where not known
  previous_version: string | null; // trigger "upgrade": the version that ran before
  message: string;
  warning: string; // passed all the same, but slower than before or without something that worked before
  tokens_per_second: number | null;
  tokens_per_round: number | null;
  before: { runs: number; tokens_per_second: number | null; tokens_per_round: number | null } | null; // medians of the earlier runs compared with
  checks: SmokeCheck[];
}

export interface SmokeRunning {
  started: number;
}

export interface SmokePage {
  total: number;
  offset: number;
  limit: number;
  running: SmokeRunning | null;
  runs: SmokeRun[];
}

export interface StoreState {
  path: string;
  open: boolean; // false: it could not even be opened
  writable: boolean; // false: the disk refuses rows, they wait
  message: string;
  failing_since: number | null;
  queued_rows: number;
  file_bytes: number;
  dropped_rows: number;
  dropped_trees: number;
  store_text: boolean;
}

export interface Status {
  now: number;
  version: string;
  run_id: number;
  started: number;
  ready: boolean;
  ready_since: number | null;
  smoke_skipped: boolean;
  phase: Phase;
  model: ModelInfo | null;
  engine: EngineNow;
  ladder: LadderNow;
  live: LiveRequest[];
  smoke: SmokeRun | null;
  smoke_running: SmokeRunning | null;
  store: StoreState | null;
}

// Points are not equally far apart: five seconds within this run, a minute before it.
export interface Series {
  from: number;
  to: number;
  time: number[];
  decode_tps: number[];
  prefill_tps: number[];
  tokens_per_round: (number | null)[];
  running: number[];
}

export interface RunPhase {
  phase: string;
  reason: string;
  at: number;
  lasted_ms: number;
}

export interface ServiceRun {
  id: number;
  version: string;
  host: string;
  pid: number;
  model: string;
  drafter: string;
  mode: string;
  started: number;
  ready: number | null;
  heartbeat: number | null;
  ended: number | null;
  state: "running" | "stopped" | "failed" | "crashed";
  end_reason: string;
  exit_code: number | null;
  smoke: string;
  requests: number;
  errors: number;
}

export interface MemoryPlan {
  device: string;
  memory_mib: number;
  mem_fraction: number;
  limit_mib: number;
  need_mib: number;
  left_mib: number;
  pinned_host_mib: number;
  context_length: number;
  max_running: number;
  kv_pages: number;
  page_size: number;
  kv_tokens: number;
  state_slots: number;
  pass_rows: number;
  rows: { name: string; label: string; mib: number; detail: string }[];
}

export interface RunDetail extends ServiceRun {
  phases: RunPhase[];
  devices: unknown; // as recorded
  flags: unknown;
  plan: unknown; // a MemoryPlan; older versions recorded other members
}

export interface RunPage {
  total: number;
  offset: number;
  limit: number;
  runs: ServiceRun[];
}

export interface TimelineRun extends ServiceRun {
  phases: RunPhase[];
  events: ServiceEvent[]; // warnings, errors, the ladder's, the store's
}

export interface Timeline {
  total: number;
  offset: number;
  limit: number;
  runs: TimelineRun[]; // newest first
  events_left_out: number;
}

export interface RunComparison {
  runs: ServiceRun[];
  rows: { section: string; name: string; unit: string; values: unknown[]; differs: boolean; measured: boolean }[]; // what differs first
}

export interface SmokeCell {
  verdict: SmokeCheck["verdict"];
  figure: number | null;
  unit: string;
  ms: number;
  message: string;
  output: string;
}

export interface SmokeComparison {
  runs: Omit<SmokeRun, "checks">[];
  rows: { name: string; mode: string; input_id: string; what: string; cells: (SmokeCell | null)[]; differs: boolean }[];
}

export interface Percentiles {
  count: number;
  p50: number | null;
  p90: number | null;
  p95: number | null;
  p99: number | null;
}

// Sums over requests.
export interface Totals {
  requests: number;
  errors: number;
  prompt_tokens: number;
  completion_tokens: number;
  cached_tokens: number;
  rounds: number;
  drafted: number;
  accepted: number;
  tokens_per_round: number | null;
  tokens_per_second: number | null;
  accepted_at: number[];
  histogram: number[];
}

export interface Summary {
  totals: Totals;
  ttft_ms: Percentiles;
  total_ms: Percentiles;
  tokens_per_second: Percentiles;
  tokens_per_round: Percentiles;
}

export type AcceptanceGroup = Totals & { name: string };

export interface Acceptance {
  speculative: Totals; // mode NONE left out, as in the two below
  by_mode: AcceptanceGroup[];
  by_thinking: AcceptanceGroup[];
  by_context: AcceptanceGroup[];
}

export interface RequestRow {
  id: string;
  run_id: number;
  received: number;
  finished: number;
  endpoint: string;
  client: string;
  model: string;
  stream: boolean;
  thinking: boolean | null;
  http_status: number;
  finish: string;
  error: string;
  mode: string;
  budget: number; // DDTREE: nodes, 0 = auto
  temperature: number;
  prompt_tokens: number;
  completion_tokens: number;
  cached_tokens: number;
  reasoning_tokens: number;
  rounds: number;
  drafted: number;
  accepted: number;
  tokens_per_round: number | null; // 1 + accepted / rounds
  queue_ms: number;
  prefill_ms: number;
  decode_ms: number;
  ttft_ms: number;
  total_ms: number;
  tokens_per_second: number;
  trees: number; // rounds whose tree can be shown
}

export interface RequestPage {
  total: number;
  offset: number;
  limit: number;
  requests: RequestRow[];
}

export interface RequestDetail extends RequestRow {
  accepted_at: number[];
  histogram: number[];
  tree_gain: number;
  shadow_disagreements: number;
  near_ties: number;
  smallest_gap: number | null;
  prompt_text: string | null;
  answer_text: string | null;
}

// One round's tree. Arrays have one entry a row, the root first, parents before children.
export interface Round {
  round: number; // from 0
  start: number; // absolute position of the root
  token: number[] | null; // null: ids were not kept
  parent: number[]; // -1 for the root
  log_prob: number[]; // path log-prob by the drafter
  accepted: number[]; // 0 or 1
  next: number | null; // the target's own token after the accepted path; -1: the request ended within the path; null: not kept
  draft_ms: number;
  verify_ms: number;
  total_ms: number;
}

export interface RoundPage {
  total: number;
  offset: number;
  rounds: Round[];
  texts: Record<string, string>; // token id -> text
}
