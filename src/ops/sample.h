// sample: one token for one row of the target's logits. Also the random numbers behind it.
//
// Order of processing, as vLLM and SGLang have it:
//   1. penalties on the logits: repetition (prompt ∪ generated; divides positive logits, multiplies negative ones), then frequency × count,
//      then presence, both over generated tokens. "Generated" includes the tokens on the path from the committed end to this row: inside a
//      tree the penalties depend on the path, so that a row has exactly the distribution that plain decoding would have there.
//   2. banned ids (stop ids before min_tokens) become -inf.
//   3. temperature 0: the largest logit, ties by the smaller id; the steps below do not apply.
//   4. logits / temperature; top_k (the k largest, ties by the smaller id); top_p over the softmax of what top_k left (the fewest largest
//      whose sum reaches top_p, the one that crosses it included); min_p (at least min_p × the largest probability).
//   5. Gumbel-max over what is left: argmax of logit/temperature + G(id), ties by the smaller id, where G is a function of (seed, choice,
//      position, id) alone. So the sample is exact, independent of other rows, and the same whatever pass it is drawn in.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace ddtree::ops {

struct SampleParams {
  float temperature = 1.0f;  // 0: greedy
  float top_p = 1.0f, min_p = 0.0f;
  int32_t top_k = 0;  // <= 0: off
  float presence_penalty = 0.0f, frequency_penalty = 0.0f, repetition_penalty = 1.0f;
  uint64_t seed = 0;
  uint32_t choice = 0;

  bool penalised() const { return presence_penalty != 0 || frequency_penalty != 0 || repetition_penalty != 1; }
};

// What a sequence's penalties count. Committed tokens only; the path inside a tree is given per row.
struct TokenHistory {
  std::unordered_set<int32_t> prompt;
  std::unordered_map<int32_t, int32_t> generated;  // token -> times
};

struct Sampled {
  int32_t token = -1;
  // How far the processed logits would have to move for another token to be chosen: the difference of the two best scores, or less where a
  // token that top_k, top_p or min_p kept in or out by a hair decides. Other rounding may choose otherwise where this is tiny.
  float margin = 0;
};

// Scratch that a caller keeps between calls; sized on first use.
struct SampleScratch {
  std::vector<float> logits;  // [vocab]
  std::vector<int32_t> ids;
  std::vector<double> values;
};

// logits [vocab] float32, -inf for ids that cannot come out; at least one must be finite. path: the tokens from the committed end to this
// row, the row's own included (empty where it is committed already). position: absolute position of the token to be chosen. history may be
// null if no penalty is set. Reads its arguments only; may run on any thread with a scratch of its own.
Sampled sample(std::span<const float> logits, const SampleParams& params, const TokenHistory* history, std::span<const int32_t> path,
               std::span<const int32_t> banned, int64_t position, SampleScratch& scratch);

// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): counter and key to four 32-bit words.
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Standard Gumbel noise of one token: word id mod 4 of the counter (id div 4, position low, position high, choice) under the seed as key,
// made uniform as (w + 1/2) / 2^32.
double gumbel(uint64_t seed, uint32_t choice, int64_t position, int32_t id);

}  // namespace ddtree::ops
