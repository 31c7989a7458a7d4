// What the files of the dashboard's API share. .cpp files only (json).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "server/errors.h"
#include "server/http_server.h"
#include "server/json.h"
#include "server/service.h"
#include "store/records.h"
#include "store/store.h"

namespace ddtree::admin {

inline int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// --- replies -----------------------------------------------------------------------------------------------------------------------
// Headers that every reply of the dashboard carries: nothing from elsewhere may run in the page, and nobody may frame or sniff it.
void secure(HttpResponse& response);
void send_json(HttpResponse& response, const Json& body);
void send_not_found(HttpResponse& response, const std::string& what);
ApiError no_store(Service& service);  // 503: there is no history to read, and why

// --- query parameters: a wrong one is a 400 that names it -------------------------------------------------------------------------
// The parameters that a route takes. A name that no list has would be ignored, and the reply pass for what was asked for.
using Parameters = std::vector<const char*>;
extern const Parameters kPaging, kFilter;  // limit, offset; what read_filter() reads
Parameters operator+(Parameters a, const Parameters& b);
// A route of the dashboard's API: 400 for parameters that it does not take, or that are given twice and are no list.
void route(HttpServer& server, const char* method, const std::string& pattern, Parameters takes, HttpServer::Handler handler);
// Reads limit (1 … most) and offset.
bool read_paging(const HttpRequest& request, int32_t otherwise, Paging* paging, ApiError* error, int32_t most = 1000);
bool read_int(const HttpRequest& request, const char* name, int64_t low, int64_t high, int64_t otherwise, int64_t* value, ApiError* error);
// A list of least … most different ids of rows, as in ids=4,3.
bool read_ids(const HttpRequest& request, const char* name, size_t least, size_t most, std::vector<int64_t>* ids, ApiError* error);
// All values of a parameter that may be given more than once or as a list with commas; empty ones between commas too.
std::vector<std::string> read_list(const HttpRequest& request, const std::string& name);
bool read_filter(const HttpRequest& request, RequestFilter* filter, ApiError* error);

// --- records as JSON (docs/admin-api.md) ------------------------------------------------------------------------------------------
Json run_json(const ServiceRun& run, int64_t current_run);
Json phases_json(const std::vector<ServicePhase>& phases);
Json run_detail_json(const ServiceRun& run, const std::vector<ServicePhase>& phases, int64_t current_run);
Json request_json(const RequestRecord& record, int32_t trees);
Json request_detail_json(const RequestRecord& record, int32_t trees);
Json round_json(const RoundTree& tree, bool ids_kept);
Json smoke_json(const SmokeRun& run);
Json event_json(const Event& event);
// The newest events that match: those of the store, and before them what this process has not been able to write yet.
Result<Page<Event>> read_events(Service& service, const EventFilter& filter, Paging paging);
// Columns of the CSV export and one record's row, in the same order. Both end with CR LF.
std::string csv_head();
std::string csv_row(const RequestRecord& record);

// --- state of the dashboard ---------------------------------------------------------------------------------------------------------
// The engine's speed every five seconds, for the last hour: minutes alone would leave the chart empty after a start.
class Sampler {
 public:
  struct Sample {
    int64_t at_ms = 0;
    double decode_tps = 0, prefill_tps = 0;  // since the sample before
    int64_t rounds = 0, accepted = 0;        // since the sample before
    int32_t running = 0;
  };

  explicit Sampler(Service& service);
  ~Sampler();
  std::vector<Sample> samples() const;  // by time

 private:
  void run();

  Service& service_;
  mutable std::mutex mutex_;
  std::condition_variable stop_signal_;
  bool stop_ = false;
  std::deque<Sample> samples_;
  std::thread thread_;
};

// A smoke run that was asked for from the dashboard: one at a time, on a thread of its own, since it takes seconds to minutes.
class SmokeJob {
 public:
  explicit SmokeJob(Service& service) : service_(service) {}
  ~SmokeJob();
  // False: one is running already.
  bool start();
  int64_t running_since() const;   // Unix milliseconds; 0: none
  std::string last_error() const;  // why the last one asked for could not run; empty: it ran

 private:
  Service& service_;
  mutable std::mutex mutex_;
  int64_t started_ms_ = 0;
  std::string last_error_;
  std::thread thread_;
};

struct Admin {
  explicit Admin(Service& s) : service(s), sampler(s), smoke(s) {}

  Service& service;
  Sampler sampler;
  SmokeJob smoke;
};

// {"started": ms} of the smoke run in progress (asked for here, or the start's), or null.
Json smoke_running_json(Admin& admin);

void register_assets(HttpServer& server);                                                   // admin_assets.cpp
void register_live_routes(HttpServer& server, const std::shared_ptr<Admin>& admin);         // admin_live.cpp: status, series, events
void register_history_routes(HttpServer& server, const std::shared_ptr<Admin>& admin);      // admin_history.cpp: runs, requests
void register_figure_routes(HttpServer& server, const std::shared_ptr<Admin>& admin);       // admin_figures.cpp: comparisons, sums
void register_smoke_admin_routes(HttpServer& server, const std::shared_ptr<Admin>& admin);  // admin_smoke.cpp

}  // namespace ddtree::admin
