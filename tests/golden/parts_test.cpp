// The drafter alone and the MTP head alone against tests/data/golden/parts.*: a wrong drafter or wrong MTP norms still give the right text,
// only slower, so text cannot prove them.
#include <catch2/catch_test_macros.hpp>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "golden/recorded.h"
#include "model/pair.h"
#include "nn/pair_executor.h"
#include "ops/cpu/cpu_backend.h"

namespace ddtree {
namespace {

constexpr double kTolerance = 1e-4;

const LoadedPair& pair() {
  static const auto p = [] {
    auto loaded = load_pair("tiny");
    INFO(loaded.status().message());
    REQUIRE(loaded.ok());
    return std::make_unique<LoadedPair>(std::move(*loaded));
  }();
  return *p;
}

nlohmann::json parts() {
  std::ifstream file(std::string(DDTREE_SOURCE_DIR) + "/tests/data/golden/parts.json");
  REQUIRE(file.good());
  return nlohmann::json::parse(file);
}

nlohmann::json prompt(int number) {
  std::ifstream file(std::string(DDTREE_SOURCE_DIR) + "/tests/data/golden/golden.jsonl");
  std::string line;
  for (int i = 0; i <= number; ++i) std::getline(file, line);
  REQUIRE(!line.empty());
  return nlohmann::json::parse(line);
}

std::unique_ptr<nn::PairExecutor> make() {
  ExecutorOptions options;
  options.pages = 32;
  options.slots = 8;
  options.max_rows = 100;  // contexts of 300 rows take several feeds
  auto executor = nn::PairExecutor::create(std::make_unique<ops::cpu::CpuBackend>(ops::cpu::CpuOptions{.threads = 2}), pair(), options,
                                           nn::Probe{.captures = {}, .all_mtp_rows = true});
  INFO(executor.status().message());
  REQUIRE(executor.ok());
  return std::move(*executor);
}

int32_t argmax(nn::PairExecutor* executor, const float* hidden) {
  // The tied head: logits against the embedding, in float64.
  const TensorView& head = pair().tensors.lm_head;
  const int64_t vocab = head.shape[0], width = head.shape[1];
  std::vector<float> row(width);
  int32_t best = -1;
  double top = -INFINITY;
  for (int32_t id = 0; id < executor->real_vocab() && id < vocab; ++id) {
    to_float32(head, id * width, width, row.data());
    double sum = 0.0;
    for (int64_t i = 0; i < width; ++i) sum += static_cast<double>(row[i]) * hidden[i];
    if (sum > top) {
      top = sum;
      best = id;
    }
  }
  return best;
}

TEST_CASE("parts: the drafter behind eight context lengths", "[golden]") {
  const auto executor = make();
  const test::Recorded recorded("parts.safetensors");
  const nlohmann::json about = parts();
  const int64_t hidden = executor->target().hidden_size;
  const auto block = static_cast<int32_t>(executor->drafter()->block_size);
  REQUIRE(about["drafter"].size() == 8);
  for (const auto& one : about["drafter"]) {
    const int32_t length = one["context"], anchor = one["anchor"];
    CAPTURE(length);
    // Scattered pages, so that a page table read wrongly shows.
    std::vector<int32_t> pages;
    for (int32_t i = 0; i * 32 < length; ++i) pages.push_back((i * 7 + 3) % 32);
    const std::string name = "drafter." + std::to_string(length);
    const Status fed = executor->feed_features(pages, 0, recorded.floats(name + ".features"));
    INFO(fed.message());
    REQUIRE(fed.ok());
    const DraftQuery query{.slot = 0, .pages = pages, .context = length, .anchor = anchor};
    DraftOutput out;
    const Status drafted = executor->draft(std::vector{query}, 5, &out);
    INFO(drafted.message());
    REQUIRE(drafted.ok());
    REQUIRE(out.positions == block - 1);
    const std::vector<float> want = recorded.floats(name + ".hidden");
    const std::vector<int32_t> best = one["argmax"];
    for (int32_t r = 0; r < block; ++r) {
      const double error = test::relative_error(executor->drafter_hidden().f32(r), want.data() + r * hidden, hidden);
      INFO("row " << r << " error " << error);
      CHECK(error <= kTolerance);
      CHECK(argmax(executor.get(), executor->drafter_hidden().f32(r)) == best[r]);
      if (r > 0) CHECK(out.token[(r - 1) * 5] == best[r]);
    }
  }
}

TEST_CASE("parts: drafts of several queries are those of each alone, bit for bit", "[golden]") {
  const auto executor = make();
  const test::Recorded recorded("parts.safetensors");
  const std::vector<int32_t> lengths{1, 15, 100, 127};
  std::vector<std::vector<int32_t>> tables;
  std::vector<DraftQuery> queries;
  int32_t next = 0;
  for (const int32_t length : lengths) {
    std::vector<int32_t> pages((length + 31) / 32);
    for (int32_t& p : pages) p = next++;
    tables.push_back(pages);
    REQUIRE(executor->feed_features(tables.back(), 0, recorded.floats("drafter." + std::to_string(length) + ".features")).ok());
  }
  for (size_t i = 0; i < lengths.size(); ++i)
    queries.push_back({.slot = 0, .pages = tables[i], .context = lengths[i], .anchor = 100 + lengths[i]});
  DraftOutput all;
  REQUIRE(executor->draft(queries, 16, &all).ok());
  for (size_t i = 0; i < queries.size(); ++i) {
    DraftOutput one;
    REQUIRE(executor->draft(std::span(queries).subspan(i, 1), 16, &one).ok());
    CHECK(std::equal(one.token.begin(), one.token.end(), all.token.begin() + i * one.token.size()));
    CHECK(std::equal(one.log_prob.begin(), one.log_prob.end(), all.log_prob.begin() + i * one.log_prob.size()));
  }
}

// Prompt and answer as certain chunks of `chunk` tokens, fed to the MTP head on the way.
void check_mtp(int32_t chunk) {
  const auto executor = make();
  const test::Recorded recorded("parts.safetensors");
  const nlohmann::json about = parts()["mtp"];
  const nlohmann::json line = prompt(about["prompt"]);
  std::vector<int32_t> tokens = line["prompt_ids"];
  for (const int32_t id : line["greedy_ids"].get<std::vector<int32_t>>()) tokens.push_back(id);
  const std::vector<float> want = recorded.floats("mtp.hidden");
  const std::vector<int32_t> best = about["argmax"];
  const int64_t hidden = executor->target().hidden_size;
  const auto rows = static_cast<int32_t>(tokens.size()) - 1;
  REQUIRE(static_cast<size_t>(rows) == best.size());
  std::vector<int32_t> pages(8);
  std::iota(pages.begin(), pages.end(), 4);
  executor->reset_slot(2);
  for (int32_t at = 0; at < rows; at += chunk) {
    const int32_t count = std::min(chunk, rows - at);
    Forest forest;
    forest.segments.push_back({0, count, true, 2, pages, at});
    Accepted accepted;
    accepted.feed_mtp = true;
    for (int32_t i = 0; i < count; ++i) {
      forest.token.push_back(tokens[at + i]);
      forest.position.push_back(at + i);
      forest.parent.push_back(i - 1);
      forest.wants_logits.push_back(0);
      accepted.rows.push_back(i);
      accepted.next.push_back(tokens[at + i + 1]);
    }
    PassOutput out;
    REQUIRE(executor->forward(forest, &out).ok());
    const Status committed = executor->commit(forest, std::vector{accepted});
    INFO(committed.message());
    REQUIRE(committed.ok());
    for (int32_t i = 0; i < count; ++i) {
      const float* got = executor->mtp_output().f32(i);
      const double error = test::relative_error(got, want.data() + (at + i) * hidden, hidden);
      INFO("row " << at + i << " error " << error);
      CHECK(error <= kTolerance);
      CHECK(argmax(executor.get(), got) == best[at + i]);
    }
    // The first NEXTN draft is the head's own argmax at the last committed row.
    DraftOutput draft;
    const DraftQuery query{.slot = 2, .pages = pages, .context = at + count, .anchor = tokens[at + count]};
    const Status drafted = executor->draft_nextn(std::vector{query}, 3, &draft);
    INFO(drafted.message());
    REQUIRE(drafted.ok());
    CHECK(draft.token[0] == best[at + count - 1]);
  }
}

TEST_CASE("parts: the MTP head over a prompt and its answer", "[golden]") {
  for (const int32_t chunk : {100, 31}) {
    CAPTURE(chunk);
    check_mtp(chunk);
  }
}

// Recursive drafts along known answers: three greedy drafts a round, the accepted tokens committed with their true hidden states.
TEST_CASE("parts: recursive MTP drafts are right as often as recorded, in every round", "[golden]") {
  const auto executor = make();
  const nlohmann::json about = parts();
  for (int number = 0; number < 12; ++number) {
    CAPTURE(number);
    const nlohmann::json line = prompt(number);
    std::vector<int32_t> tokens = line["prompt_ids"];
    auto at = static_cast<int32_t>(tokens.size());
    for (const int32_t id : line["greedy_ids"].get<std::vector<int32_t>>()) tokens.push_back(id);
    const auto end = static_cast<int32_t>(tokens.size());
    std::vector<int32_t> pages(end / 32 + 1), emitted;
    std::iota(pages.begin(), pages.end(), 0);
    executor->reset_slot(5);
    int32_t done = 0;
    // Runs positions [done, upto) and feeds the head: the prompt as certain rows, the answer as tentative chains.
    const auto advance = [&](int32_t upto, bool certain) {
      while (done < upto) {
        const int32_t count = std::min(upto - done, 100);
        Forest forest;
        forest.segments.push_back({0, count, certain, 5, pages, done});
        Accepted accepted;
        accepted.feed_mtp = true;
        for (int32_t i = 0; i < count; ++i) {
          forest.token.push_back(tokens[done + i]);
          forest.position.push_back(done + i);
          forest.parent.push_back(i - 1);
          forest.wants_logits.push_back(0);
          accepted.rows.push_back(i);
          accepted.next.push_back(tokens[done + i + 1]);
        }
        PassOutput out;
        REQUIRE(executor->forward(forest, &out).ok());
        REQUIRE(executor->commit(forest, std::vector{accepted}).ok());
        done += count;
      }
    };
    advance(at, true);
    while (at < end - 1) {
      DraftOutput draft;
      const DraftQuery query{.slot = 5, .pages = pages, .context = at, .anchor = tokens[at]};
      REQUIRE(executor->draft_nextn(std::vector{query}, 3, &draft).ok());
      int32_t matched = 0;
      while (matched < 3 && at + 1 + matched < end && draft.token[matched] == tokens[at + 1 + matched]) ++matched;
      emitted.push_back(std::min(matched + 1, end - 1 - at));
      at += emitted.back();
      if (at < end - 1) advance(at, false);
    }
    CHECK(emitted == about["nextn"][number].get<std::vector<int32_t>>());
  }
}

}  // namespace
}  // namespace ddtree
