#include "server/serve_flags_compat.h"

namespace ddtree {

namespace {

using F = CompatFlag;
constexpr auto kSwitch = F::kSwitch;
constexpr auto kValue = F::kValue;
constexpr auto kList = F::kList;

const char* const kOneKernelSet = "this build has one set of kernels for its device; nothing to choose";
const char* const kMemory = "memory is planned from --context-length and --max-running-requests; --max-total-tokens bounds it";
const char* const kGraphs = "there are no CUDA graphs on the CPU; nothing to switch";
const char* const kOneDevice = "this build runs on one device; leave it out (or give 1) and serve a model that fits there";
const char* const kMetricsOn = "/metrics is always there";

const std::vector<F>& table() {
  static const std::vector<F> flags = {
      // Nothing to decide here.
      {{"--trust-remote-code"}, kSwitch, false, {}, "a checkpoint's own code is never run; the architecture is built in"},
      {{"--attention-backend"}, kValue, false, {}, kOneKernelSet},
      {{"--prefill-attention-backend"}, kValue, false, {}, kOneKernelSet},
      {{"--decode-attention-backend"}, kValue, false, {}, kOneKernelSet},
      {{"--speculative-draft-attention-backend"}, kValue, false, {}, kOneKernelSet},
      {{"--speculative-attention-mode"}, kValue, false, {}, kOneKernelSet},
      {{"--mm-attention-backend"}, kValue, false, {}, "the vision tower is not loaded; text only"},
      {{"--linear-attn-backend"}, kValue, false, {}, kOneKernelSet},
      {{"--mamba-backend"}, kValue, false, {}, kOneKernelSet},
      {{"--sampling-backend"}, kValue, false, {}, kOneKernelSet},
      {{"--grammar-backend"}, kValue, false, {}, "grammars are not built; requests that ask for one are a 400"},
      {{"--fp8-gemm-backend"}, kValue, false, {}, kOneKernelSet},
      {{"--moe-runner-backend"}, kValue, false, {}, kOneKernelSet},
      {{"--speculative-moe-runner-backend"}, kValue, false, {}, kOneKernelSet},
      {{"--mem-fraction-static", "--gpu-memory-utilization"}, kValue, false, {}, kMemory},
      {{"--mamba-full-memory-ratio"},
       kValue,
       false,
       {},
       "every running request has a recurrent-state slot: --max-running-requests decides"},
      {{"--max-mamba-cache-size"}, kValue, false, {}, "every running request has a recurrent-state slot: --max-running-requests decides"},
      {{"--mamba-scheduler-strategy"},
       kValue,
       false,
       {},
       "recurrent states are folded at the commit of each round; there is no strategy to choose"},
      {{"--mamba-track-interval"}, kValue, false, {}, "recurrent states are folded at the commit of each round; there is no interval"},
      {{"--mamba-ssm-dtype"}, kValue, false, {"float32"}, "recurrent states are float32"},
      {{"--dtype"}, kValue, false, {"auto"}, "weights stay as the checkpoint stores them; on the CPU activations are float32"},
      {{"--speculative-dflash-draft-window-size"}, kValue, false, {}, "the drafter's config.json says its window; that is used"},
      {{"--speculative-draft-model-revision"}, kValue, false, {}, "the folder given is read as it is"},
      {{"--revision"}, kValue, false, {}, "the folder given is read as it is"},
      {{"--disable-cuda-graph"}, kSwitch, false, {}, kGraphs},
      {{"--disable-cuda-graph-padding"}, kSwitch, false, {}, kGraphs},
      {{"--disable-piecewise-cuda-graph"}, kSwitch, false, {}, kGraphs},
      {{"--cuda-graph-max-bs"}, kValue, false, {}, kGraphs},
      {{"--cuda-graph-bs"}, kList, false, {}, kGraphs},
      {{"--enable-torch-compile"}, kSwitch, false, {}, "there is no PyTorch here; kernels are compiled in"},
      {{"--torch-compile-max-bs"}, kValue, false, {}, "there is no PyTorch here; kernels are compiled in"},
      {{"--disable-overlap-schedule"}, kSwitch, false, {}, "scheduling runs between rounds; there is no overlap to switch off"},
      {{"--enable-mixed-chunk"}, kSwitch, false, {}, "prompt chunks and decoding always share a pass"},
      {{"--disable-radix-cache", "--no-enable-prefix-caching"},
       kSwitch,
       false,
       {},
       "there is no prefix cache yet; every prompt is computed"},
      {{"--enable-prefix-caching"}, kSwitch, false, {}, "there is no prefix cache yet; every prompt is computed"},
      {{"--schedule-policy"}, kValue, false, {"fcfs"}, "requests are admitted first come, first served"},
      {{"--schedule-conservativeness"}, kValue, false, {}, "a request is admitted when its pages are there for its whole length"},
      {{"--max-prefill-tokens"}, kValue, false, {}, "--chunked-prefill-size bounds the prompt tokens of a pass"},
      {{"--stream-interval"}, kValue, false, {"1"}, "a stream is written to after every round"},
      {{"--enable-metrics"}, kSwitch, false, {}, kMetricsOn},
      {{"--enable-cache-report"}, kSwitch, false, {}, "usage always has cached_tokens"},
      {{"--enable-request-time-stats-logging"}, kSwitch, false, {}, "times are in every reply and in the history"},
      {{"--decode-log-interval"}, kValue, false, {}, "figures are on the dashboard and in /metrics, not in the log"},
      {{"--log-requests"}, kSwitch, false, {}, "requests are in the history; --log-level debug logs a line each"},
      {{"--log-requests-level"}, kValue, false, {}, "requests are in the history; --log-level debug logs a line each"},
      {{"--log-level-http"}, kValue, false, {}, "--log-level is for all"},
      {{"--show-time-cost"}, kSwitch, false, {}, "times are in every reply and in the history"},
      {{"--watchdog-timeout"}, kValue, false, {}, "/livez says 503 when requests run and no pass was made for a minute"},
      {{"--skip-server-warmup"}, kSwitch, false, {}, "the smoke test is the warm-up; --skip-smoke leaves it out"},
      {{"--warmups"}, kValue, false, {}, "the smoke test is the warm-up"},
      {{"--random-seed"}, kValue, false, {}, "a request's seed decides; one without draws its own"},
      {{"--tokenizer-mode"}, kValue, false, {"auto"}, "the tokenizer is built in"},
      {{"--tokenizer-worker-num"}, kValue, false, {"1"}, "each connection tokenizes on its own thread"},
      {{"--model-impl"}, kValue, false, {"auto"}, "the architecture is built in"},
      {{"--enable-multimodal"}, kSwitch, false, {}, "the vision tower is not loaded; text only"},
      {{"--download-dir"}, kValue, false, {}, "nothing is downloaded; --model-path names a folder or a snapshot in the local cache"},
      {{"--disable-custom-all-reduce"}, kSwitch, false, {}, "one device: there are no collectives"},
      {{"--enable-nccl-nvls"}, kSwitch, false, {}, "one device: there are no collectives"},
      {{"--enable-symm-mem"}, kSwitch, false, {}, "one device: there are no collectives"},
      {{"--enable-p2p-check"}, kSwitch, false, {}, "one device: there are no collectives"},
      {{"--enable-flashinfer-allreduce-fusion"}, kSwitch, false, {}, "one device: there are no collectives"},
      {{"--dist-init-addr", "--nccl-init-addr"}, kValue, false, {}, "one process, one device: nobody to meet"},
      {{"--nccl-port"}, kValue, false, {}, "one device: there are no collectives"},
      {{"--dist-timeout"}, kValue, false, {}, "one device: there are no collectives"},
      {{"--base-gpu-id"}, kValue, false, {"0"}, "this build runs on the CPU"},
      {{"--enable-spec-v2"}, kSwitch, false, {}, "there is one implementation of speculation"},
      // Not built, and the answer or the capacity would not be what was asked for.
      {{"--tp-size", "--tp", "--tensor-parallel-size"}, kValue, true, {"1"}, kOneDevice},
      {{"--dp-size", "--dp", "--data-parallel-size"}, kValue, true, {"1"}, "start one ddtree a copy, on ports of their own"},
      {{"--pp-size", "--pp", "--pipeline-parallel-size"}, kValue, true, {"1"}, kOneDevice},
      {{"--ep-size", "--ep", "--expert-parallel-size"}, kValue, true, {"1"}, "dense models of the family work"},
      {{"--nnodes"}, kValue, true, {"1"}, kOneDevice},
      {{"--node-rank"}, kValue, true, {"0"}, kOneDevice},
      {{"--enable-dp-attention"}, kSwitch, true, {}, kOneDevice},
      {{"--quantization"}, kValue, true, {"none", "None"}, "a BF16 or float32 checkpoint works"},
      {{"--speculative-draft-model-quantization"}, kValue, true, {"none", "None", "unquant"}, "a BF16 or float32 drafter works"},
      {{"--torchao-config"}, kValue, true, {""}, "a BF16 or float32 checkpoint works"},
      {{"--kv-cache-dtype"}, kValue, true, {"auto", "float32"}, "K/V are kept in float32 on the CPU; leave it out"},
      {{"--load-format"}, kValue, true, {"auto", "safetensors"}, "checkpoints are read from safetensors files"},
      {{"--tokenizer-path", "--tokenizer"}, kValue, true, {}, "the checkpoint's own tokenizer.json is read; put the file there"},
      {{"--skip-tokenizer-init"}, kSwitch, true, {}, "/v1/completions takes ids and return_token_ids gives them, beside the text"},
      {{"--is-embedding", "--embedding"}, kSwitch, true, {}, "this server generates text"},
      {{"--json-model-override-args"}, kValue, true, {"{}"}, "edit the checkpoint's config.json"},
      {{"--sampling-defaults"}, kValue, true, {"model"}, "requests that say nothing get generation_config.json's values (model)"},
      {{"--preferred-sampling-params"}, kValue, true, {"{}"}, "edit the checkpoint's generation_config.json"},
      {{"--speculative-accept-threshold-single"}, kValue, true, {"1", "1.0"}, "acceptance is exact: the text is the target's own (1.0)"},
      {{"--speculative-accept-threshold-acc"}, kValue, true, {"1", "1.0"}, "acceptance is exact: the text is the target's own (1.0)"},
      {{"--speculative-token-map"}, kValue, true, {}, "DFlash drafters use the target's whole vocabulary; leave it out"},
      {{"--enable-lora"}, kSwitch, true, {}, "merge the adapter into the checkpoint and serve that"},
      {{"--lora-paths"}, kList, true, {}, "merge the adapter into the checkpoint and serve that"},
      {{"--cpu-offload-gb"}, kValue, true, {"0"}, "this build runs on the CPU; leave it out"},
      {{"--enable-hierarchical-cache"}, kSwitch, true, {}, "there is no prefix cache yet; leave it out"},
      {{"--disaggregation-mode"}, kValue, true, {"null"}, "one process does prefill and decoding; leave it out"},
      {{"--ssl-keyfile"}, kValue, true, {}, "put a TLS proxy in front"},
      {{"--ssl-certfile"}, kValue, true, {}, "put a TLS proxy in front"},
      {{"--admin-api-key"}, kValue, true, {}, "--api-key guards the dashboard's API too"},
  };
  return flags;
}

}  // namespace

const CompatFlag* find_compat(const std::string& name) {
  for (const CompatFlag& f : table())
    for (const char* n : f.names)
      if (name == n) return &f;
  return nullptr;
}

std::vector<std::string> compat_flag_names() {
  std::vector<std::string> out;
  for (const CompatFlag& f : table()) out.insert(out.end(), f.names.begin(), f.names.end());
  return out;
}

}  // namespace ddtree
