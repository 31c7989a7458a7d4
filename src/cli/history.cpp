// ddtree history: what the dashboard shows of the past, in the terminal. Reads the store beside a server that has it open.
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <map>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/terminal.h"
#include "server/admin_parts.h"
#include "server/history_compare.h"
#include "store/store.h"

namespace ddtree::cli {
namespace {

const char* const kHelp =
    "usage: ddtree history [VIEW] [flags]\n\n"
    "What the dashboard shows of the past, from the history that `ddtree serve` writes. Read-only: it may run beside a server.\n\n"
    "  runs               starts, newest first, each with its phases (the default view)\n"
    "  runs ID ID …       starts side by side: flags, plan, smoke test, speed, acceptance; what differs first\n"
    "  events             faults, steps of the ladder, smoke tests, the store's troubles\n"
    "  requests           counts and percentiles of finished requests, and the last ones\n"
    "  acceptance         by position, by mode, with thinking on and off, by context length\n"
    "  smoke              smoke runs, newest first\n"
    "  smoke ID ID …      smoke runs side by side: checks in rows, outputs compared\n\n"
    "  --db PATH          the history (default: where `ddtree serve` keeps it)\n"
    "  --since WHEN       only what began since then: 90m, 12h, 7d, or 2026-11-30 (UTC)\n"
    "  --run ID           only this start's events, requests, acceptance and smoke runs\n"
    "  --limit N          rows shown, 1 to 1000 (default: 20)\n"
    "  --json             the same as one JSON object, in the shapes of docs/admin-api.md\n"
    "  --help             this text\n\n"
    "Exit codes: 0 shown, also where nothing is recorded; 64 flags, or a number that the history does not have; 69 the history is not "
    "there, "
    "may\nnot be read, is damaged, another program's or of another version; 75 the disk fails.\n";

int fail(const Status& status) {
  std::fprintf(stderr, "ddtree history: %s\n", status.message().c_str());
  return exit_code(status.code() == Code::kInvalidArgument ? Code::kUsage : status.code());
}

struct Wanted {
  std::string view = "runs", db;
  std::vector<int64_t> ids;
  int64_t since_ms = 0, run_id = 0;
  int32_t limit = 20;
  bool json = false, help = false;
};

bool whole(const std::string& text, int64_t low, int64_t high, int64_t* value) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return code == std::errc() && end == text.data() + text.size() && *value >= low && *value <= high;
}

// "90m", "12h", "7d" before now, or a day (UTC).
bool read_since(const std::string& text, int64_t* since_ms) {
  int64_t n = 0;
  if (text.size() > 1) {
    const int64_t unit = text.back() == 'm' ? 60'000 : text.back() == 'h' ? 3'600'000 : text.back() == 'd' ? 86'400'000 : 0;
    if (unit != 0 && whole(text.substr(0, text.size() - 1), 1, 1'000'000, &n)) return *since_ms = admin::now_ms() - n * unit, true;
  }
  std::tm day{};
  const char* const end = strptime(text.c_str(), "%Y-%m-%d", &day);
  if (end == nullptr || *end != '\0' || text.size() != 10) return false;
  *since_ms = static_cast<int64_t>(timegm(&day)) * 1000;
  return true;
}

Result<Wanted> parse(int argc, char** argv) {
  Wanted w;
  bool view_given = false;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") return w.help = true, w;
    if (flag == "--json") {
      w.json = true;
      continue;
    }
    int64_t n = 0;
    if (flag.rfind("--", 0) != 0) {
      if (whole(flag, 1, INT64_MAX, &n)) {
        w.ids.push_back(n);
        continue;
      }
      const char* const views[] = {"runs", "events", "requests", "acceptance", "smoke"};
      if (view_given || std::none_of(std::begin(views), std::end(views), [&](const char* v) { return flag == v; }))
        return Status(Code::kUsage, fmt::format("\"{}\" is no view{}; it must be runs, events, requests, acceptance or smoke", flag,
                                                view_given ? " beside \"" + w.view + "\"" : ""));
      w.view = flag, view_given = true;
      continue;
    }
    if (flag != "--db" && flag != "--since" && flag != "--run" && flag != "--limit")
      return Status(Code::kUsage, fmt::format("there is no flag {}; ddtree history --help lists them", flag));
    if (++i >= argc) return Status(Code::kUsage, flag + " needs a value");
    const std::string value = argv[i];
    if (flag == "--db") {
      if (value.empty()) return Status(Code::kUsage, "--db is empty; it must be the path of the history");
      w.db = value;
    } else if (flag == "--since") {
      if (!read_since(value, &w.since_ms))
        return Status(Code::kUsage, fmt::format("--since is \"{}\", but must be like 90m, 12h, 7d or 2026-11-30", value));
    } else if (flag == "--run") {
      if (!whole(value, 1, INT64_MAX, &w.run_id))
        return Status(Code::kUsage, fmt::format("--run is \"{}\", but must be a start's number", value));
    } else if (!whole(value, 1, 1000, &n)) {
      return Status(Code::kUsage, fmt::format("--limit is \"{}\", but must be a whole number from 1 to 1000", value));
    } else {
      w.limit = static_cast<int32_t>(n);
    }
  }
  if (!w.ids.empty() && w.view != "runs" && w.view != "smoke")
    return Status(Code::kUsage, "numbers choose what stands side by side: only with the views runs and smoke");
  if (w.ids.size() == 1) return Status(Code::kUsage, fmt::format("one number ({}) has nothing to stand beside; give two to six", w.ids[0]));
  if (w.ids.size() > 6) return Status(Code::kUsage, fmt::format("{} numbers were given; at most six fit side by side", w.ids.size()));
  return w;
}

// --- text ---------------------------------------------------------------------------------------------------------------------------

std::string when(int64_t ms) {
  if (ms <= 0) return "-";
  const std::time_t seconds = ms / 1000;
  std::tm tm{};
  localtime_r(&seconds, &tm);
  return fmt::format("{:04}-{:02}-{:02} {:02}:{:02}:{:02}", tm.tm_year + 1900, tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec);
}
std::string span(double ms) {
  if (ms < 1000) return fmt::format("{:.0f} ms", ms);
  const auto s = static_cast<int64_t>(ms / 1000);
  if (s < 60) return fmt::format("{:.1f} s", ms / 1000);
  if (s < 3600) return fmt::format("{} min {} s", s / 60, s % 60);
  if (s < 86400) return fmt::format("{} h {} min", s / 3600, s % 3600 / 60);
  return fmt::format("{} d {} h", s / 86400, s % 86400 / 3600);
}
std::string figure(const Json& value, int digits = 2) {
  if (value.is_null()) return "-";
  if (value.is_number_float()) return fmt::format("{:.{}f}", value.get<double>(), digits);
  if (value.is_number()) return std::to_string(value.get<int64_t>());
  return value.is_string() ? value.get<std::string>() : value.dump();
}
size_t columns_of(const std::string& text) {  // characters, near enough to columns for what is shown here
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

// A table with columns as wide as what is in them; names that begin with '>' are for figures and stand to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> names) : names_(std::move(names)) {}
  void add(std::vector<std::string> row) {
    for (std::string& cell : row) cell = plain(cell);
    rows_.push_back(std::move(row));
  }
  void print() const {
    std::vector<size_t> width(names_.size());
    for (size_t c = 0; c < names_.size(); ++c) {
      width[c] = columns_of(names_[c]) - (names_[c][0] == '>' ? 1 : 0);
      for (const auto& row : rows_) width[c] = std::max(width[c], columns_of(row[c]));
    }
    const auto line = [&](const std::vector<std::string>& cells, bool head) {
      std::string out;
      for (size_t c = 0; c < names_.size(); ++c) {
        const bool right = names_[c][0] == '>';
        const std::string text = head && right ? cells[c].substr(1) : cells[c];
        const std::string pad(width[c] - columns_of(text), ' ');
        out += (c > 0 ? "  " : "") + (right ? pad + text : text + pad);
      }
      out.erase(out.find_last_not_of(' ') + 1);
      fmt::print("{}\n", out);
    };
    line(names_, true);
    for (const auto& row : rows_) line(row, false);
  }
  bool empty() const { return rows_.empty(); }

 private:
  std::vector<std::string> names_;
  std::vector<std::vector<std::string>> rows_;
};

void print_runs(const Json& timeline) {
  if (timeline["runs"].empty()) return fmt::print("No start is recorded.\n");
  Table table({">id", "started", ">lasted", "state", "version", "mode", ">ready after", "smoke", ">requests", ">errors", ">events", "end"});
  for (const Json& r : timeline["runs"]) {
    const int64_t started = r["started"], ended = r["ended"].is_null() ? admin::now_ms() : r["ended"].get<int64_t>();
    const std::string code = r["exit_code"].is_null() || r["exit_code"] == 0 ? "" : fmt::format(" (exit {})", r["exit_code"].get<int>());
    table.add({figure(r["id"]), when(started), span(static_cast<double>(ended - started)), figure(r["state"]), figure(r["version"]),
               figure(r["mode"]), r["ready"].is_null() ? "-" : span(static_cast<double>(r["ready"].get<int64_t>() - started)),
               figure(r["smoke"]), figure(r["requests"]), figure(r["errors"]), std::to_string(r["events"].size()),
               figure(r["end_reason"]) + code});
  }
  table.print();
  fmt::print("\n");
  Table phases({">id", "phases"});
  for (const Json& r : timeline["runs"]) {
    std::string text;
    for (const Json& p : r["phases"]) {
      text += (text.empty() ? "" : ", ") + p["phase"].get<std::string>() + " " + span(p["lasted_ms"].get<double>());
      if (p["phase"] == "degraded") text += " (" + p["reason"].get<std::string>() + ")";
    }
    phases.add({figure(r["id"]), text});
  }
  phases.print();
  const int64_t total = timeline["total"];
  if (total > static_cast<int64_t>(timeline["runs"].size())) fmt::print("\n{} of {} starts\n", timeline["runs"].size(), total);
}

void print_run_comparison(const Json& c) {
  std::vector<std::string> names = {"", "what"};
  for (const Json& r : c["runs"]) names.push_back(fmt::format("start {}", r["id"].get<int64_t>()));
  names[0] = "differs";
  Table table(names);
  for (const Json& row : c["rows"]) {
    std::vector<std::string> cells = {row["differs"].get<bool>() ? "*" : "",
                                      row["section"].get<std::string>() + ": " + row["name"].get<std::string>()};
    const std::string unit = row["unit"].get<std::string>();
    for (const Json& v : row["values"]) {
      const bool bare_flag = row["section"] == "flags" && v == "";
      cells.push_back((bare_flag ? "given" : figure(v)) + (unit.empty() || v.is_null() ? "" : " " + unit));
    }
    table.add(std::move(cells));
  }
  table.print();
}

void print_events(const Json& page) {
  if (page["events"].empty()) return fmt::print("No event is recorded.\n");
  Table table({"time", ">start", "severity", "kind", "what"});
  for (const Json& e : page["events"])
    table.add({when(e["time"]), figure(e["run_id"]), figure(e["severity"]), figure(e["kind"]), figure(e["message"])});
  table.print();
  const int64_t total = page["total"];
  if (total > static_cast<int64_t>(page["events"].size())) fmt::print("\nthe newest {} of {} events\n", page["events"].size(), total);
}

void print_requests(const Json& all) {
  const Json& s = all["summary"];
  const Json& t = s["totals"];
  if (t["requests"] == 0) return fmt::print("No request is recorded.\n");
  fmt::print("{} requests, {} with an error; {} prompt tokens ({} cached), {} generated\n\n", figure(t["requests"]), figure(t["errors"]),
             figure(t["prompt_tokens"]), figure(t["cached_tokens"]), figure(t["completion_tokens"]));
  Table table({"", ">p50", ">p90", ">p95", ">p99", ">of"});
  const std::pair<const char*, const char*> rows[] = {
      {"first token, ms", "ttft_ms"}, {"total, ms", "total_ms"}, {"tokens/s", "tokens_per_second"}, {"tokens a round", "tokens_per_round"}};
  for (const auto& [name, key] : rows) {
    std::vector<std::string> cells = {name};
    for (const char* p : {"p50", "p90", "p95", "p99"}) cells.push_back(figure(s[key][p], std::string(key) == "tokens_per_round" ? 2 : 1));
    cells.push_back(figure(s[key]["count"]));
    table.add(std::move(cells));
  }
  table.print();
  fmt::print("\n");
  Table list({"received", "mode", ">prompt", ">generated", ">first ms", ">total ms", ">tok/s", ">a round", "finish", "id"});
  for (const Json& r : all["requests"])
    list.add({when(r["received"]), figure(r["mode"]), figure(r["prompt_tokens"]), figure(r["completion_tokens"]), figure(r["ttft_ms"], 1),
              figure(r["total_ms"], 1), figure(r["tokens_per_second"], 1), figure(r["tokens_per_round"]), figure(r["finish"]),
              figure(r["id"])});
  list.print();
}

void print_acceptance(const Json& a) {
  if (a["by_mode"].empty()) return fmt::print("No request has made a round.\n");
  const Json& all = a["speculative"];
  if (all["rounds"] > 0) {
    fmt::print("{} rounds of {} requests, {} tokens a round\n\n", figure(all["rounds"]), figure(all["requests"]),
               figure(all["tokens_per_round"]));
    Table positions({">position", ">rounds", ">share", ""});
    for (size_t i = 0; i < all["accepted_at"].size() && all["accepted_at"][i] > 0; ++i) {
      const double share = all["accepted_at"][i].get<double>() / all["rounds"].get<double>();
      positions.add({std::to_string(i + 1), figure(all["accepted_at"][i]), fmt::format("{:.1f} %", 100 * share),
                     std::string(static_cast<size_t>(share * 40 + 0.5), '#')});
    }
    positions.print();
    fmt::print("\n");
  }
  const std::pair<const char*, const char*> parts[] = {{"mode", "by_mode"}, {"thinking", "by_thinking"}, {"context under", "by_context"}};
  for (const auto& [name, key] : parts) {
    Table table({name, ">requests", ">rounds", ">tok/s", ">a round", ">at 1", ">at 2", ">at 4", ">at 8"});
    for (const Json& g : a[key]) {
      std::vector<std::string> cells = {figure(g["name"]), figure(g["requests"]), figure(g["rounds"]), figure(g["tokens_per_second"], 1),
                                        figure(g["tokens_per_round"])};
      for (const size_t p : {0, 1, 3, 7})
        cells.push_back(p < g["accepted_at"].size() && g["rounds"] > 0
                            ? fmt::format("{:.1f} %", 100 * g["accepted_at"][p].get<double>() / g["rounds"].get<double>())
                            : "-");
      table.add(std::move(cells));
    }
    if (table.empty()) continue;
    table.print();
    fmt::print("\n");
  }
}

void print_smoke(const Json& page) {
  if (page["runs"].empty()) return fmt::print("No smoke run is recorded.\n");
  Table table({">id", "started", ">start", "trigger", "version", "verdict", ">checks", ">failed", ">tok/s", ">a round", "message"});
  for (const Json& r : page["runs"]) {
    const auto failed = std::count_if(r["checks"].begin(), r["checks"].end(), [](const Json& c) { return c["verdict"] == "fail"; });
    table.add({figure(r["id"]), when(r["started"]), r["run_id"] == 0 ? "-" : figure(r["run_id"]), figure(r["trigger"]),
               figure(r["version"]), figure(r["verdict"]), std::to_string(r["checks"].size()), std::to_string(failed),
               figure(r["tokens_per_second"], 1), figure(r["tokens_per_round"]), figure(r["message"])});
  }
  table.print();
}

void print_smoke_comparison(const Json& c) {
  std::vector<std::string> names = {"differs", "check", "mode", "input"};
  for (const Json& r : c["runs"]) names.push_back(fmt::format("run {}", r["id"].get<int64_t>()));
  names.push_back("text");
  Table table(names);
  for (const Json& row : c["rows"]) {
    std::vector<std::string> cells = {row["differs"].get<bool>() ? "*" : "", figure(row["name"]), figure(row["mode"]),
                                      figure(row["input_id"])};
    bool same = true, any = false;
    for (const Json& cell : row["cells"]) {
      cells.push_back(cell.is_null() ? "not checked"
                                     : figure(cell["verdict"]) +
                                           (cell["figure"].is_null() ? "" : ", " + figure(cell["figure"]) + " " + figure(cell["unit"])));
      if (cell.is_null()) continue;
      any = any || cell["output"] != "";
      same = same && !row["cells"][0].is_null() && cell["output"] == row["cells"][0]["output"];
    }
    cells.push_back(!any ? "" : same ? "the same" : "differs");
    table.add(std::move(cells));
  }
  table.print();
  for (const Json& row : c["rows"]) {
    bool same = true;
    for (const Json& cell : row["cells"])
      same = same && !cell.is_null() && !row["cells"][0].is_null() && cell["output"] == row["cells"][0]["output"];
    if (same) continue;
    fmt::print("\n{} {} {}\n", figure(row["name"]), figure(row["mode"]), figure(row["input_id"]));
    for (size_t i = 0; i < row["cells"].size(); ++i) {
      const Json& cell = row["cells"][i];
      fmt::print("  run {}: {}\n", c["runs"][i]["id"].get<int64_t>(),
                 cell.is_null() ? "not checked" : cell["output"].dump(-1, ' ', false, Json::error_handler_t::replace));
    }
  }
}

// --- reading ------------------------------------------------------------------------------------------------------------------------

Result<Json> read(Store& store, const Wanted& w) {
  // The writing server's own run: open, and seen alive a moment ago. Any other open run is one whose process is gone.
  int64_t current = 0;
  if (auto newest = store.runs({1, 0}); newest.ok() && !newest->rows.empty())
    if (const ServiceRun& run = newest->rows.front(); run.ended_ms == 0 && admin::now_ms() - run.heartbeat_ms < 30'000) current = run.id;
  const Paging paging{w.limit, 0};
  const auto since = [&](Json* list, const char* time) {
    if (w.since_ms == 0) return;
    Json kept = Json::array();
    for (Json& item : *list)
      if (item[time].get<int64_t>() >= w.since_ms) kept.push_back(std::move(item));
    *list = std::move(kept);
  };
  if (w.run_id > 0) {
    if (w.view == "runs") return Status(Code::kUsage, "--run narrows events, requests, acceptance and smoke; runs shows every start");
    auto run = store.run(w.run_id);
    if (!run) return run.status();
    if (!run->has_value())
      return Status(Code::kUsage, fmt::format("--run {}: there is no start {} in {}", w.run_id, w.run_id, store.path()));
  }
  if (w.view == "runs" && !w.ids.empty()) {
    std::vector<admin::RunFigures> runs;
    for (const int64_t id : w.ids) {
      auto figures = admin::read_run_figures(store, id);
      if (!figures) return figures.status();
      if (!figures->has_value()) return Status(Code::kUsage, fmt::format("there is no start {} in {}", id, store.path()));
      runs.push_back(std::move(**figures));
    }
    return admin::compare_runs_json(runs, current);
  }
  if (w.view == "runs") {
    auto timeline = admin::timeline_json(store, paging, current);
    if (timeline) since(&(*timeline)["runs"], "started");
    return timeline;
  }
  if (w.view == "events") {
    EventFilter filter;
    filter.run_id = w.run_id, filter.from_ms = w.since_ms;
    auto page = store.events(filter, paging);
    if (!page) return page.status();
    Json list = Json::array();
    for (const Event& e : page->rows) list.push_back(admin::event_json(e));
    return Json{{"total", page->total}, {"events", std::move(list)}};
  }
  RequestFilter filter;
  filter.run_id = w.run_id, filter.from_ms = w.since_ms;
  if (w.view == "requests") {
    auto summary = store.request_summary(filter);
    if (!summary) return summary.status();
    auto page = store.requests(filter, paging);
    if (!page) return page.status();
    Json list = Json::array();
    for (const RequestRecord& r : page->rows) list.push_back(admin::request_json(r, r.trees));
    return Json{{"summary", admin::summary_json(*summary)}, {"total", page->total}, {"requests", std::move(list)}};
  }
  if (w.view == "acceptance") {
    auto breakdown = store.acceptance(filter);
    if (!breakdown) return breakdown.status();
    return admin::acceptance_json(*breakdown);
  }
  if (!w.ids.empty()) {
    std::vector<SmokeRun> runs;
    for (const int64_t id : w.ids) {
      auto run = store.smoke_run(id);
      if (!run) return run.status();
      if (!run->has_value()) return Status(Code::kUsage, fmt::format("there is no smoke run {} in {}", id, store.path()));
      runs.push_back(std::move(**run));
    }
    return admin::compare_smoke_json(runs);
  }
  auto page = store.smoke_runs(paging, w.run_id);
  if (!page) return page.status();
  Json list = Json::array();
  for (const SmokeRun& run : page->rows) list.push_back(admin::smoke_json(run));
  since(&list, "started");
  return Json{{"total", page->total}, {"runs", std::move(list)}};
}

int history(int argc, char** argv) {
  auto wanted = parse(argc, argv);
  if (!wanted) return fail(wanted.status());
  const Wanted& w = *wanted;
  if (w.help) return std::fputs(kHelp, stdout), 0;
  std::string path = w.db;
  if (path.empty()) {
    auto standard = default_store_path();
    if (!standard) return fail(standard.status());
    path = *standard;
  }
  auto store = Store::open_read_only(path);
  if (!store) return fail(store.status());
  auto out = read(**store, w);
  if (!out) return fail(out.status());
  if (w.json) {
    fmt::print("{}\n", out->dump(2, ' ', false, Json::error_handler_t::replace));
    return 0;
  }
  const bool beside = !w.ids.empty();
  if (w.view == "runs") beside ? print_run_comparison(*out) : print_runs(*out);
  else if (w.view == "events") print_events(*out);
  else if (w.view == "requests") print_requests(*out);
  else if (w.view == "acceptance") print_acceptance(*out);
  else beside ? print_smoke_comparison(*out) : print_smoke(*out);
  return 0;
}

}  // namespace

DDTREE_COMMAND("history", "starts, events, requests, acceptance and smoke runs of the past, in the terminal", history);

}  // namespace ddtree::cli
