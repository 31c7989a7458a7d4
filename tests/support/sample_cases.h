// Random passes for the tests of sample_rows: trees of every kind with rules of every kind, and logits of every shape.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/sample_rows.h"
#include "support/op_values.h"

namespace ddtree::testing {

enum class LogitKind { kNormal, kFlat, kPeaked, kSteps, kEqual };

inline void fill_logits(LogitKind kind, Random* random, float* row, int64_t real) {
  for (int64_t i = 0; i < real; ++i) {
    switch (kind) {
      case LogitKind::kNormal: row[i] = random->normal(3.0f); break;
      case LogitKind::kFlat: row[i] = 7 + random->normal(0.02f); break;
      case LogitKind::kPeaked: row[i] = random->normal(4.0f) - 20; break;
      case LogitKind::kSteps: row[i] = std::round(random->normal(2.0f) * 8) / 8; break;  // many equals
      case LogitKind::kEqual: row[i] = -1.5f; break;
    }
  }
  if (kind == LogitKind::kPeaked)  // a few above all others
    for (int n = 1 + random->below(12); n > 0; --n) row[random->below(real)] = random->normal(2.0f);
}

// Filters, temperature, noise, penalties: each on in about half of the cases.
inline ops::SampleParams random_params(Random* random, int64_t real) {
  ops::SampleParams p;
  const auto maybe = [&] { return random->below(2) == 0; };
  constexpr float kTemperatures[] = {0, 0.01f, 0.1f, 0.6f, 0.7f, 0.8f, 1, 1, 1.3f, 2};
  p.temperature = kTemperatures[random->below(10)];
  const int32_t ks[] = {1, 2, 20, 40, 64, 100, 1000, random->below(real) + 1, static_cast<int32_t>(real) - 1, static_cast<int32_t>(real)};
  if (maybe()) p.top_k = ks[random->below(10)];
  constexpr float kPs[] = {1e-6f, 0.1f, 0.5f, 0.8f, 0.9f, 0.95f, 0.95f, 0.99f, 0.9999f, 0.999999f};
  if (maybe()) p.top_p = kPs[random->below(10)];
  constexpr float kMins[] = {1e-5f, 0.01f, 0.05f, 0.1f, 0.5f, 1};
  if (random->below(3) == 0) p.min_p = kMins[random->below(6)];
  if (random->below(3) == 0) p.presence_penalty = 1.5f - 0.5f * static_cast<float>(random->below(5));
  if (random->below(3) == 0) p.frequency_penalty = 0.7f - 0.3f * static_cast<float>(random->below(4));
  if (random->below(3) == 0) p.repetition_penalty = 0.8f + 0.1f * static_cast<float>(random->below(6));
  p.seed = random->bits();
  p.choice = static_cast<uint32_t>(random->below(3));
  return p;
}

// A pass on the host: what ops::Forest and the rules point into.
struct SamplePass {
  std::vector<ops::ForestSegment> segment;
  std::vector<int32_t> segment_of, token, position, parent, lists;
  std::vector<ops::SampleRule> rule;
  std::vector<ops::TokenHistory> history;    // [segments]
  std::vector<std::vector<int32_t>> banned;  // [segments]

  int32_t rows() const { return static_cast<int32_t>(token.size()); }

  // A random tree of `count` rows. Its tokens and histories come from few ids, so that they meet; `likely`: ids of large logits, some of
  // which are banned or seen.
  void add(Random* random, int32_t count, int64_t real, const ops::SampleParams& params, const std::vector<int32_t>& likely) {
    const auto s = static_cast<int32_t>(segment.size());
    const int32_t context = 5 + random->below(3000);
    const auto id = [&] {
      return random->below(3) == 0 ? random->below(real) : likely[static_cast<size_t>(random->below(static_cast<int64_t>(likely.size())))];
    };
    segment.push_back({.first_row = rows(), .row_count = count, .slot = s, .context = context});
    for (int32_t i = 0; i < count; ++i) {
      const int32_t up = i == 0 ? -1 : segment[static_cast<size_t>(s)].first_row + (random->below(3) == 0 ? random->below(i) : i - 1);
      segment_of.push_back(s);
      parent.push_back(up);
      position.push_back(up < 0 ? context : position[static_cast<size_t>(up)] + 1);
      token.push_back(id());
    }
    ops::SampleRule r;
    r.params = params;
    r.history_end = context + 1;  // the root is an anchor: the history has it
    ops::TokenHistory h;
    if (params.penalised()) {
      for (int n = random->below(40); n > 0; --n) h.prompt.insert(id());
      for (int n = random->below(40); n > 0; --n) ++h.generated[id()];
      r.first_seen = static_cast<int32_t>(lists.size());
      for (const auto& [t, times] : h.generated) lists.push_back(t), lists.push_back(times), ++r.seen;
      for (const int32_t t : h.prompt)
        if (!h.generated.contains(t)) lists.push_back(t), lists.push_back(0), ++r.seen;
    }
    std::vector<int32_t> ban;
    if (random->below(3) == 0)
      for (int n = 1 + random->below(4); n > 0; --n) ban.push_back(id());
    r.first_banned = static_cast<int32_t>(lists.size()), r.banned = static_cast<int32_t>(ban.size());
    r.banned_end = context + 1 + random->below(4);
    lists.insert(lists.end(), ban.begin(), ban.end());
    rule.push_back(r);
    history.push_back(std::move(h));
    banned.push_back(std::move(ban));
  }

  ops::Forest view() const {
    ops::Forest f{.rows = rows(), .segments = static_cast<int32_t>(segment.size())};
    f.segment = segment.data(), f.segment_of = segment_of.data(), f.token = token.data(), f.position = position.data();
    f.parent = parent.data(), f.pages = lists.data();
    return f;
  }

  // What plain decoding would choose there: ops::sample with the row's own path.
  ops::Sampled expected(int32_t row, std::span<const float> logits) const {
    const auto s = static_cast<size_t>(segment_of[static_cast<size_t>(row)]);
    std::vector<int32_t> path;
    for (int32_t r = row; parent[static_cast<size_t>(r)] >= 0; r = parent[static_cast<size_t>(r)])
      path.insert(path.begin(), token[static_cast<size_t>(r)]);
    const int32_t at = position[static_cast<size_t>(row)] + 1;
    ops::SampleScratch scratch;
    const std::vector<int32_t> none;
    return ops::sample(logits, rule[s].params, &history[s], path, at < rule[s].banned_end ? banned[s] : none, at, scratch);
  }
};

// The ids of the `count` largest logits.
inline std::vector<int32_t> largest(const float* row, int64_t real, int32_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(real));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  const auto n = std::min<std::ptrdiff_t>(count, static_cast<std::ptrdiff_t>(real));
  std::partial_sort(ids.begin(), ids.begin() + n, ids.end(), [&](int32_t a, int32_t b) { return row[a] > row[b]; });
  ids.resize(static_cast<size_t>(n));
  return ids;
}

}  // namespace ddtree::testing
