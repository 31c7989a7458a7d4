// The stages of a round, timed through the Executor alone: no scheduler, no text. Reading bandwidth is measured in the same run, and every
// figure stands beside the bytes it must read.
#include "cli/bench_stages.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>

#include "model/describe.h"
#include "model/pair.h"
#include "nn/cpu_executor.h"
#include "nn/cuda_executor.h"
#include "spec/tree.h"

namespace ddtree::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

double ms_since(Clock::time_point begin) { return std::chrono::duration<double, std::milli>(Clock::now() - begin).count(); }
size_t at(int32_t i) { return static_cast<size_t>(i); }

// Bytes of weights that a pass of the target reads whatever its rows: all but the embedding's table (of which it reads a row a token).
double target_bytes(const LoadedPair& pair) {
  double bytes = 0;
  for (const auto& [name, t] : pair.checkpoint->tensors())
    if (!name.starts_with("mtp.") && name.find("embed_tokens") == std::string::npos) bytes += static_cast<double>(t.bytes);
  if (pair.tensors.tied_head) bytes += static_cast<double>(pair.tensors.embed.bytes);
  return bytes;
}
// Multiplications and additions of reading a prompt of `tokens`: two a weight of the layers and a token (no head, no table), and what
// attention adds where every position sees all before it.
double prefill_flop(const LoadedPair& pair, int64_t tokens) {
  double weights = 0;
  for (const auto& [name, t] : pair.checkpoint->tensors())
    if (!name.starts_with("mtp.") && name.find("embed_tokens") == std::string::npos && name.find("lm_head") == std::string::npos &&
        t.shape.size() == 2)
      weights += static_cast<double>(t.elements());
  const auto attention = std::count(pair.spec.layers.begin(), pair.spec.layers.end(), LayerKind::kFullAttention);
  const auto n = static_cast<double>(tokens);
  return 2 * weights * n + 2 * static_cast<double>(attention * pair.spec.heads * pair.spec.head_dim) * n * n;
}
// Of a draft: the drafter's own and the target's head.
double draft_bytes(const LoadedPair& pair) {
  return pair.drafter ? static_cast<double>(pair.drafter->checkpoint->bytes() + pair.tensors.lm_head.bytes) : 0;
}

class Stage {
 public:
  Stage(Executor& executor, int32_t context, int32_t batch, int32_t repeat)
      : executor_(executor), context_(context), batch_(batch), repeat_(repeat) {
    const int32_t page = executor.options().page_size, each = executor.options().pages / batch;
    pages_.resize(at(batch));
    for (int32_t b = 0; b < batch; ++b)
      for (int32_t i = 0; i < std::min(each, (context + 600 + page - 1) / page); ++i) pages_[at(b)].push_back(b * each + i);
    for (int32_t b = 0; b < batch; ++b) executor.reset_slot(b);
  }

  // Runs the first sequence's prompt, in chunks as a server would. Milliseconds, after one chunk that warms up: kernels are loaded and
  // algorithms chosen at their first use. Of the others' prompts only the last chunk is run, untimed: what stands in earlier pages costs
  // the same whatever it is, and sixteen prompts of 32,768 tokens would take a minute.
  Result<double> prefill(int32_t chunk) {
    const auto run = [&](int32_t b, int32_t from) -> Status {
      Forest forest;
      add_chain(&forest, b, std::min(chunk, context_ - from), from, true, false);
      DDTREE_RETURN_IF_ERROR(executor_.forward(forest, &output_));
      return executor_.commit(forest, keep_all(forest));
    };
    DDTREE_RETURN_IF_ERROR(run(0, 0));
    DDTREE_RETURN_IF_ERROR(settle());
    executor_.reset_slot(0);
    const auto begin = Clock::now();
    for (int32_t from = 0; from < context_; from += chunk) DDTREE_RETURN_IF_ERROR(run(0, from));
    DDTREE_RETURN_IF_ERROR(settle());
    const double ms = ms_since(begin);
    for (int32_t b = 1; b < batch_; ++b) DDTREE_RETURN_IF_ERROR(run(b, std::max(context_ - chunk, 0)));
    DDTREE_RETURN_IF_ERROR(settle());
    return ms;
  }

  // One row a sequence, certain, as plain decoding runs it: always at the same position.
  Result<double> plain_step() {
    return median([&]() -> Status {
      Forest forest;
      for (int32_t b = 0; b < batch_; ++b) add_chain(&forest, b, 1, context_, true, true);
      DDTREE_RETURN_IF_ERROR(executor_.forward(forest, &output_));
      auto kept = keep_all(forest);
      for (Accepted& a : kept) a.feed_drafter = false;
      return executor_.commit(forest, kept);
    });
  }

  Result<double> draft(int32_t top_k) {
    std::vector<DraftQuery> queries;
    for (int32_t b = 0; b < batch_; ++b) queries.push_back({b, pages_[at(b)], context_, token(b, context_)});
    DraftOutput drafts;
    return median([&] { return executor_.draft(queries, top_k, &drafts); });
  }

  Result<double> verify(int32_t rows) {
    const Forest forest = trees(rows);
    return median([&] { return executor_.forward(forest, &output_); });
  }

  // Draft, verification and commit of a path of up to five rows, back to back: what a round costs beside the scheduler's own work.
  Result<double> round(int32_t rows, int32_t top_k) {
    std::vector<DraftQuery> queries;
    for (int32_t b = 0; b < batch_; ++b) queries.push_back({b, pages_[at(b)], context_, token(b, context_)});
    DraftOutput drafts;
    const Forest forest = trees(rows);
    const std::vector<Accepted> kept = paths(forest, 5);
    auto ms = median([&]() -> Status {
      if (executor_.drafter()) DDTREE_RETURN_IF_ERROR(executor_.draft(queries, top_k, &drafts));
      DDTREE_RETURN_IF_ERROR(executor_.forward(forest, &output_));
      return executor_.commit(forest, kept);
    });
    DDTREE_RETURN_IF_ERROR(settle());
    return ms;
  }

  // What a round takes of the host: its time but for what the device was busy with. Here the tree is grown from the draft, as in a server;
  // of the scheduler's work only texts and statistics are missing. On a backend that does not time its segments device_ms is 0.
  struct Host {
    double round_ms = 0, device_ms = 0, grow_ms = 0;
  };
  Result<Host> host_part(int32_t rows, int32_t top_k) {
    std::vector<DraftQuery> queries;
    for (int32_t b = 0; b < batch_; ++b) queries.push_back({b, pages_[at(b)], context_, token(b, context_)});
    DraftOutput drafts;
    Host sum;
    Clock::time_point begin;
    const int32_t warm = 1 + executor_.warm_up_runs(), count = 3 * repeat_;  // a small difference of two large means
    for (int32_t i = 0; i < warm + count; ++i) {
      if (i == warm) {
        DDTREE_RETURN_IF_ERROR(settle());
        executor_.device_ms();
        sum = Host();
        begin = Clock::now();
      }
      Forest forest;
      if (executor_.drafter()) {
        DDTREE_RETURN_IF_ERROR(executor_.draft(queries, top_k, &drafts));
        const auto grow = Clock::now();
        forest = grown(drafts, rows);
        sum.grow_ms += ms_since(grow);
      } else {
        forest = trees(rows);
      }
      DDTREE_RETURN_IF_ERROR(executor_.forward(forest, &output_));
      DDTREE_RETURN_IF_ERROR(executor_.commit(forest, paths(forest, 5)));
    }
    DDTREE_RETURN_IF_ERROR(settle());  // what the last commit enqueued; one pass more on both sides
    sum.round_ms = ms_since(begin) / count, sum.device_ms = executor_.device_ms() / count, sum.grow_ms /= count;
    return sum;
  }

  // Of the prompts' last chunk of up to `chunk` tokens.
  Result<std::vector<ops::OpTime>> prefill_op_times(int32_t chunk) {
    Forest forest;
    const int32_t rows = std::min(chunk, context_);
    // The chunks before it first: a card that has computed for a second runs at other clocks than one that has idled.
    executor_.reset_slot(0);
    for (int32_t from = 0; from + rows < context_; from += rows) {
      Forest before;
      add_chain(&before, 0, rows, from, true, false);
      DDTREE_RETURN_IF_ERROR(executor_.forward(before, &output_));
      DDTREE_RETURN_IF_ERROR(executor_.commit(before, keep_all(before)));
    }
    add_chain(&forest, 0, rows, context_ - rows, true, false);
    executor_.time_ops(true);
    DDTREE_RETURN_IF_ERROR(executor_.forward(forest, &output_));
    DDTREE_RETURN_IF_ERROR(executor_.commit(forest, keep_all(forest)));
    auto times = executor_.op_times();
    executor_.time_ops(false);
    return times;
  }

  Result<std::vector<ops::OpTime>> op_times(int32_t rows) {
    const Forest forest = trees(rows);
    DDTREE_RETURN_IF_ERROR(executor_.forward(forest, &output_));
    executor_.time_ops(true);
    DDTREE_RETURN_IF_ERROR(executor_.forward(forest, &output_));
    DDTREE_RETURN_IF_ERROR(executor_.commit(forest, paths(forest, 5)));
    auto times = executor_.op_times();
    executor_.time_ops(false);
    return times;
  }

 private:
  int32_t token(int32_t b, int32_t i) const { return (b * 1013 + i * 31 + 7) % executor_.real_vocab(); }

  void add_chain(Forest* f, int32_t b, int32_t rows, int32_t from, bool certain, bool logits) const {
    const auto first = static_cast<int32_t>(f->token.size());
    for (int32_t i = 0; i < rows; ++i) {
      f->token.push_back(token(b, from + i));
      f->position.push_back(from + i);
      f->parent.push_back(i > 0 ? first + i - 1 : -1);
      f->wants_logits.push_back(logits ? 1 : 0);
    }
    f->segments.push_back({first, rows, certain, b, pages_[at(b)], from});
  }

  // Random trees as best-first growth makes them: a node's parent is one of the last few, so that depth grows with the logarithm.
  Forest trees(int32_t rows) const {
    Forest f;
    std::mt19937 random(7);
    for (int32_t b = 0; b < batch_; ++b) {
      const auto first = static_cast<int32_t>(f.token.size());
      for (int32_t i = 0; i < rows; ++i) {
        const int32_t parent = i == 0 ? -1 : i <= 8 ? first + i - 1 : first + static_cast<int32_t>(random() % static_cast<uint32_t>(i));
        f.parent.push_back(parent);
        f.position.push_back(parent < 0 ? context_ : f.position[at(parent)] + 1);
        f.token.push_back(token(b, context_ + i));
        f.wants_logits.push_back(1);
      }
      f.segments.push_back({first, rows, false, b, pages_[at(b)], context_});
    }
    return f;
  }

  // Best-first trees of the drafts, one a sequence.
  Forest grown(const DraftOutput& drafts, int32_t rows) const {
    Forest f;
    const size_t each = at(drafts.positions) * at(drafts.top_k);
    for (int32_t b = 0; b < batch_; ++b) {
      const Candidates candidates{drafts.positions, drafts.top_k, std::span(drafts.token).subspan(at(b) * each, each),
                                  std::span(drafts.log_prob).subspan(at(b) * each, each)};
      const DraftTree tree = grow_tree(token(b, context_), candidates, {.budget = rows - 1});
      const auto first = static_cast<int32_t>(f.token.size());
      for (int32_t i = 0; i < tree.size(); ++i) {
        f.token.push_back(tree.token[at(i)]);
        f.position.push_back(context_ + tree.depth[at(i)]);
        f.parent.push_back(i > 0 ? first + tree.parent[at(i)] : -1);
        f.wants_logits.push_back(1);
      }
      f.segments.push_back({first, tree.size(), false, b, pages_[at(b)], context_});
    }
    return f;
  }

  std::vector<Accepted> keep_all(const Forest& f) const {
    std::vector<Accepted> out;
    for (size_t s = 0; s < f.segments.size(); ++s) {
      Accepted a;
      a.segment = static_cast<int32_t>(s);
      for (int32_t i = 0; i < f.segments[s].row_count; ++i) {
        const int32_t row = f.segments[s].first_row + i;
        a.rows.push_back(row);
        a.next.push_back(token(f.segments[s].slot, f.position[at(row)] + 1));
      }
      a.feed_drafter = executor_.drafter() != nullptr;
      out.push_back(std::move(a));
    }
    return out;
  }

  std::vector<Accepted> paths(const Forest& f, int32_t length) const {
    std::vector<Accepted> out;
    for (size_t s = 0; s < f.segments.size(); ++s) {
      Accepted a;
      a.segment = static_cast<int32_t>(s);
      const Segment& of = f.segments[s];
      // Down the first children, as far as there are some.
      for (int32_t row = of.first_row; row < of.first_row + of.row_count && static_cast<int32_t>(a.rows.size()) < length; ++row) {
        if (f.parent[at(row)] != (a.rows.empty() ? -1 : a.rows.back())) continue;
        a.rows.push_back(row);
        a.next.push_back(token(of.slot, context_ + static_cast<int32_t>(a.rows.size())));
      }
      a.feed_drafter = executor_.drafter() != nullptr;
      out.push_back(std::move(a));
    }
    return out;
  }

  // Waits for what commit() enqueued.
  Status settle() {
    Forest forest;
    add_chain(&forest, 0, 1, context_, false, true);
    return executor_.forward(forest, &output_);
  }

  template <class F>
  Result<double> median(F&& body) {
    std::vector<double> times;
    const int32_t warm = 1 + executor_.warm_up_runs();
    for (int32_t i = 0; i < warm + repeat_; ++i) {
      const auto begin = Clock::now();
      const Status status = body();
      if (!status.ok()) return status;
      if (i >= warm) times.push_back(ms_since(begin));
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  Executor& executor_;
  int32_t context_, batch_, repeat_;
  std::vector<std::vector<int32_t>> pages_;
  PassOutput output_;
};

}  // namespace

Status bench_stages(const ServiceOptions& service, const StageOptions& o, Json* json) {
  const std::string path = service.model_path.empty() ? std::string(kEmbeddedPair) : service.model_path;
  auto pair = service.model_config.empty()
                  ? load_pair(path, service.draft_path.empty() ? std::nullopt : std::optional<std::string>(service.draft_path))
                  : load_dummy_pair(service.model_config, service.draft_config, path);
  if (!pair) return pair.status();
  const int32_t longest = *std::max_element(o.contexts.begin(), o.contexts.end()),
                widest = *std::max_element(o.batches.begin(), o.batches.end()), most = *std::max_element(o.rows.begin(), o.rows.end());
  const int32_t chunk = std::max(service.engine.prefill_chunk, service.engine.lone_chunk);  // --chunked-prefill-size; nobody decodes
  ExecutorOptions options;
  options.page_size = service.page_size;
  options.slots = widest;
  options.pages = widest * ((longest + 600 + options.page_size - 1) / options.page_size);
  options.max_rows = std::max(chunk, widest * most);
  options.max_logit_rows = options.max_tentative_rows = widest * most;
  options.threads = service.threads;
  options.tp_size = service.tp_size;
  options.graphs = !service.no_graphs;
  const auto load_begin = Clock::now();
  auto made = service.cuda_device < 0 ? make_cpu_executor(*pair, options) : make_cuda_executor(*pair, options, service.cuda_device);
  if (!made) return made.status();
  Executor& executor = **made;
  const double load_ms = ms_since(load_begin), weights = target_bytes(*pair), drafts = draft_bytes(*pair);

  double bandwidth = 0, product_rate = 0;
  if (service.cuda_device >= 0) {
    auto rates = executor.measure_rates();
    if (!rates) return rates.status();
    bandwidth = rates->read_bytes_per_second, product_rate = rates->bf16_flop_per_second;
  }
  const auto floor_ms = [&](double bytes) { return bandwidth > 0 ? bytes / bandwidth * 1e3 : 0; };
  const auto ratio = [&](double ms, double bytes) {
    return bandwidth > 0 ? fmt::format("{:.2f}", ms / floor_ms(bytes)) : std::string("-");
  };
  const std::string what = describe(*pair);
  if (json) {
    *json = {{"model", pair->name},
             {"description", what},
             {"target_bytes", weights},
             {"draft_bytes", drafts},
             {"read_bytes_per_second", bandwidth},
             {"bf16_flop_per_second", product_rate},
             {"load_ms", load_ms},
             {"stages", Json::array()}};
  } else {
    fmt::print("{}: {}\nloaded in {:.1f} s; a pass reads {:.2f} GB, a draft {:.2f} GB", pair->location, what, load_ms / 1e3, weights / 1e9,
               drafts / 1e9);
    if (bandwidth > 0)
      fmt::print("; reading at {:.0f} GB/s: {:.2f} ms and {:.2f} ms at the least", bandwidth / 1e9, floor_ms(weights), floor_ms(drafts));
    if (product_rate > 0) fmt::print("; BF16 products at {:.0f} TFLOP/s", product_rate / 1e12);
    fmt::print("\n");
  }
  const int32_t top_k = service.engine.top_k;
  for (int32_t context : o.contexts)
    for (int32_t batch : o.batches) {
      Stage stage(executor, context, batch, o.repeat);
      if (isatty(STDERR_FILENO)) fmt::print(stderr, "\r\033[Kcontext {}, batch {}", context, batch), std::fflush(stderr);
      auto prefill = stage.prefill(chunk);
      if (!prefill) return prefill.status();
      const double prefill_floor = product_rate > 0 ? prefill_flop(*pair, context) / product_rate * 1e3 : 0;
      auto plain = stage.plain_step();
      if (!plain) return plain.status();
      double draft = 0;
      if (executor.drafter()) {
        auto ms = stage.draft(top_k);
        if (!ms) return ms.status();
        draft = *ms;
      }
      if (isatty(STDERR_FILENO)) fmt::print(stderr, "\r\033[K");
      Json list = Json::array();
      struct Measured {
        double verify = 0, round = 0;
        Stage::Host host;
      };
      std::vector<Measured> measured;
      for (int32_t rows : o.rows) {
        auto verify = stage.verify(rows);
        if (!verify) return verify.status();
        auto round = stage.round(rows, top_k);
        if (!round) return round.status();
        measured.push_back({*verify, *round, {}});
      }
      executor.time_device(true);
      for (size_t i = 0; i < o.rows.size(); ++i) {
        auto host = stage.host_part(o.rows[i], top_k);
        if (!host) return host.status();
        measured[i].host = *host;
      }
      executor.time_device(false);
      const bool times_device = measured.front().host.device_ms > 0;
      if (!json)
        fmt::print(
            "\ncontext {}, batch {}: prefill {:.0f} tok/s{}\n  {:<10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n  {:<10} {:>9.2f} {:>9}\n  "
            "{:<10} {:>9.2f} {:>9}\n",
            context, batch, 1e3 * context / *prefill,
            prefill_floor > 0 ? fmt::format(", {:.2f} of the time of its products at that rate", *prefill / prefill_floor) : "", "", "ms",
            "/ floor", "round ms", "/ floor", "host ms", "grow ms", "plain step", *plain, ratio(*plain, weights), "draft", draft,
            draft > 0 ? ratio(draft, drafts) : "-");
      for (size_t i = 0; i < o.rows.size(); ++i) {
        const Measured& m = measured[i];
        const double host_ms = m.host.round_ms - m.host.device_ms;
        if (!json)
          fmt::print("  {:<10} {:>9.2f} {:>9} {:>9.2f} {:>9} {:>9} {:>9.3f}\n", fmt::format("{} rows", o.rows[i]), m.verify,
                     ratio(m.verify, weights), m.round, ratio(m.round, weights + drafts),
                     times_device ? fmt::format("{:.3f}", host_ms) : "-", m.host.grow_ms);
        list.push_back({{"rows", o.rows[i]},
                        {"verify_ms", m.verify},
                        {"round_ms", m.round},
                        {"device_ms", times_device ? Json(m.host.device_ms) : Json(nullptr)},
                        {"host_ms", times_device ? Json(host_ms) : Json(nullptr)},
                        {"grow_ms", m.host.grow_ms}});
      }
      Json timed = Json::array();
      if (o.ops)
        for (int32_t rows : {0, o.rows.front(), o.rows[o.rows.size() / 2], o.rows.back()}) {  // 0: a chunk of the prompt
          auto times = rows == 0 ? stage.prefill_op_times(chunk) : stage.op_times(rows);
          if (!times) return times.status();
          if (times->empty()) break;  // this backend times no ops
          double sum = 0;
          for (const auto& t : *times) sum += t.ms;
          if (!json)
            fmt::print(
                "  ops of {} and its commit, each by itself: {:.2f} ms\n",
                rows == 0 ? fmt::format("the prompt's last {} tokens", std::min(chunk, context)) : fmt::format("a pass of {} rows", rows),
                sum);
          for (const auto& t : *times) {
            if (!json)
              fmt::print("    {:<22} {:>5} × {:>8.1f} µs = {:>8.3f} ms\n", t.op, t.calls, t.ms * 1e3 / static_cast<double>(t.calls), t.ms);
            timed.push_back({{"of", rows == 0 ? "prefill" : "verify"},
                             {"rows", rows == 0 ? std::min(chunk, context) : rows},
                             {"op", t.op},
                             {"calls", t.calls},
                             {"ms", t.ms}});
          }
        }
      if (json)
        (*json)["stages"].push_back({{"context", context},
                                     {"batch", batch},
                                     {"prefill_tokens_per_second", 1e3 * context / *prefill},
                                     {"prefill_ms", *prefill},
                                     {"prefill_floor_ms", prefill_floor},
                                     {"plain_ms", *plain},
                                     {"draft_ms", draft},
                                     {"trees", std::move(list)},
                                     {"ops", std::move(timed)}});
    }
  return {};
}

}  // namespace ddtree::cli
