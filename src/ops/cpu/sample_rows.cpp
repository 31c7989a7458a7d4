// sample_rows by the sampler itself, row by row.
#include <algorithm>

#include "ops/cpu/cpu_backend.h"

namespace ddtree::ops::cpu {

void CpuBackend::sample_rows(const SampleRowsArgs& args) {
  const Forest& f = *args.forest;
  std::vector<TokenHistory> history(static_cast<size_t>(f.segments));
  for (int32_t s = 0; s < f.segments; ++s) {
    const SampleRule& rule = args.rule[s];
    for (int32_t i = 0; i < rule.seen; ++i) {
      const int32_t id = f.pages[rule.first_seen + 2 * i], times = f.pages[rule.first_seen + 2 * i + 1];
      if (times > 0) history[s].generated[id] = times;
      else history[s].prompt.insert(id);
    }
  }
  pool_.parallel_for(args.logits.rows, 1, [&](int64_t begin, int64_t end) {
    SampleScratch scratch;
    std::vector<int32_t> path;
    for (int64_t i = begin; i < end; ++i) {
      const auto row = args.row ? args.row[i] : static_cast<int32_t>(i);
      const int32_t segment = row < 0 ? -1 : f.segment_of[row];
      args.token[i] = 0, args.margin[i] = 0, args.bad[i] = 0;
      if (segment < 0) continue;
      const float* x = args.logits.f32(i);
      if (!kernels_.finite(args.real_vocab, x)) {
        args.bad[i] = 1;
        continue;
      }
      const SampleRule& rule = args.rule[segment];
      path.clear();
      for (int32_t r = row; r >= 0 && f.position[r] >= rule.history_end; r = f.parent[r]) path.push_back(f.token[r]);
      std::reverse(path.begin(), path.end());
      const int64_t position = int64_t{f.position[row]} + 1;
      const std::span<const int32_t> banned(f.pages + rule.first_banned,
                                            position < rule.banned_end ? static_cast<size_t>(rule.banned) : size_t{0});
      const Sampled chosen =
          sample({x, static_cast<size_t>(args.real_vocab)}, rule.params, &history[segment], path, banned, position, scratch);
      args.token[i] = chosen.token, args.margin[i] = chosen.margin;
    }
  });
}

}  // namespace ddtree::ops::cpu
