// The reads behind Store, each on one read-only connection.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "store/database.h"
#include "store/store.h"

namespace ddtree::store {

Result<Page<ServiceRun>> read_runs(Database& database, int64_t run_id, Paging paging);  // run_id 0: all
Result<std::vector<ServicePhase>> read_phases(Database& database, int64_t run_id);
Result<Page<RequestRecord>> read_requests(Database& database, const RequestFilter& filter, Paging paging);
Result<std::optional<RequestRecord>> read_request(Database& database, int64_t id);
Result<std::vector<int64_t>> read_request_ids(Database& database, const RequestFilter& filter);
Result<std::vector<RequestRecord>> read_requests_of(Database& database, const std::vector<int64_t>& ids);
Result<RequestTotals> read_totals(Database& database, const RequestFilter& filter);
Result<RequestSummary> read_summary(Database& database, const RequestFilter& filter);
Result<AcceptanceBreakdown> read_acceptance(Database& database, const RequestFilter& filter);
Result<Page<RoundTree>> read_trees(Database& database, int64_t request, Paging paging);
// 0: any
Result<Page<SmokeRun>> read_smoke_runs(Database& database, int64_t id, int64_t run_id, Paging paging);
Result<Page<Event>> read_events(Database& database, const EventFilter& filter, Paging paging);
Result<std::optional<Calibration>> read_calibration(Database& database, const std::string& machine, const std::string& name);
Result<std::vector<MetricMinute>> read_minutes(Database& database, int64_t from_ms, int64_t to_ms);

// How a tree's arrays lie in blobs: little-endian, whatever the machine.
std::string pack(const std::vector<int32_t>& values);
std::string pack(const std::vector<float>& values);
std::vector<int32_t> unpack_ints(std::string_view bytes);
std::vector<float> unpack_floats(std::string_view bytes);

}  // namespace ddtree::store
