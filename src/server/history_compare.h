// Starts and smoke runs side by side, and figures over requests, as JSON: one text for the dashboard's API and for `ddtree history`.
// .cpp files only (json). The shapes are in docs/admin-api.md.
#pragma once

#include <vector>

#include "server/json.h"
#include "store/store.h"

namespace ddtree::admin {

// A start with what a comparison needs of it.
struct RunFigures {
  ServiceRun run;
  std::vector<ServicePhase> phases;
  RequestSummary summary;          // of its requests
  AcceptanceBreakdown acceptance;  // of its requests
  std::vector<SmokeRun> smoke;     // newest first, those without checks last
};
Result<std::optional<RunFigures>> read_run_figures(Store& store, int64_t run_id);  // empty: no such start

// {"runs": […], "rows": [{section, name, unit, values, differs, measured}]}: rows that differ first, in the order of sections. Words and
// settings differ when they are not equal; measured figures when they are more than 5 % apart.
Json compare_runs_json(const std::vector<RunFigures>& runs, int64_t current_run);

// {"runs": […], "rows": [{name, mode, input_id, what, cells, differs}]}: one row a check, one cell a run (null where it did not run it).
Json compare_smoke_json(const std::vector<SmokeRun>& runs);

// {"count", "p50", "p90", "p95", "p99"}; the percentiles are null where count is 0.
Json percentiles_json(const Percentiles& p);
Json summary_json(const RequestSummary& summary);
// One group: sums, and tokens_per_round, tokens_per_second and accepted_at of them.
Json totals_json(const RequestTotals& totals);
Json acceptance_json(const AcceptanceBreakdown& breakdown);

// The starts with their phases and the events worth a mark (warnings and worse, the ladder, the store), newest start first.
Result<Json> timeline_json(Store& store, Paging paging, int64_t current_run);

}  // namespace ddtree::admin
