// Every tensor of a target, by a walk that knows nothing of how it is used.
#pragma once

#include "model/roles.h"

namespace ddtree::test {

template <class F>
void for_views(const FullAttentionTensors& t, F&& f) {
  for (const TensorView* v : {&t.q_proj, &t.k_proj, &t.v_proj, &t.o_proj, &t.q_norm, &t.k_norm}) f(*v);
}
template <class F>
void for_views(const TargetLayer& l, F&& f) {
  f(l.input_norm), f(l.post_attention_norm);
  const GatedDeltaTensors& d = l.delta;
  if (l.kind == LayerKind::kGatedDelta)
    for (const TensorView* v :
         {&d.in_proj_qkv, &d.in_proj_z, &d.in_proj_a, &d.in_proj_b, &d.conv1d, &d.a_log, &d.dt_bias, &d.norm, &d.out_proj})
      f(*v);
  else for_views(l.attention, f);
  f(l.mlp.gate_proj), f(l.mlp.up_proj), f(l.mlp.down_proj);
}
template <class F>
void for_views(const TargetTensors& t, F&& f) {
  f(t.embed), f(t.final_norm);
  if (!t.tied_head) f(t.lm_head);
  for (const TargetLayer& l : t.layers) for_views(l, f);
  if (!t.mtp) return;
  f(t.mtp->fc), f(t.mtp->pre_norm_embedding), f(t.mtp->pre_norm_hidden), f(t.mtp->norm);
  for_views(t.mtp->layer, f);
}

}  // namespace ddtree::test
