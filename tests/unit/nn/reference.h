// The model family once more, in float64 and as plainly as it can be said: whole sequences, token by token, no caches, no packing. Written
// from the formulas, sharing nothing with src/nn or src/ops.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "model/pair.h"

namespace ddtree::test {

using Row = std::vector<double>;
using Rows = std::vector<Row>;

class Reference {
 public:
  explicit Reference(const LoadedPair& pair) : p_(pair), s_(pair.spec) {}

  struct Run {
    Rows hidden, logits;
    std::vector<Rows> layer;  // [layers] output of each
  };

  Run target(const std::vector<int32_t>& tokens) const {
    Run run;
    Rows x;
    for (const int32_t t : tokens) x.push_back(row(p_.tensors.embed, t));
    for (const TargetLayer& l : p_.tensors.layers) {
      const Rows h = norm(x, l.input_norm, 1.0);
      add(&x, l.kind == LayerKind::kGatedDelta ? delta(h, l.delta) : attention(h, l.attention));
      add(&x, mlp(norm(x, l.post_attention_norm, 1.0), l.mlp));
      run.layer.push_back(x);
    }
    run.hidden = norm(x, p_.tensors.final_norm, 1.0);
    run.logits = linear(run.hidden, p_.tensors.lm_head);
    return run;
  }

  // M_i from (tokens[i + 1], hidden[i]) for all i.
  Rows mtp(const std::vector<int32_t>& tokens, const Rows& hidden) const {
    const MtpTensors& m = *p_.tensors.mtp;
    Rows e;
    for (size_t i = 0; i < hidden.size(); ++i) e.push_back(row(p_.tensors.embed, tokens[i + 1]));
    Rows both = norm(e, m.pre_norm_embedding, 1.0);
    const Rows h = norm(hidden, m.pre_norm_hidden, 1.0);
    for (size_t i = 0; i < both.size(); ++i) both[i].insert(both[i].end(), h[i].begin(), h[i].end());
    Rows x = linear(both, m.fc);
    add(&x, attention(norm(x, m.layer.input_norm, 1.0), m.layer.attention));
    add(&x, mlp(norm(x, m.layer.post_attention_norm, 1.0), m.layer.mlp));
    return norm(x, m.norm, 1.0);
  }

  // The drafter's block behind `context` rows of the run: rows before the head.
  Rows draft(const Run& run, int32_t context, int32_t anchor) const {
    const DrafterSpec& d = p_.drafter->spec;
    const DrafterTensors& t = p_.drafter->tensors;
    Rows features(context);
    for (int32_t i = 0; i < context; ++i) {
      for (const int32_t tap : d.taps) features[i].insert(features[i].end(), run.layer[tap][i].begin(), run.layer[tap][i].end());
    }
    const Rows c = norm(linear(features, t.fc), t.hidden_norm, 0.0);
    Rows x;
    for (int64_t i = 0; i < d.block_size; ++i) x.push_back(row(p_.tensors.embed, i == 0 ? anchor : d.mask_id));
    for (size_t n = 0; n < d.layers.size(); ++n) {
      const DrafterLayer& l = t.layers[n];
      const Rows h = norm(x, l.input_norm, 0.0);
      Rows all = c;
      all.insert(all.end(), h.begin(), h.end());
      const Rows q = heads(linear(h, l.attention.q_proj), d.head_dim, &l.attention.q_norm, 0.0, context, d.head_dim, d.rope_theta);
      const Rows k = heads(linear(all, l.attention.k_proj), d.head_dim, &l.attention.k_norm, 0.0, 0, d.head_dim, d.rope_theta);
      const Rows v = linear(all, l.attention.v_proj);
      Rows o;
      for (int64_t i = 0; i < d.block_size; ++i) {
        const int64_t position = context + i;
        std::vector<int64_t> seen;
        for (int64_t j = 0; j < context + d.block_size; ++j) {
          if (d.layers[n].sliding && j < position - (d.window - 1)) continue;
          if (j >= context && d.layers[n].causal && j > position) continue;
          seen.push_back(j);
        }
        o.push_back(attend(q[i], k, v, seen, d.heads, d.kv_heads, d.head_dim));
      }
      add(&x, linear(o, l.attention.o_proj));
      add(&x, mlp(norm(x, l.post_attention_norm, 0.0), l.mlp));
    }
    return norm(x, t.norm, 0.0);
  }

  Rows head(const Rows& hidden) const { return linear(hidden, p_.tensors.lm_head); }

 private:
  static Row values(const TensorView& t) {
    std::vector<float> f(t.elements());
    to_float32(t, f.data());
    return {f.begin(), f.end()};
  }
  static Row row(const TensorView& t, int64_t r) {
    std::vector<float> f(t.shape[1]);
    to_float32(t, r * t.shape[1], t.shape[1], f.data());
    return {f.begin(), f.end()};
  }
  static Rows linear(const Rows& x, const TensorView& weight) {
    const Row w = values(weight);
    const auto n = static_cast<size_t>(weight.shape[0]), k = static_cast<size_t>(weight.shape[1]);
    Rows y;
    for (const Row& r : x) {
      y.emplace_back(n);
      for (size_t j = 0; j < n; ++j) {
        for (size_t i = 0; i < k; ++i) y.back()[j] += r.at(i) * w[j * k + i];
      }
    }
    return y;
  }
  static void add(Rows* x, const Rows& y) {
    for (size_t r = 0; r < x->size(); ++r) {
      for (size_t i = 0; i < (*x)[r].size(); ++i) (*x)[r][i] += y[r][i];
    }
  }
  Row norm_row(const Row& x, const Row& w, double one) const {
    double sum = 0.0;
    for (const double v : x) sum += v * v;
    const double inverse = 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + 1e-6);
    Row y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * inverse * (one + w[i]);
    return y;
  }
  Rows norm(const Rows& x, const TensorView& weight, double one) const {
    const Row w = values(weight);
    Rows y;
    for (const Row& r : x) y.push_back(norm_row(r, w, one));
    return y;
  }
  static double silu(double x) { return x / (1.0 + std::exp(-x)); }
  Rows mlp(const Rows& h, const MlpTensors& m) const {
    Rows g = linear(h, m.gate_proj);
    const Rows u = linear(h, m.up_proj);
    for (size_t r = 0; r < g.size(); ++r) {
      for (size_t i = 0; i < g[r].size(); ++i) g[r][i] = silu(g[r][i]) * u[r][i];
    }
    return linear(g, m.down_proj);
  }
  // Norm and rotation of every head of `dim`; row r stands at position first + r.
  Rows heads(Rows x, int64_t dim, const TensorView* weight, double one, int64_t first, int64_t rotary, double theta) const {
    const Row w = values(*weight);
    for (size_t r = 0; r < x.size(); ++r) {
      for (size_t h = 0; h * dim < x[r].size(); ++h) {
        Row y = norm_row(Row(x[r].begin() + h * dim, x[r].begin() + (h + 1) * dim), w, one);
        for (int64_t i = 0; i < rotary / 2; ++i) {
          const auto frequency = static_cast<float>(1.0 / std::pow(theta, 2.0 * static_cast<double>(i) / static_cast<double>(rotary)));
          const double angle = static_cast<float>(first + static_cast<int64_t>(r)) * frequency;
          const double a = y[i], b = y[rotary / 2 + i];
          y[i] = a * std::cos(angle) - b * std::sin(angle);
          y[rotary / 2 + i] = b * std::cos(angle) + a * std::sin(angle);
        }
        std::copy(y.begin(), y.end(), x[r].begin() + h * dim);
      }
    }
    return x;
  }
  static Row attend(const Row& q, const Rows& k, const Rows& v, const std::vector<int64_t>& seen, int64_t count, int64_t kv_count,
                    int64_t dim) {
    Row o(count * dim);
    for (int64_t h = 0; h < count; ++h) {
      const int64_t kv = h / (count / kv_count);
      Row score;
      for (const int64_t j : seen) {
        double dot = 0.0;
        for (int64_t i = 0; i < dim; ++i) dot += q[h * dim + i] * k[j][kv * dim + i];
        score.push_back(dot / std::sqrt(static_cast<double>(dim)));
      }
      const double top = *std::max_element(score.begin(), score.end());
      double sum = 0.0;
      for (double& s : score) sum += s = std::exp(s - top);
      for (size_t n = 0; n < seen.size(); ++n) {
        for (int64_t i = 0; i < dim; ++i) o[h * dim + i] += score[n] / sum * v[seen[n]][kv * dim + i];
      }
    }
    return o;
  }
  Rows attention(const Rows& h, const FullAttentionTensors& a) const {
    const int64_t dim = s_.head_dim;
    const Rows projected = linear(h, a.q_proj);
    Rows q(h.size()), gate(h.size());
    for (size_t r = 0; r < h.size(); ++r) {
      for (int64_t n = 0; n < s_.heads; ++n) {
        const auto at = projected[r].begin() + n * dim * (s_.output_gate ? 2 : 1);
        q[r].insert(q[r].end(), at, at + dim);
        if (s_.output_gate) gate[r].insert(gate[r].end(), at + dim, at + 2 * dim);
      }
    }
    q = heads(q, dim, &a.q_norm, 1.0, 0, s_.rotary_dim, s_.rope_theta);
    const Rows k = heads(linear(h, a.k_proj), dim, &a.k_norm, 1.0, 0, s_.rotary_dim, s_.rope_theta);
    const Rows v = linear(h, a.v_proj);
    Rows o;
    std::vector<int64_t> seen;
    for (size_t r = 0; r < h.size(); ++r) {
      seen.push_back(static_cast<int64_t>(r));
      o.push_back(attend(q[r], k, v, seen, s_.heads, s_.kv_heads, dim));
      if (s_.output_gate) {
        for (size_t i = 0; i < o[r].size(); ++i) o[r][i] /= 1.0 + std::exp(-gate[r][i]);
      }
    }
    return linear(o, a.o_proj);
  }
  Rows delta(const Rows& h, const GatedDeltaTensors& t) const {
    const Rows m = linear(h, t.in_proj_qkv), z = linear(h, t.in_proj_z), a = linear(h, t.in_proj_a), b = linear(h, t.in_proj_b);
    const Row taps = values(t.conv1d), a_log = values(t.a_log), dt_bias = values(t.dt_bias), w = values(t.norm);
    const int64_t dk = s_.key_dim, dv = s_.value_dim, keys = s_.key_heads * dk;
    std::vector<Row> state(s_.value_heads, Row(dk * dv, 0.0));
    Rows out;
    for (size_t r = 0; r < h.size(); ++r) {
      Row c(m[r].size());
      for (size_t ch = 0; ch < c.size(); ++ch) {
        for (int64_t j = 0; j < s_.conv_width; ++j) {
          const int64_t from = static_cast<int64_t>(r) - s_.conv_width + 1 + j;
          if (from >= 0) c[ch] += taps[ch * s_.conv_width + j] * m[from][ch];
        }
        c[ch] = silu(c[ch]);
      }
      Row y;
      for (int64_t n = 0; n < s_.value_heads; ++n) {
        const int64_t kn = n / (s_.value_heads / s_.key_heads);
        Row q(c.begin() + kn * dk, c.begin() + (kn + 1) * dk), k(c.begin() + keys + kn * dk, c.begin() + keys + (kn + 1) * dk);
        double qq = 1e-6, kk = 1e-6;
        for (int64_t i = 0; i < dk; ++i) {
          qq += q[i] * q[i];
          kk += k[i] * k[i];
        }
        const double decay = std::exp(-std::exp(a_log[n]) * std::log1p(std::exp(a[r][n] + dt_bias[n])));
        const double beta = 1.0 / (1.0 + std::exp(-b[r][n]));
        Row o(dv);
        for (int64_t j = 0; j < dv; ++j) {
          double read = 0.0;
          for (int64_t i = 0; i < dk; ++i) read += decay * state[n][i * dv + j] * k[i] / std::sqrt(kk);
          const double u = beta * (c[2 * keys + n * dv + j] - read);
          for (int64_t i = 0; i < dk; ++i) {
            state[n][i * dv + j] = decay * state[n][i * dv + j] + k[i] / std::sqrt(kk) * u;
            o[j] += state[n][i * dv + j] * q[i] / std::sqrt(qq) / std::sqrt(static_cast<double>(dk));
          }
        }
        o = norm_row(o, w, 0.0);
        for (int64_t j = 0; j < dv; ++j) y.push_back(o[j] * silu(z[r][n * dv + j]));
      }
      out.push_back(y);
    }
    return linear(out, t.out_proj);
  }

  const LoadedPair& p_;
  const ModelSpec& s_;
};

}  // namespace ddtree::test
