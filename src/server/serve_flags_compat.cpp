#include "server/serve_flags_compat.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <sstream>

namespace ddtree {

namespace {

using F = CompatFlag;
constexpr auto kSwitch = F::kSwitch;
constexpr auto kValue = F::kValue;
constexpr auto kList = F::kList;

using V = CompatValue;
const V kName{V::kName, 0, 0, {}};
const V kCount{V::kWhole, 1, INT32_MAX, {}};        // at least one of something
const V kCountOrNone{V::kWhole, 0, INT32_MAX, {}};  // 0: none
const V kPositive{V::kAbove, 0, 1e9, {}};
const V kPort{V::kWhole, 0, 65535, {}};
V one_of(std::vector<const char*> words) { return {V::kOneOf, 0, 0, std::move(words)}; }

const char* const kOneKernelSet = "this build has one set of kernels for its device; nothing to choose";
const char* const kGraphs = "CUDA graphs are recorded for the sizes that come up, as many as the memory plan holds; nothing to choose";
const char* const kOneDevice = "this build runs on one device; leave it out (or give 1) and serve a model that fits there";
const char* const kMetricsOn = "/metrics is always there";

const std::vector<F>& table() {
  static const std::vector<F> flags = {
      // Nothing to decide here.
      {{"--trust-remote-code"}, kSwitch, false, {}, "a checkpoint's own code is never run; the architecture is built in"},
      {{"--attention-backend"}, kValue, false, {}, kOneKernelSet, kName},
      {{"--prefill-attention-backend"}, kValue, false, {}, kOneKernelSet, kName},
      {{"--decode-attention-backend"}, kValue, false, {}, kOneKernelSet, kName},
      {{"--speculative-draft-attention-backend"}, kValue, false, {}, kOneKernelSet, kName},
      {{"--speculative-attention-mode"}, kValue, false, {}, kOneKernelSet, one_of({"prefill", "decode"})},
      {{"--mm-attention-backend"}, kValue, false, {}, "the vision tower is not loaded; text only", kName},
      {{"--linear-attn-backend"}, kValue, false, {}, kOneKernelSet, kName},
      {{"--mamba-backend"}, kValue, false, {}, kOneKernelSet, kName},
      {{"--sampling-backend"}, kValue, false, {}, kOneKernelSet, kName},
      {{"--grammar-backend"}, kValue, false, {}, "grammars are not built; requests that ask for one are a 400", kName},
      {{"--fp8-gemm-backend"}, kValue, false, {}, kOneKernelSet, kName},
      {{"--moe-runner-backend"}, kValue, false, {}, kOneKernelSet, kName},
      {{"--speculative-moe-runner-backend"}, kValue, false, {}, kOneKernelSet, kName},
      {{"--mamba-full-memory-ratio"},
       kValue,
       false,
       {},
       "every running request has a recurrent-state slot: --max-running-requests decides",
       kPositive},
      {{"--max-mamba-cache-size"},
       kValue,
       false,
       {},
       "every running request has a recurrent-state slot: --max-running-requests decides",
       kCount},
      {{"--mamba-scheduler-strategy"},
       kValue,
       false,
       {},
       "recurrent states are folded at the commit of each round; there is no strategy to choose",
       one_of({"auto", "no_buffer", "extra_buffer"})},
      {{"--mamba-track-interval"},
       kValue,
       false,
       {},
       "recurrent states are folded at the commit of each round; there is no interval",
       kCount},
      {{"--mamba-ssm-dtype"}, kValue, false, {"float32"}, "recurrent states are float32", one_of({"float32", "bfloat16", "float16"})},
      {{"--dtype"},
       kValue,
       false,
       {"auto"},
       "weights stay as the checkpoint stores them; on the CPU activations are float32",
       one_of({"auto", "bfloat16", "float16", "float32", "half", "float"})},
      {{"--speculative-dflash-draft-window-size"}, kValue, false, {}, "the drafter's config.json says its window; that is used", kCount},
      {{"--speculative-draft-model-revision"}, kValue, false, {}, "the folder given is read as it is"},
      {{"--revision"}, kValue, false, {}, "the folder given is read as it is"},
      {{"--disable-cuda-graph-padding"}, kSwitch, false, {}, kGraphs},
      {{"--disable-piecewise-cuda-graph"}, kSwitch, false, {}, kGraphs},
      {{"--cuda-graph-max-bs"}, kValue, false, {}, kGraphs, kCount},
      {{"--cuda-graph-bs"}, kList, false, {}, kGraphs, kCount},
      {{"--enable-torch-compile"}, kSwitch, false, {}, "there is no PyTorch here; kernels are compiled in"},
      {{"--torch-compile-max-bs"}, kValue, false, {}, "there is no PyTorch here; kernels are compiled in", kCount},
      {{"--disable-overlap-schedule"}, kSwitch, false, {}, "scheduling runs between rounds; there is no overlap to switch off"},
      {{"--enable-mixed-chunk"}, kSwitch, false, {}, "prompt chunks and decoding always share a pass"},
      {{"--disable-radix-cache", "--no-enable-prefix-caching"},
       kSwitch,
       false,
       {},
       "there is no prefix cache yet; every prompt is computed"},
      {{"--enable-prefix-caching"}, kSwitch, false, {}, "there is no prefix cache yet; every prompt is computed"},
      {{"--schedule-policy"},
       kValue,
       false,
       {"fcfs"},
       "requests are admitted first come, first served",
       one_of({"fcfs", "lpm", "random", "dfs-weight", "lof", "priority", "routing-key"})},
      {{"--schedule-conservativeness"},
       kValue,
       false,
       {},
       "a request is admitted when its pages are there for its whole length",
       V{V::kNumber, 0, 1e9, {}}},
      {{"--max-prefill-tokens"}, kValue, false, {}, "--chunked-prefill-size bounds the prompt tokens of a pass", kCount},
      {{"--stream-interval"}, kValue, false, {"1"}, "a stream is written to after every round", kCount},
      {{"--enable-metrics"}, kSwitch, false, {}, kMetricsOn},
      {{"--enable-cache-report"}, kSwitch, false, {}, "usage always has cached_tokens"},
      {{"--enable-request-time-stats-logging"}, kSwitch, false, {}, "times are in every reply and in the history"},
      {{"--decode-log-interval"}, kValue, false, {}, "figures are on the dashboard and in /metrics, not in the log", kCount},
      {{"--log-requests"}, kSwitch, false, {}, "requests are in the history; --log-level debug logs a line each"},
      {{"--log-requests-level"},
       kValue,
       false,
       {},
       "requests are in the history; --log-level debug logs a line each",
       V{V::kWhole, 0, 3, {}}},
      {{"--log-level-http"}, kValue, false, {}, "--log-level is for all", kName},
      {{"--show-time-cost"}, kSwitch, false, {}, "times are in every reply and in the history"},
      {{"--watchdog-timeout"},
       kValue,
       false,
       {},
       "/livez says 503 when requests run and no pass was made for a minute",
       V{V::kNumber, 0, 1e9, {}}},
      {{"--skip-server-warmup"}, kSwitch, false, {}, "the smoke test is the warm-up; --skip-smoke leaves it out"},
      {{"--warmups"}, kValue, false, {}, "the smoke test is the warm-up"},
      {{"--random-seed"},
       kValue,
       false,
       {},
       "a request's seed decides; one without draws its own",
       V{V::kWhole, -9007199254740992.0, 9007199254740992.0, {}}},
      {{"--tokenizer-mode"}, kValue, false, {"auto"}, "the tokenizer is built in", one_of({"auto", "slow", "hf"})},
      {{"--tokenizer-worker-num"}, kValue, false, {"1"}, "each connection tokenizes on its own thread", kCount},
      {{"--model-impl"}, kValue, false, {"auto"}, "the architecture is built in", one_of({"auto", "sglang", "vllm", "transformers"})},
      {{"--enable-multimodal"}, kSwitch, false, {}, "the vision tower is not loaded; text only"},
      {{"--download-dir"}, kValue, false, {}, "nothing is downloaded; --model-path names a folder or a snapshot in the local cache"},
      {{"--disable-custom-all-reduce"}, kSwitch, false, {}, "one device: there are no collectives"},
      {{"--enable-nccl-nvls"}, kSwitch, false, {}, "one device: there are no collectives"},
      {{"--enable-symm-mem"}, kSwitch, false, {}, "one device: there are no collectives"},
      {{"--enable-p2p-check"}, kSwitch, false, {}, "one device: there are no collectives"},
      {{"--enable-flashinfer-allreduce-fusion"}, kSwitch, false, {}, "one device: there are no collectives"},
      {{"--dist-init-addr", "--nccl-init-addr"}, kValue, false, {}, "one process, one device: nobody to meet"},
      {{"--nccl-port"}, kValue, false, {}, "one device: there are no collectives", kPort},
      {{"--dist-timeout"}, kValue, false, {}, "one device: there are no collectives", kPositive},
      {{"--base-gpu-id"}, kValue, false, {"0"}, "this build runs on the CPU", kCountOrNone},
      {{"--enable-spec-v2"}, kSwitch, false, {}, "there is one implementation of speculation"},
      // Not built, and the answer or the capacity would not be what was asked for.
      {{"--dp-size", "--dp", "--data-parallel-size"}, kValue, true, {"1"}, "start one ddtree a copy, on ports of their own", kCount},
      {{"--pp-size", "--pp", "--pipeline-parallel-size"}, kValue, true, {"1"}, kOneDevice, kCount},
      {{"--ep-size", "--ep", "--expert-parallel-size"}, kValue, true, {"1"}, "dense models of the family work", kCount},
      {{"--nnodes"}, kValue, true, {"1"}, kOneDevice, kCount},
      {{"--node-rank"}, kValue, true, {"0"}, kOneDevice, kCountOrNone},
      {{"--enable-dp-attention"}, kSwitch, true, {}, kOneDevice},
      {{"--quantization"}, kValue, true, {"none", "None"}, "a BF16 or float32 checkpoint works", kName},
      {{"--speculative-draft-model-quantization"}, kValue, true, {"none", "None", "unquant"}, "a BF16 or float32 drafter works", kName},
      {{"--torchao-config"}, kValue, true, {""}, "a BF16 or float32 checkpoint works"},
      {{"--kv-cache-dtype"}, kValue, true, {"auto", "float32"}, "K/V are kept in float32 on the CPU; leave it out", kName},
      {{"--tokenizer-path", "--tokenizer"}, kValue, true, {}, "the checkpoint's own tokenizer.json is read; put the file there"},
      {{"--skip-tokenizer-init"}, kSwitch, true, {}, "/v1/completions takes ids and return_token_ids gives them, beside the text"},
      {{"--is-embedding", "--embedding"}, kSwitch, true, {}, "this server generates text"},
      {{"--json-model-override-args"}, kValue, true, {"{}"}, "edit the checkpoint's config.json"},
      {{"--sampling-defaults"},
       kValue,
       true,
       {"model"},
       "requests that say nothing get generation_config.json's values (model)",
       one_of({"model", "openai"})},
      {{"--preferred-sampling-params"}, kValue, true, {"{}"}, "edit the checkpoint's generation_config.json"},
      {{"--speculative-accept-threshold-single"},
       kValue,
       true,
       {"1", "1.0"},
       "acceptance is exact: the text is the target's own (1.0)",
       V{V::kNumber, 0, 1, {}}},
      {{"--speculative-accept-threshold-acc"},
       kValue,
       true,
       {"1", "1.0"},
       "acceptance is exact: the text is the target's own (1.0)",
       V{V::kNumber, 0, 1, {}}},
      {{"--speculative-token-map"}, kValue, true, {}, "DFlash drafters use the target's whole vocabulary; leave it out"},
      {{"--enable-lora"}, kSwitch, true, {}, "merge the adapter into the checkpoint and serve that"},
      {{"--lora-paths"}, kList, true, {}, "merge the adapter into the checkpoint and serve that"},
      {{"--cpu-offload-gb"}, kValue, true, {"0"}, "this build runs on the CPU; leave it out", V{V::kNumber, 0, 1e6, {}}},
      {{"--enable-hierarchical-cache"}, kSwitch, true, {}, "there is no prefix cache yet; leave it out"},
      {{"--disaggregation-mode"},
       kValue,
       true,
       {"null"},
       "one process does prefill and decoding; leave it out",
       one_of({"null", "prefill", "decode"})},
      {{"--ssl-keyfile"}, kValue, true, {}, "put a TLS proxy in front"},
      {{"--ssl-certfile"}, kValue, true, {}, "put a TLS proxy in front"},
      {{"--admin-api-key"}, kValue, true, {}, "--api-key guards the dashboard's API too"},
  };
  return flags;
}

std::string number_text(double n) { return std::floor(n) == n ? fmt::format("{:.0f}", n) : fmt::format("{}", n); }

// Whether one word is right.
bool fits(const CompatValue& v, const std::string& word) {
  switch (v.kind) {
    case V::kAny: return true;
    case V::kName: {
      // Begins with a letter: "--attention-backend 16" has swallowed another flag's value.
      if (word.empty() || !std::isalpha(static_cast<unsigned char>(word[0]))) return false;
      for (const char c : word)
        if (!std::isalnum(static_cast<unsigned char>(c)) && std::string_view("_-.:/+").find(c) == std::string_view::npos) return false;
      return true;
    }
    case V::kOneOf:
      for (const char* w : v.words)
        if (word == w) return true;
      return false;
    case V::kWhole:
    case V::kNumber:
    case V::kAbove: {
      double n = 0;
      const char* end = word.data() + word.size();
      const auto [p, ec] = std::from_chars(word.data(), end, n);
      if (ec != std::errc() || p != end || !std::isfinite(n)) return false;
      if (v.kind == V::kWhole && std::floor(n) != n) return false;
      return (v.kind == V::kAbove ? n > v.low : n >= v.low) && n <= v.high;
    }
  }
  return false;
}

std::string described(const CompatValue& v) {
  switch (v.kind) {
    case V::kAny: return "given";
    case V::kName: return "a name: a letter, then letters, digits and _-.:/+";
    case V::kOneOf: {
      std::string out;
      for (size_t i = 0; i < v.words.size(); ++i) out += (i == 0 ? "" : i + 1 == v.words.size() ? " or " : ", ") + std::string(v.words[i]);
      return out;
    }
    case V::kWhole:
      return v.high == INT32_MAX ? fmt::format("a whole number of at least {}", number_text(v.low))
                                 : fmt::format("a whole number from {} to {}", number_text(v.low), number_text(v.high));
    case V::kNumber: return fmt::format("a number from {} to {}", number_text(v.low), number_text(v.high));
    case V::kAbove: return fmt::format("a number above {} and at most {}", number_text(v.low), number_text(v.high));
  }
  return {};
}

}  // namespace

std::string CompatFlag::wrong(const std::string& given) const {
  if (arity == kSwitch) return {};
  for (const char* n : neutral)
    if (given == n) return {};
  if (arity == kValue) return given.empty() || !fits(value, given) ? described(value) : "";
  std::istringstream in(given);
  bool any = false;
  for (std::string word; in >> word; any = true)
    if (!fits(value, word)) return described(value) + ", each";
  return any ? "" : described(value);
}

const CompatFlag* find_compat(const std::string& name) {
  for (const CompatFlag& f : table())
    for (const char* n : f.names)
      if (name == n) return &f;
  return nullptr;
}

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t up = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = up;
    }
  }
  return row[b.size()];
}

std::vector<std::string> compat_flag_names() {
  std::vector<std::string> out;
  for (const CompatFlag& f : table()) out.insert(out.end(), f.names.begin(), f.names.end());
  return out;
}

}  // namespace ddtree
