#include "server/history_compare.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "server/admin_parts.h"

namespace ddtree::admin {

namespace {

constexpr double kMeasuredAlike = 0.05;
constexpr int32_t kPositionsCompared = 8;

Json mean_tokens(const RequestTotals& t) {
  return t.rounds > 0 ? Json(1.0 + static_cast<double>(t.accepted) / static_cast<double>(t.rounds)) : Json();
}
Json decode_speed(const RequestTotals& t) {
  return t.decode_ms > 0 ? Json(static_cast<double>(t.decoded_tokens) * 1000 / t.decode_ms) : Json();
}

bool alike(const Json& a, const Json& b, bool measured) {
  if (!measured || !a.is_number() || !b.is_number()) return a == b;
  const double x = a.get<double>(), y = b.get<double>();
  return std::abs(x - y) <= kMeasuredAlike * std::max(std::abs(x), std::abs(y));
}

class Rows {
 public:
  explicit Rows(size_t runs) : runs_(runs) {}
  void add(const char* section, const std::string& name, std::vector<Json> values, const char* unit = "", bool measured = false) {
    if (std::all_of(values.begin(), values.end(), [](const Json& v) { return v.is_null(); })) return;
    const bool differs = std::any_of(values.begin(), values.end(), [&](const Json& v) { return !alike(values.front(), v, measured); });
    (differs ? differing_ : same_)
        .push_back(
            Json{{"section", section}, {"name", name}, {"unit", unit}, {"values", values}, {"differs", differs}, {"measured", measured}});
  }
  // The union of the members of recorded JSON: objects by their names, lists of records by the text that names them.
  void add_recorded(const char* section, const std::vector<std::string>& texts) {
    std::vector<std::string> order;
    std::map<std::string, std::vector<Json>> values;
    for (size_t i = 0; i < texts.size(); ++i) {
      const Json value = Json::parse(texts[i], nullptr, false);
      if (!value.is_discarded())
        flatten(value, "", [&](const std::string& name, const Json& leaf) {
          auto [it, fresh] = values.try_emplace(name, std::vector<Json>(runs_));
          if (fresh) order.push_back(name);
          it->second[i] = leaf;
        });
    }
    for (const std::string& name : order) add(section, name, values[name]);
  }
  Json json() && {
    Json all = Json::array();
    for (auto* list : {&differing_, &same_})
      for (Json& row : *list) all.push_back(std::move(row));
    return all;
  }

 private:
  template <class F>
  static void flatten(const Json& value, const std::string& path, const F& each) {
    if (value.is_object()) {
      for (const auto& [name, member] : value.items()) flatten(member, path.empty() ? name : path + "." + name, each);
    } else if (value.is_array() && !value.empty() && value.front().is_object()) {
      for (size_t i = 0; i < value.size(); ++i) {
        std::string name = std::to_string(i + 1);
        for (const auto& [key, member] : value[i].items())
          if (member.is_string()) {
            name = member.template get<std::string>();
            break;
          }
        flatten(value[i], path.empty() ? name : path + "." + name, each);
      }
    } else if (!path.empty()) {
      each(path, value);
    }
  }

  const size_t runs_;
  std::vector<Json> differing_, same_;
};

std::string check_key(const SmokeCheck& c) { return c.name + "\n" + c.mode + "\n" + c.input_id; }
std::string check_label(const SmokeCheck& c) {
  std::string label = c.name;
  for (const std::string& part : {c.mode, c.input_id})
    if (!part.empty()) label += ", " + part;
  return label;
}

}  // namespace

Result<std::optional<RunFigures>> read_run_figures(Store& store, int64_t run_id) {
  auto run = store.run(run_id);
  if (!run) return run.status();
  if (!run->has_value()) return std::optional<RunFigures>();
  RunFigures figures;
  figures.run = **run;
  auto phases = store.phases(run_id);
  if (!phases) return phases.status();
  figures.phases = std::move(*phases);
  RequestFilter filter;
  filter.run_id = run_id;
  auto summary = store.request_summary(filter);
  if (!summary) return summary.status();
  figures.summary = std::move(*summary);
  auto acceptance = store.acceptance(filter);
  if (!acceptance) return acceptance.status();
  figures.acceptance = std::move(*acceptance);
  auto smoke = store.smoke_runs({20, 0}, run_id);
  if (!smoke) return smoke.status();
  figures.smoke = std::move(smoke->rows);
  // One that was skipped has nothing to compare.
  std::stable_partition(figures.smoke.begin(), figures.smoke.end(), [](const SmokeRun& s) { return !s.checks.empty(); });
  return std::optional<RunFigures>(std::move(figures));
}

Json compare_runs_json(const std::vector<RunFigures>& runs, int64_t current_run) {
  Rows rows(runs.size());
  Json heads = Json::array();
  for (const RunFigures& r : runs) heads.push_back(run_json(r.run, current_run));
  const auto each = [&](auto value) {
    std::vector<Json> values;
    for (const RunFigures& r : runs) values.push_back(Json(value(r)));
    return values;
  };
  const auto texts = [&](std::string ServiceRun::*member) {
    std::vector<std::string> values;
    for (const RunFigures& r : runs) values.push_back(r.run.*member);
    return values;
  };
  const auto head = [&](const char* name) { return each([&](const RunFigures& r) { return run_json(r.run, current_run)[name]; }); };
  for (const char* name : {"version", "host", "model", "drafter", "mode"}) rows.add("start", name, head(name));
  rows.add("start", "end", each([&](const RunFigures& r) {
             const Json j = run_json(r.run, current_run);
             const std::string reason = r.run.end_reason.empty() ? j["state"].get<std::string>() : r.run.end_reason;
             return r.run.exit_code > 0 ? fmt::format("{} (exit {})", reason, r.run.exit_code) : reason;
           }));
  rows.add_recorded("flags", texts(&ServiceRun::flags));
  rows.add_recorded("plan", texts(&ServiceRun::plan));
  rows.add_recorded("devices", texts(&ServiceRun::devices));

  rows.add("phases", "ready after", each([](const RunFigures& r) {
             return r.run.ready_ms > 0 ? Json((static_cast<double>(r.run.ready_ms - r.run.started_ms)) / 1000) : Json();
           }),
           "s", true);
  for (const char* phase : {"starting", "devices", "weights", "collectives", "graphs", "smoke"}) {
    rows.add("phases", phase, each([&](const RunFigures& r) {
               double seconds = 0;
               bool seen = false;
               for (const ServicePhase& p : r.phases)
                 if (p.phase == phase) seconds += static_cast<double>(p.lasted_ms) / 1000, seen = true;
               return seen ? Json(seconds) : Json();
             }),
             "s", true);
  }

  const auto smoke = [&](auto value) {
    return each([&](const RunFigures& r) { return r.smoke.empty() ? Json() : Json(value(r.smoke.front())); });
  };
  rows.add("smoke", "verdict", smoke([](const SmokeRun& s) { return s.verdict; }));
  rows.add("smoke", "speed", smoke([](const SmokeRun& s) { return s.tokens_per_second > 0 ? Json(s.tokens_per_second) : Json(); }), "tok/s",
           true);
  rows.add("smoke", "tokens a round", smoke([](const SmokeRun& s) { return s.acceptance > 0 ? Json(s.acceptance) : Json(); }), "", true);
  std::vector<std::string> order;
  std::map<std::string, std::vector<Json>> verdicts;
  std::map<std::string, std::string> labels;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].smoke.empty()) continue;
    for (const SmokeCheck& c : runs[i].smoke.front().checks) {
      auto [it, fresh] = verdicts.try_emplace(check_key(c), std::vector<Json>(runs.size()));
      if (fresh) order.push_back(check_key(c)), labels[check_key(c)] = check_label(c);
      it->second[i] = c.verdict;
    }
  }
  for (const std::string& key : order) rows.add("smoke", labels[key], verdicts[key]);

  const auto figure = [&](Percentiles RequestSummary::*member, double Percentiles::*percentile) {
    return each([&](const RunFigures& r) { return (r.summary.*member).count > 0 ? Json(r.summary.*member.*percentile) : Json(); });
  };
  rows.add("requests", "requests", each([](const RunFigures& r) { return r.summary.totals.requests; }), "", true);
  rows.add("requests", "errors", each([](const RunFigures& r) { return r.summary.totals.errors; }), "", true);
  rows.add("requests", "tok/s, median", figure(&RequestSummary::tokens_per_second, &Percentiles::p50), "tok/s", true);
  rows.add("requests", "first token, median", figure(&RequestSummary::first_token_ms, &Percentiles::p50), "ms", true);
  rows.add("requests", "first token, p95", figure(&RequestSummary::first_token_ms, &Percentiles::p95), "ms", true);
  rows.add("requests", "total, median", figure(&RequestSummary::total_ms, &Percentiles::p50), "ms", true);
  rows.add("requests", "total, p95", figure(&RequestSummary::total_ms, &Percentiles::p95), "ms", true);

  rows.add("acceptance", "tokens a round", each([](const RunFigures& r) { return mean_tokens(r.acceptance.speculative); }), "", true);
  for (int32_t i = 0; i < kPositionsCompared; ++i) {
    rows.add("acceptance", fmt::format("at position {}", i + 1), each([&](const RunFigures& r) {
               const RequestTotals& t = r.acceptance.speculative;
               return t.rounds > 0 && static_cast<size_t>(i) < t.accepted_at.size()
                          ? Json(100.0 * static_cast<double>(t.accepted_at[static_cast<size_t>(i)]) / static_cast<double>(t.rounds))
                          : Json();
             }),
             "%", true);
  }
  return Json{{"runs", std::move(heads)}, {"rows", std::move(rows).json()}};
}

Json compare_smoke_json(const std::vector<SmokeRun>& runs) {
  Json heads = Json::array();
  std::vector<std::string> order;
  std::map<std::string, Json> rows;
  for (size_t i = 0; i < runs.size(); ++i) {
    Json head = smoke_json(runs[i]);
    const Json checks = std::move(head["checks"]);
    head.erase("checks");
    heads.push_back(std::move(head));
    // A check that ran twice for the same mode and input (it may be repeated) keeps its place by counting.
    std::map<std::string, int> seen;
    for (size_t c = 0; c < runs[i].checks.size(); ++c) {
      const SmokeCheck& check = runs[i].checks[c];
      const std::string key = fmt::format("{}\n{}", check_key(check), seen[check_key(check)]++);
      auto [it, fresh] = rows.try_emplace(key);
      if (fresh) {
        order.push_back(key);
        it->second = Json{{"name", check.name}, {"mode", check.mode}, {"input_id", check.input_id}, {"what", checks[c]["what"]}};
        it->second["cells"] = Json(std::vector<Json>(runs.size()));
      }
      Json& cell = it->second["cells"][i];
      for (const char* name : {"verdict", "figure", "unit", "ms", "message", "output"}) cell[name] = checks[c][name];
    }
  }
  Json list = Json::array();
  for (const std::string& key : order) {
    Json& row = rows[key];
    const Json& first = row["cells"][0];
    row["differs"] = std::any_of(row["cells"].begin(), row["cells"].end(), [&](const Json& cell) {
      return first.is_null() || cell.is_null() ? first != cell : cell["verdict"] != first["verdict"] || cell["output"] != first["output"];
    });
    list.push_back(std::move(row));
  }
  return Json{{"runs", std::move(heads)}, {"rows", std::move(list)}};
}

Json percentiles_json(const Percentiles& p) {
  const auto value = [&](double v) { return p.count > 0 ? Json(v) : Json(); };
  return Json{{"count", p.count}, {"p50", value(p.p50)}, {"p90", value(p.p90)}, {"p95", value(p.p95)}, {"p99", value(p.p99)}};
}

Json totals_json(const RequestTotals& t) {
  return Json{{"requests", t.requests},
              {"errors", t.errors},
              {"prompt_tokens", t.prompt_tokens},
              {"completion_tokens", t.completion_tokens},
              {"cached_tokens", t.cached_tokens},
              {"rounds", t.rounds},
              {"drafted", t.drafted},
              {"accepted", t.accepted},
              {"tokens_per_round", mean_tokens(t)},
              {"tokens_per_second", decode_speed(t)},
              {"accepted_at", t.accepted_at},
              {"histogram", t.histogram}};
}

Json summary_json(const RequestSummary& s) {
  return Json{{"totals", totals_json(s.totals)},
              {"ttft_ms", percentiles_json(s.first_token_ms)},
              {"total_ms", percentiles_json(s.total_ms)},
              {"tokens_per_second", percentiles_json(s.tokens_per_second)},
              {"tokens_per_round", percentiles_json(s.tokens_per_round)}};
}

Json acceptance_json(const AcceptanceBreakdown& b) {
  const auto groups = [](const std::vector<AcceptanceGroup>& list) {
    Json out = Json::array();
    for (const AcceptanceGroup& g : list) {
      Json group{{"name", g.name}};
      group.update(totals_json(g.totals));
      out.push_back(std::move(group));
    }
    return out;
  };
  return Json{{"speculative", totals_json(b.speculative)},
              {"by_mode", groups(b.by_mode)},
              {"by_thinking", groups(b.by_thinking)},
              {"by_context", groups(b.by_context)}};
}

Result<Json> timeline_json(Store& store, Paging paging, int64_t current_run) {
  auto page = store.runs(paging);
  if (!page) return page.status();
  int64_t from = 0, to = now_ms() + 60'000;
  std::map<int64_t, Json> events;
  if (!page->rows.empty()) {
    // Not simply the last one's: clocks are set back.
    from = page->rows.front().started_ms;
    for (const ServiceRun& run : page->rows) from = std::min(from, run.started_ms);
    if (paging.offset > 0) to = std::max(page->rows.front().ended_ms, page->rows.front().started_ms) + 60'000;
  }
  // By time, not start by start: events have an index by time.
  std::map<int64_t, Event> marks;
  EventFilter worse;
  worse.from_ms = from, worse.to_ms = to, worse.at_least = Severity::kWarning;
  EventFilter ladder = worse, own = worse;
  ladder.at_least.reset(), ladder.kind = "ladder";
  own.at_least.reset(), own.kind = "store.";
  int64_t left_out = 0;
  for (const EventFilter& filter : {worse, ladder, own}) {
    auto found = store.events(filter, {500, 0});
    if (!found) return found.status();
    left_out += found->total - static_cast<int64_t>(found->rows.size());
    for (Event& e : found->rows) marks[e.id] = std::move(e);
  }
  for (const auto& [id, event] : marks) {
    Json& list = events.try_emplace(event.run_id, Json::array()).first->second;
    list.push_back(event_json(event));
  }
  Json runs = Json::array();
  for (const ServiceRun& run : page->rows) {
    auto phases = store.phases(run.id);
    if (!phases) return phases.status();
    Json item = run_json(run, current_run);
    item["phases"] = phases_json(*phases);
    const auto it = events.find(run.id);
    item["events"] = it == events.end() ? Json::array() : std::move(it->second);
    runs.push_back(std::move(item));
  }
  return Json{
      {"total", page->total}, {"offset", paging.offset}, {"limit", paging.limit}, {"runs", std::move(runs)}, {"events_left_out", left_out}};
}

}  // namespace ddtree::admin
