#include "store/queries.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <map>
#include <unordered_map>

#include "store/columns.h"

namespace ddtree::store {
namespace {

// A WHERE clause that grows, with its values.
class Where {
 public:
  void add(const std::string& condition, std::vector<Value> values = {}) {
    text_ += (text_.empty() ? " WHERE " : " AND ") + condition;
    values_.insert(values_.end(), values.begin(), values.end());
  }
  void any_of(const char* column, const std::vector<std::string>& names) {
    if (names.empty()) return;
    std::string marks;
    std::vector<Value> values;
    for (const std::string& name : names) marks += marks.empty() ? "?" : ",?", values.push_back(name);
    add(fmt::format("{} IN ({})", column, marks), values);
  }
  const std::string& text() const { return text_; }
  std::vector<Value> values(std::vector<Value> more = {}) const {
    std::vector<Value> all = values_;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

 private:
  std::string text_;
  std::vector<Value> values_;
};

Paging bounded(Paging paging) { return {std::clamp(paging.limit, 0, 1000), std::max<int64_t>(paging.offset, 0)}; }

Where request_where(const RequestFilter& filter) {
  Where where;
  if (filter.run_id != 0) where.add("run_id = ?", {filter.run_id});
  if (filter.from_ms != 0) where.add("received_ms >= ?", {filter.from_ms});
  if (filter.to_ms != 0) where.add("received_ms < ?", {filter.to_ms});
  where.any_of("finish", filter.finish);
  where.any_of("mode", filter.mode);
  if (filter.error) where.add(*filter.error ? "error <> ''" : "error = ''");
  if (filter.stream) where.add("stream = ?", {int64_t{*filter.stream}});
  if (filter.thinking) where.add("thinking = ?", {int64_t{*filter.thinking}});
  if (!filter.client.empty()) where.add("instr(client, ?) > 0", {filter.client});
  if (!filter.request_id.empty()) where.add("request_id = ?", {filter.request_id});
  if (filter.context_from != 0) where.add("prompt_tokens + completion_tokens >= ?", {filter.context_from});
  if (filter.context_to != 0) where.add("prompt_tokens + completion_tokens < ?", {filter.context_to});
  return where;
}

std::string order_by(const RequestFilter& filter) {
  const char* key = "received_ms";
  bool rising = filter.reversed;
  switch (filter.sort) {
    case RequestSort::kNewest: break;
    case RequestSort::kOldest: rising = !rising; break;
    case RequestSort::kSlowest: key = "total_ms"; break;
    case RequestSort::kFirstToken: key = "first_token_ms"; break;
    case RequestSort::kTokens: key = "completion_tokens"; break;
    case RequestSort::kAcceptance: key = "CASE WHEN rounds > 0 THEN 1.0 * accepted / rounds ELSE -1 END"; break;
    case RequestSort::kSpeed: key = "tokens_per_second"; break;
    case RequestSort::kContext: key = "prompt_tokens + completion_tokens"; break;
  }
  const char* const direction = rising ? "" : " DESC";
  return fmt::format("{}{}, id{}", key, direction, direction);
}

// Rows of a record type whose first column is its id.
template <class R, class Then>
Result<Page<R>> page(Database& database, const std::string& table, const Where& where, const std::string& order, Paging paging, Then then,
                     const std::string& more_columns = "") {
  paging = bounded(paging);
  Page<R> result;
  auto total = database.integer("SELECT count(*) FROM " + table + where.text(), where.values());
  if (!total) return total.status();
  result.total = *total;
  const Status status = database.query(
      "SELECT id, " + column_names<R>() + more_columns + " FROM " + table + where.text() + " ORDER BY " + order + " LIMIT ? OFFSET ?",
      where.values({int64_t{paging.limit}, paging.offset}), [&](const Row& row) {
        R record;
        record.id = row.integer(0);
        then(row, read(row, 1, &record), &record);
        result.rows.push_back(std::move(record));
      });
  if (!status.ok()) return status;
  return result;
}
constexpr auto kNothingMore = [](const Row&, int, auto*) {};

template <class T>
std::optional<T> first(Page<T>& page) {
  if (page.rows.empty()) return std::nullopt;
  return std::move(page.rows.front());
}

template <class T, class Word>
std::string pack_words(const std::vector<T>& values) {
  std::string bytes;
  bytes.reserve(values.size() * 4);
  for (const T value : values) {
    const auto word = std::bit_cast<uint32_t>(value);
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>(word >> (8 * i) & 0xFF);
  }
  return bytes;
}
template <class T>
std::vector<T> unpack_words(std::string_view bytes) {
  std::vector<T> values;
  for (size_t at = 0; at + 4 <= bytes.size(); at += 4) {
    uint32_t word = 0;
    for (size_t i = 0; i < 4; ++i) word |= uint32_t{static_cast<unsigned char>(bytes[at + i])} << (8 * i);
    values.push_back(std::bit_cast<T>(word));
  }
  return values;
}

void add_to(std::vector<int64_t>* sums, const std::string& text) {
  const std::vector<int64_t> values = parse_array(text);
  if (values.size() > sums->size()) sums->resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) (*sums)[i] += values[i];
}

}  // namespace

std::vector<int64_t> parse_array(const std::string& text) {
  std::vector<int64_t> values;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    ++at;  // '[' or ','
    int64_t value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc()) break;
    values.push_back(value);
    at = next;
  }
  return values;
}

std::string pack(const std::vector<int32_t>& values) { return pack_words<int32_t, uint32_t>(values); }
std::string pack(const std::vector<float>& values) { return pack_words<float, uint32_t>(values); }
std::vector<int32_t> unpack_ints(std::string_view bytes) { return unpack_words<int32_t>(bytes); }
std::vector<float> unpack_floats(std::string_view bytes) { return unpack_words<float>(bytes); }

Result<Page<ServiceRun>> read_runs(Database& database, int64_t run_id, Paging paging) {
  Where where;
  if (run_id != 0) where.add("id = ?", {run_id});
  return page<ServiceRun>(
      database, "service_run", where, "id DESC", paging,
      [](const Row& row, int column, ServiceRun* run) {
        run->requests = row.integer(column);
        run->errors = row.integer(column + 1);
      },
      ", (SELECT count(*) FROM request WHERE run_id = service_run.id), (SELECT count(*) FROM request WHERE run_id = service_run.id AND "
      "error <> '')");
}

Result<std::vector<ServicePhase>> read_phases(Database& database, int64_t run_id) {
  auto all = page<ServicePhase>(
      database, "service_phase",
      [&] {
        Where where;
        where.add("run_id = ?", {run_id});
        return where;
      }(),
      "id", {1000, 0}, kNothingMore);
  if (!all) return all.status();
  auto ended = database.integer("SELECT ended_ms FROM service_run WHERE id = ?", {run_id});
  if (!ended) return ended.status();
  std::vector<ServicePhase>& phases = all->rows;
  for (size_t i = 0; i < phases.size(); ++i) {
    const int64_t until = i + 1 < phases.size() ? phases[i + 1].at_ms : *ended != 0 ? *ended : now_ms();
    phases[i].lasted_ms = std::max<int64_t>(0, until - phases[i].at_ms);
  }
  return std::move(phases);
}

Result<Page<RequestRecord>> read_requests(Database& database, const RequestFilter& filter, Paging paging) {
  return page<RequestRecord>(database, "request", request_where(filter), order_by(filter), paging, kNothingMore);
}

Result<std::optional<RequestRecord>> read_request(Database& database, int64_t id) {
  Where where;
  where.add("id = ?", {id});
  auto rows = page<RequestRecord>(database, "request", where, "id", {1, 0}, kNothingMore);
  if (!rows) return rows.status();
  return first(*rows);
}

Result<std::vector<int64_t>> read_request_ids(Database& database, const RequestFilter& filter) {
  const Where where = request_where(filter);
  std::vector<int64_t> ids;
  const Status status = database.query("SELECT id FROM request" + where.text() + " ORDER BY " + order_by(filter), where.values(),
                                       [&](const Row& row) { ids.push_back(row.integer(0)); });
  if (!status.ok()) return status;
  return ids;
}

Result<std::vector<RequestRecord>> read_requests_of(Database& database, const std::vector<int64_t>& ids) {
  std::unordered_map<int64_t, size_t> place;
  for (size_t i = 0; i < ids.size(); ++i) place.emplace(ids[i], i);
  std::vector<std::optional<RequestRecord>> found(ids.size());
  const Status status =
      database.query("SELECT id, " + column_names<RequestRecord>() + " FROM request WHERE id IN (SELECT value FROM json_each(?))",
                     {array_text(ids)}, [&](const Row& row) {
                       RequestRecord record;
                       record.id = row.integer(0);
                       read(row, 1, &record);
                       found[place.at(record.id)] = std::move(record);
                     });
  if (!status.ok()) return status;
  std::vector<RequestRecord> rows;
  for (auto& record : found)
    if (record) rows.push_back(std::move(*record));
  return rows;
}

Result<RequestTotals> read_totals(Database& database, const RequestFilter& filter) {
  const Where where = request_where(filter);
  RequestTotals totals;
  Status status = database.query(
      "SELECT count(*), sum(error <> ''), sum(prompt_tokens), sum(completion_tokens), sum(cached_tokens), sum(rounds), sum(drafted), "
      "sum(accepted), sum(nodes_verified), sum(tree_gain), sum(max(completion_tokens - 1, 0)), sum(decode_ms) FROM request" +
          where.text(),
      where.values(), [&](const Row& row) {
        int64_t* const sums[] = {&totals.requests,       &totals.errors,    &totals.prompt_tokens, &totals.completion_tokens,
                                 &totals.cached_tokens,  &totals.rounds,    &totals.drafted,       &totals.accepted,
                                 &totals.nodes_verified, &totals.tree_gain, &totals.decoded_tokens};
        int column = 0;
        for (int64_t* sum : sums) *sum = row.integer(column++);
        totals.decode_ms = row.real(column);
      });
  if (!status.ok()) return status;
  status = database.query("SELECT accepted_at, histogram FROM request" + where.text(), where.values(), [&](const Row& row) {
    add_to(&totals.accepted_at, row.text(0));
    add_to(&totals.histogram, row.text(1));
  });
  if (!status.ok()) return status;
  return totals;
}

namespace {

// Sorts the values. Nearest rank: the value at place ceil(share × count), counted from 1.
Percentiles percentiles(std::vector<double>* values) {
  Percentiles result;
  result.count = static_cast<int64_t>(values->size());
  if (values->empty()) return result;
  std::sort(values->begin(), values->end());
  const auto rank = [&](int64_t percent) { return (*values)[static_cast<size_t>((percent * result.count + 99) / 100 - 1)]; };
  result.p50 = rank(50), result.p90 = rank(90), result.p95 = rank(95), result.p99 = rank(99);
  return result;
}

// The upper bound of the bucket that a context length falls into: 256, 512, 1024 …
int64_t context_bound(int64_t tokens) {
  int64_t bound = 256;
  while (bound <= tokens) bound *= 2;
  return bound;
}

}  // namespace

Result<RequestSummary> read_summary(Database& database, const RequestFilter& filter) {
  auto totals = read_totals(database, filter);
  if (!totals) return totals.status();
  RequestSummary summary;
  summary.totals = std::move(*totals);
  const Where where = request_where(filter);
  std::vector<double> first_token, total, speed, per_round;
  const Status status = database.query(
      "SELECT completion_tokens, first_token_ms, total_ms, tokens_per_second, rounds, accepted, mode = 'NONE' FROM request" + where.text(),
      where.values(), [&](const Row& row) {
        if (row.integer(0) > 0) first_token.push_back(row.real(1));
        if (row.real(2) > 0) total.push_back(row.real(2));
        if (row.real(3) > 0) speed.push_back(row.real(3));
        if (const int64_t rounds = row.integer(4); rounds > 0 && row.integer(6) == 0)
          per_round.push_back(1.0 + static_cast<double>(row.integer(5)) / static_cast<double>(rounds));
      });
  if (!status.ok()) return status;
  summary.first_token_ms = percentiles(&first_token);
  summary.total_ms = percentiles(&total);
  summary.tokens_per_second = percentiles(&speed);
  summary.tokens_per_round = percentiles(&per_round);
  return summary;
}

Result<AcceptanceBreakdown> read_acceptance(Database& database, const RequestFilter& filter) {
  Where where = request_where(filter);
  where.add("rounds > 0");
  AcceptanceBreakdown result;
  std::map<std::string, RequestTotals> mode, thinking;
  std::map<int64_t, RequestTotals> context;
  const Status status = database.query(
      "SELECT mode, thinking, prompt_tokens, completion_tokens, cached_tokens, rounds, drafted, accepted, nodes_verified, tree_gain, "
      "decode_ms, error <> '', accepted_at, histogram FROM request" +
          where.text(),
      where.values(), [&](const Row& row) {
        const std::string name = row.text(0), accepted_at = row.text(12), histogram = row.text(13);
        const auto add = [&](RequestTotals* t) {
          ++t->requests;
          t->prompt_tokens += row.integer(2), t->completion_tokens += row.integer(3), t->cached_tokens += row.integer(4);
          t->rounds += row.integer(5), t->drafted += row.integer(6), t->accepted += row.integer(7), t->nodes_verified += row.integer(8);
          t->tree_gain += row.integer(9), t->decode_ms += row.real(10), t->errors += row.integer(11);
          t->decoded_tokens += std::max<int64_t>(0, row.integer(3) - 1);
          add_to(&t->accepted_at, accepted_at);
          add_to(&t->histogram, histogram);
        };
        add(&mode[name]);
        if (name == "NONE") return;
        add(&result.speculative);
        add(&thinking[row.integer(1) == 1 ? "on" : row.integer(1) == 0 ? "off" : "unknown"]);
        add(&context[context_bound(row.integer(2) + row.integer(3))]);
      });
  if (!status.ok()) return status;
  for (auto& [name, totals] : mode) result.by_mode.push_back({name, std::move(totals)});
  for (const char* name : {"on", "off", "unknown"})
    if (const auto it = thinking.find(name); it != thinking.end()) result.by_thinking.push_back({name, std::move(it->second)});
  for (auto& [bound, totals] : context) result.by_context.push_back({std::to_string(bound), std::move(totals)});
  return result;
}

Result<Page<RoundTree>> read_trees(Database& database, int64_t request, Paging paging) {
  paging = bounded(paging);
  Page<RoundTree> result;
  auto total = database.integer("SELECT count(*) FROM request_tree WHERE request = ?", {request});
  if (!total) return total.status();
  result.total = *total;
  const Status status = database.query(
      "SELECT round, start, next, token, parent, log_prob, accepted, draft_ms, verify_ms, total_ms FROM request_tree WHERE request = ? "
      "ORDER BY round LIMIT ? OFFSET ?",
      {request, int64_t{paging.limit}, paging.offset}, [&](const Row& row) {
        RoundTree tree;
        tree.round = static_cast<int32_t>(row.integer(0));
        tree.start = static_cast<int32_t>(row.integer(1));
        tree.next = static_cast<int32_t>(row.integer(2));
        tree.token = unpack_ints(row.blob(3));
        tree.parent = unpack_ints(row.blob(4));
        tree.log_prob = unpack_floats(row.blob(5));
        const std::string_view accepted = row.blob(6);
        tree.accepted.assign(accepted.begin(), accepted.end());
        tree.draft_ms = static_cast<float>(row.real(7));
        tree.verify_ms = static_cast<float>(row.real(8));
        tree.total_ms = static_cast<float>(row.real(9));
        result.rows.push_back(std::move(tree));
      });
  if (!status.ok()) return status;
  return result;
}

Result<Page<SmokeRun>> read_smoke_runs(Database& database, int64_t id, int64_t run_id, Paging paging) {
  Where where;
  if (id != 0) where.add("id = ?", {id});
  if (run_id != 0) where.add("run_id = ?", {run_id});
  auto runs = page<SmokeRun>(database, "smoke_run", where, "id DESC", paging, kNothingMore);
  if (!runs) return runs;
  for (SmokeRun& run : runs->rows) {
    Where own;
    own.add("smoke_id = ?", {run.id});
    auto checks = page<SmokeCheck>(database, "smoke_check", own, "position, id", {1000, 0}, kNothingMore);
    if (!checks) return checks.status();
    run.checks = std::move(checks->rows);
  }
  return runs;
}

Result<Page<Event>> read_events(Database& database, const EventFilter& filter, Paging paging) {
  Where where;
  if (filter.run_id != 0) where.add("run_id = ?", {filter.run_id});
  if (filter.request != 0) where.add("request = ?", {filter.request});
  if (filter.from_ms != 0) where.add("at_ms >= ?", {filter.from_ms});
  if (filter.to_ms != 0) where.add("at_ms < ?", {filter.to_ms});
  if (!filter.kind.empty()) {
    if (filter.kind.back() == '.') where.add("substr(kind, 1, ?) = ?", {static_cast<int64_t>(filter.kind.size()), filter.kind});
    else where.add("kind = ?", {filter.kind});
  }
  if (filter.at_least) where.add("severity >= ?", {static_cast<int64_t>(*filter.at_least)});
  return page<Event>(database, "event", where, "id DESC", paging, kNothingMore);
}

Result<std::optional<Calibration>> read_calibration(Database& database, const std::string& machine, const std::string& name) {
  Where where;
  where.add("machine = ?", {machine});
  where.add("name = ?", {name});
  auto rows = page<Calibration>(database, "calibration", where, "id DESC", {1, 0}, kNothingMore);
  if (!rows) return rows.status();
  return first(*rows);
}

Result<std::vector<MetricMinute>> read_minutes(Database& database, int64_t from_ms, int64_t to_ms) {
  std::vector<MetricMinute> minutes;
  const Status status =
      database.query("SELECT " + column_names<MetricMinute>() +
                         " FROM metric_minute WHERE minute_ms >= ? AND minute_ms < ? ORDER BY minute_ms, run_id LIMIT 10080",
                     {from_ms, to_ms}, [&](const Row& row) {
                       MetricMinute minute;
                       read(row, 0, &minute);
                       minutes.push_back(minute);
                     });
  if (!status.ok()) return status;
  return minutes;
}

}  // namespace ddtree::store
