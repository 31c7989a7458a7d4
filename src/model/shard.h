// Tensor parallel: which part of a target each of N ranks has. Pure arithmetic over specs and views; what a rank does with its part is
// nn/'s, how the ranks' results are put together is ops/collectives.h's.
//
//   split by                 tensors
//   query heads              q_proj with its gates (rows), o_proj (columns)
//   key/value heads          k_proj, v_proj (rows); where ranks outnumber the heads, neighbouring ranks have the same one
//   delta-rule key heads     q and k rows of in_proj_qkv and conv1d; likewise the same one where ranks outnumber them
//   delta-rule value heads   v rows of in_proj_qkv and conv1d, in_proj_z, in_proj_a, in_proj_b, A_log, dt_bias (rows), out_proj (columns)
//   intermediate columns     gate_proj, up_proj (rows), down_proj (columns)
//   vocabulary               embed_tokens, lm_head (rows)
//   input columns            mtp.fc (columns)
//
// Everything else (norms) is small and whole on every rank, and so is the drafter. States, convolution windows and K/V follow their heads.
// A matrix that is split by columns gives a partial sum on each rank, which an all-reduce completes; rows need none.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "model/roles.h"
#include "model/spec.h"

namespace ddtree {

struct Share {  // items [first, first + count) of a rank
  int64_t first = 0, count = 0;
  bool operator==(const Share&) const = default;
};

// What one rank has of a target.
struct RankShare {
  int32_t rank = 0, ranks = 1;
  Share heads, kv_heads, key_heads, value_heads;
  Share intermediate;  // columns of the MLP
  Share vocab;         // rows of embed_tokens and lm_head: share_rows()
  Share fc;            // of the 2·H input columns of the MTP head's fc
};

// kUsage naming the field of config.json that does not divide, its value, and the numbers of ranks up to 8 that would do. 0 <= rank <
// ranks.
Result<RankShare> share_of(const ModelSpec& spec, int32_t ranks, int32_t rank);

// Of rows that need not divide: as many for each rank, or one more.
Share share_rows(int64_t rows, int32_t ranks, int32_t rank);

// "1, 2 and 4": the numbers of ranks up to 8 that share_of() takes.
std::string possible_ranks(const ModelSpec& spec);

// The spec and the tensors of a rank: heads, widths and rows are its own, the views are of its part alone. On one rank both are what is
// given. `spec` is the whole target's in both.
ModelSpec share_spec(const ModelSpec& spec, const RankShare& share);
TargetTensors share_tensors(const TargetTensors& tensors, const ModelSpec& spec, const RankShare& share);

}  // namespace ddtree
