#include "ops/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ddtree::ops {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
// Filters decide "by a hair" where a rounding of this relative size turns them. Larger than float32 noise of a whole forward pass.
constexpr double kHair = 1e-3;
constexpr float kNoRival = 1000;  // margin where nothing else could be chosen

size_t at(int64_t i) { return static_cast<size_t>(i); }

std::array<uint32_t, 4> words(uint64_t seed, uint32_t choice, int64_t position, int32_t block) {
  const uint64_t p = static_cast<uint64_t>(position);
  return philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32), choice},
                    {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

double gumbel_of(uint32_t word) { return -std::log(-std::log((static_cast<double>(word) + 0.5) * 0x1p-32)); }

void penalise(std::span<float> logits, const SampleParams& params, const TokenHistory& history, std::span<const int32_t> path) {
  const auto repeat = [&](int32_t id) {
    float& x = logits[at(id)];
    x = x > 0 ? x / params.repetition_penalty : x * params.repetition_penalty;
  };
  // Tokens of the path are few; the first time one comes, all its times on the path are counted.
  const auto times_on_path = [&](int32_t id) { return static_cast<int32_t>(std::count(path.begin(), path.end(), id)); };
  const auto charge = [&](int32_t id, int32_t times) {
    logits[at(id)] -= params.frequency_penalty * static_cast<float>(times);
    logits[at(id)] -= params.presence_penalty;
  };
  const auto known = [&](int32_t id) { return id >= 0 && at(id) < logits.size() && logits[at(id)] != kMinusInf; };
  if (params.repetition_penalty != 1) {
    for (int32_t id : history.prompt)
      if (known(id)) repeat(id);
    for (const auto& [id, times] : history.generated)
      if (times > 0 && known(id) && !history.prompt.contains(id)) repeat(id);
    for (size_t i = 0; i < path.size(); ++i) {
      const int32_t id = path[i];
      const auto g = history.generated.find(id);
      const bool seen =
          history.prompt.contains(id) || (g != history.generated.end() && g->second > 0) ||
          std::find(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(i), id) != path.begin() + static_cast<std::ptrdiff_t>(i);
      if (!seen && known(id)) repeat(id);
    }
  }
  if (params.frequency_penalty != 0 || params.presence_penalty != 0) {
    for (const auto& [id, times] : history.generated)
      if (times > 0 && known(id)) charge(id, times + times_on_path(id));
    for (size_t i = 0; i < path.size(); ++i) {
      const int32_t id = path[i];
      const auto g = history.generated.find(id);
      const bool first =
          std::find(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(i), id) == path.begin() + static_cast<std::ptrdiff_t>(i);
      if (first && (g == history.generated.end() || g->second <= 0) && known(id)) charge(id, times_on_path(id));
    }
  }
}

Sampled greedy(std::span<const float> logits) {
  float best = kMinusInf, second = kMinusInf;
  int32_t token = -1;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > best) {
      second = best;
      best = logits[i];
      token = static_cast<int32_t>(i);
    } else if (logits[i] > second) {
      second = logits[i];
    }
  }
  return {token, std::min(best - second, kNoRival)};
}

void sort_falling(std::vector<int32_t>& ids, std::span<const float> logits) {
  std::sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    const float x = logits[at(a)], y = logits[at(b)];
    return x != y ? x > y : a < b;
  });
}

// The k largest (ties: smaller ids) and a few more, which tell how close the edge is; largest first.
void select_top(std::span<const float> logits, size_t k, std::vector<int32_t>& ids) {
  ids.clear();
  const size_t want = std::min(k + 8, logits.size());
  const auto better = [&](int32_t a, int32_t b) {
    const float x = logits[at(a)], y = logits[at(b)];
    return x != y ? x > y : a < b;
  };
  if (want <= 128) {  // a heap whose front is the worst of the best: most ids fail one comparison
    for (size_t i = 0; i < logits.size(); ++i) {
      const int32_t id = static_cast<int32_t>(i);
      if (ids.size() < want) {
        if (logits[i] == kMinusInf) continue;
        ids.push_back(id);
        std::push_heap(ids.begin(), ids.end(), better);
      } else if (logits[i] > logits[at(ids.front())]) {
        std::pop_heap(ids.begin(), ids.end(), better);
        ids.back() = id;
        std::push_heap(ids.begin(), ids.end(), better);
      }
    }
  } else {
    for (size_t i = 0; i < logits.size(); ++i)
      if (logits[i] != kMinusInf) ids.push_back(static_cast<int32_t>(i));
    if (ids.size() > want) {
      std::nth_element(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(want), ids.end(), better);
      ids.resize(want);
    }
  }
  sort_falling(ids, logits);
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b), static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1],
         static_cast<uint32_t>(a)};
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return c;
}

double gumbel(uint64_t seed, uint32_t choice, int64_t position, int32_t id) {
  return gumbel_of(words(seed, choice, position, id / 4)[at(id % 4)]);
}

Sampled sample(std::span<const float> logits, const SampleParams& params, const TokenHistory* history, std::span<const int32_t> path,
               std::span<const int32_t> banned, int64_t position, SampleScratch& scratch) {
  if ((params.penalised() && history != nullptr) || !banned.empty()) {
    scratch.logits.assign(logits.begin(), logits.end());
    if (params.penalised() && history != nullptr) penalise(scratch.logits, params, *history, path);
    for (int32_t id : banned)
      if (id >= 0 && at(id) < scratch.logits.size()) scratch.logits[at(id)] = kMinusInf;
    logits = scratch.logits;
  }
  if (params.temperature <= 0) return greedy(logits);

  const double inverse = 1.0 / static_cast<double>(params.temperature);
  const bool top_k = params.top_k > 0 && at(params.top_k) < logits.size();
  const bool top_p = params.top_p<1, min_p = params.min_p> 0;
  std::vector<int32_t>& ids = scratch.ids;
  std::vector<double>& values = scratch.values;

  // Candidates, largest first where a filter needs the order: the `kept` first of them are in, of these all from `certain` on only by a
  // hair.
  size_t kept, certain, reach;
  if (top_k) {
    select_top(logits, at(params.top_k), ids);
  } else {
    float largest = kMinusInf;
    for (float x : logits) largest = std::max(largest, x);
    // Ids that no filter can keep need no sorting: those that together weigh less than 1 - top_p, or that min_p drops by far.
    double floor = -std::numeric_limits<double>::infinity();
    if (top_p) floor = std::log(std::max(1.0 - static_cast<double>(params.top_p), 1e-12) / static_cast<double>(logits.size())) - 1;
    if (min_p) floor = std::max(floor, std::log(static_cast<double>(params.min_p)) - 1);
    // Relative to the largest, the sum is at least 1 and at most vocab, so a threshold on exp(value - largest) of (1 - top_p) / vocab is
    // safe.
    ids.clear();
    for (size_t i = 0; i < logits.size(); ++i)
      if (logits[i] != kMinusInf && (static_cast<double>(logits[i]) - static_cast<double>(largest)) * inverse >= floor)
        ids.push_back(static_cast<int32_t>(i));
    if (top_p || min_p) sort_falling(ids, logits);
  }
  values.clear();
  for (int32_t id : ids) values.push_back(static_cast<double>(logits[at(id)]) * inverse);
  kept = certain = reach = values.size();
  if (top_k && kept > at(params.top_k)) {
    kept = certain = reach = at(params.top_k);
    const double edge = values[kept - 1];
    while (certain > 0 && values[certain - 1] - values[kept] < kHair * inverse) --certain;
    while (reach < values.size() && edge - values[reach] < kHair * inverse) ++reach;
  }
  if (top_p) {
    double total = 0;
    if (top_k) {
      for (size_t i = 0; i < kept; ++i) total += std::exp(values[i] - values[0]);
    } else {
      for (float x : logits)
        if (x != kMinusInf) total += std::exp(static_cast<double>(x) * inverse - values[0]);
    }
    const double goal = static_cast<double>(params.top_p) * total, hair = kHair * total;
    double sum = 0;
    size_t in = 0, sure = 0, maybe = 0;
    for (size_t i = 0; i < reach && sum < goal + hair; ++i) {
      if (sum < goal) in = i + 1;
      if (sum < goal - hair) sure = i + 1;
      maybe = i + 1;
      sum += std::exp(values[i] - values[0]);
    }
    kept = std::min(kept, std::max<size_t>(in, 1));
    certain = std::min(certain, std::max<size_t>(sure, 1));
    reach = std::max(maybe, kept);
    // Equals at the edge may change places.
    while (certain > 0 && kept < values.size() && values[certain - 1] - values[kept] < kHair * inverse) --certain;
    while (reach < values.size() && values[kept - 1] - values[reach] < kHair * inverse) ++reach;
  }
  if (min_p) {
    const double floor = values[0] + std::log(static_cast<double>(params.min_p)), hair = kHair * inverse;
    while (kept > 1 && values[kept - 1] < floor) --kept;
    certain = std::min(certain, kept);
    while (certain > 1 && values[certain - 1] < floor + hair) --certain;
    while (reach > kept && values[reach - 1] < floor - hair) --reach;
  }

  constexpr double kNone = -std::numeric_limits<double>::infinity();
  double best = kNone, second = kNone;
  size_t winner = 0;
  std::array<uint32_t, 4> w{};
  int32_t block = -1;
  const auto score = [&](size_t i) {
    if (ids[i] / 4 != block) w = words(params.seed, params.choice, position, block = ids[i] / 4);
    return values[i] + gumbel_of(w[at(ids[i] % 4)]);
  };
  for (size_t i = 0; i < kept; ++i) {
    const double s = score(i);
    if (s > best || (s == best && ids[i] < ids[winner])) {
      second = best;
      best = s;
      winner = i;
    } else {
      second = std::max(second, s);
    }
  }
  double margin = best - second;
  if (winner >= certain) margin = 0;
  for (size_t i = kept; i < reach; ++i) margin = std::min(margin, std::max(best - score(i), 0.0));
  return {ids[winner], std::min(static_cast<float>(margin * static_cast<double>(params.temperature)), kNoRival)};
}

}  // namespace ddtree::ops
