-- The history. Times are milliseconds since 1970 UTC, 0 where not known; lists are JSON arrays.

CREATE TABLE service_run (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  version TEXT NOT NULL, host TEXT NOT NULL, model TEXT NOT NULL, drafter TEXT NOT NULL, mode TEXT NOT NULL,
  devices TEXT NOT NULL, flags TEXT NOT NULL, plan TEXT NOT NULL, pid INTEGER NOT NULL,
  started_ms INTEGER NOT NULL, ready_ms INTEGER NOT NULL, heartbeat_ms INTEGER NOT NULL, ended_ms INTEGER NOT NULL,
  end_reason TEXT NOT NULL, exit_code INTEGER NOT NULL, smoke TEXT NOT NULL
) STRICT;

CREATE TABLE service_phase (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  run_id INTEGER NOT NULL REFERENCES service_run(id) ON DELETE CASCADE,
  at_ms INTEGER NOT NULL, phase TEXT NOT NULL, reason TEXT NOT NULL
) STRICT;
CREATE INDEX service_phase_run ON service_phase(run_id, id);

CREATE TABLE request (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  run_id INTEGER NOT NULL, request_id TEXT NOT NULL, endpoint TEXT NOT NULL, client TEXT NOT NULL, model TEXT NOT NULL,
  received_ms INTEGER NOT NULL, finished_ms INTEGER NOT NULL, stream INTEGER NOT NULL, thinking INTEGER NOT NULL,
  http_status INTEGER NOT NULL, finish TEXT NOT NULL, error TEXT NOT NULL, mode TEXT NOT NULL, budget INTEGER NOT NULL,
  temperature REAL NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
  reasoning_tokens INTEGER NOT NULL, rounds INTEGER NOT NULL, drafted INTEGER NOT NULL, accepted INTEGER NOT NULL,
  nodes_verified INTEGER NOT NULL, accepted_at TEXT NOT NULL, histogram TEXT NOT NULL, tree_gain INTEGER NOT NULL,
  shadow_disagreements INTEGER NOT NULL, near_ties INTEGER NOT NULL, smallest_gap REAL NOT NULL,
  queue_ms REAL NOT NULL, prefill_ms REAL NOT NULL, decode_ms REAL NOT NULL, first_token_ms REAL NOT NULL, total_ms REAL NOT NULL,
  tokens_per_second REAL NOT NULL, prompt_text TEXT NOT NULL, answer_text TEXT NOT NULL,
  trees INTEGER NOT NULL DEFAULT 0 -- rounds kept in request_tree
) STRICT;
CREATE INDEX request_received ON request(received_ms);
CREATE INDEX request_run ON request(run_id, received_ms);
CREATE INDEX request_name ON request(request_id);
CREATE INDEX request_error ON request(received_ms) WHERE error <> '';
CREATE INDEX request_with_trees ON request(id) WHERE trees > 0;

-- One round of a request. The arrays are little-endian: int32 token, int32 parent, float32 log_prob, one byte accepted; token may be empty.
CREATE TABLE request_tree (
  request INTEGER NOT NULL REFERENCES request(id) ON DELETE CASCADE,
  round INTEGER NOT NULL, start INTEGER NOT NULL, next INTEGER NOT NULL,
  token BLOB NOT NULL, parent BLOB NOT NULL, log_prob BLOB NOT NULL, accepted BLOB NOT NULL,
  draft_ms REAL NOT NULL, verify_ms REAL NOT NULL, total_ms REAL NOT NULL
) STRICT;
CREATE UNIQUE INDEX request_tree_round ON request_tree(request, round);

CREATE TABLE smoke_run (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  run_id INTEGER NOT NULL, started_ms INTEGER NOT NULL, finished_ms INTEGER NOT NULL, started_by TEXT NOT NULL, verdict TEXT NOT NULL,
  version TEXT NOT NULL, model TEXT NOT NULL, drafter TEXT NOT NULL, message TEXT NOT NULL,
  tokens_per_second REAL NOT NULL, acceptance REAL NOT NULL
) STRICT;

CREATE TABLE smoke_check (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  smoke_id INTEGER NOT NULL REFERENCES smoke_run(id) ON DELETE CASCADE,
  position INTEGER NOT NULL, name TEXT NOT NULL, mode TEXT NOT NULL, verdict TEXT NOT NULL, input_id TEXT NOT NULL, output TEXT NOT NULL,
  figure REAL NOT NULL, unit TEXT NOT NULL, ms REAL NOT NULL, message TEXT NOT NULL
) STRICT;
CREATE INDEX smoke_check_run ON smoke_check(smoke_id, position);

CREATE TABLE event (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  run_id INTEGER NOT NULL, at_ms INTEGER NOT NULL, severity INTEGER NOT NULL, kind TEXT NOT NULL, message TEXT NOT NULL,
  request INTEGER NOT NULL, detail TEXT NOT NULL
) STRICT;
CREATE INDEX event_at ON event(at_ms);
CREATE INDEX event_request ON event(request) WHERE request <> 0;

CREATE TABLE calibration (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  run_id INTEGER NOT NULL, at_ms INTEGER NOT NULL, machine TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL
) STRICT;
CREATE INDEX calibration_key ON calibration(machine, name, id);

CREATE TABLE metric_minute (
  minute_ms INTEGER NOT NULL, run_id INTEGER NOT NULL, requests INTEGER NOT NULL, errors INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
  rounds INTEGER NOT NULL, drafted INTEGER NOT NULL, accepted INTEGER NOT NULL, prefill_tps REAL NOT NULL, decode_tps REAL NOT NULL,
  first_token_ms_p50 REAL NOT NULL, first_token_ms_p95 REAL NOT NULL, running_max INTEGER NOT NULL, waiting_max INTEGER NOT NULL,
  pages_used_max INTEGER NOT NULL, pages_total INTEGER NOT NULL, slots_used_max INTEGER NOT NULL, slots_total INTEGER NOT NULL,
  rss_mib REAL NOT NULL,
  PRIMARY KEY (minute_ms, run_id)
) STRICT, WITHOUT ROWID;
