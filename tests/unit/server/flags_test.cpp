// The command line of `ddtree serve`, with the lines that published units contain.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <sstream>

#include "server/serve_flags.h"
#include "server/serve_flags_compat.h"

using namespace ddtree;
using Catch::Matchers::ContainsSubstring;

namespace {

std::vector<std::string> words(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> out;
  for (std::string w; in >> w;) out.push_back(w);
  return out;
}

ServeConfig good(const std::string& line) {
  auto c = parse_serve_flags(words(line));
  INFO(line << ": " << (c ? "" : c.status().message()));
  REQUIRE(c);
  return std::move(*c);
}

std::string refused(const std::string& line) {
  auto c = parse_serve_flags(words(line));
  INFO(line);
  REQUIRE_FALSE(c);
  CHECK(c.status().code() == Code::kUsage);
  CHECK(exit_code(c.status().code()) == 64);
  return c.status().message();
}

bool noted(const ServeConfig& c, const std::string& flag) {
  for (const auto& n : c.notes)
    if (n.rfind(flag, 0) == 0 && n.find(": ") != std::string::npos) return true;
  return false;
}

}  // namespace

TEST_CASE("without flags: the embedded pair on 127.0.0.1:30000") {
  const ServeConfig c = good("");
  CHECK(c.service.model_path.empty());
  CHECK(c.http.host == "127.0.0.1");
  CHECK(c.http.port == 30000);
  CHECK(c.http.max_body == 32u << 20);
  CHECK_FALSE(c.service.mode_given);
  CHECK(c.service.engine.budget == 0);
  CHECK(c.service.drain_seconds == 30);
  CHECK(c.notes.empty());
}

TEST_CASE("published DFLASH and NEXTN command lines parse") {
  const std::string lines[] = {
      "--model-path Qwen/Qwen3.5-27B --speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3.5-27B-DFlash "
      "--speculative-num-draft-tokens 16 --tp-size 1 --attention-backend trtllm_mha "
      "--speculative-draft-attention-backend fa4 --mem-fraction-static 0.75 --mamba-scheduler-strategy extra_buffer --trust-remote-code",
      "--model-path Qwen/Qwen3.6-27B --speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3.6-27B-DFlash "
      "--speculative-dflash-block-size 16 --speculative-dflash-draft-window-size 4096 "
      "--mamba-scheduler-strategy extra_buffer --host 0.0.0.0 --port 30000",
      "--model-path Qwen/Qwen3.5-27B --port 8000 --tp-size 1 --mem-fraction-static 0.8 --context-length 262144 --reasoning-parser qwen3 "
      "--speculative-algo NEXTN --speculative-num-steps 3 "
      "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
      "--model-path Qwen/Qwen3.5-27B --port 8000 --tp-size 1 --mem-fraction-static 0.8 --context-length 262144 --reasoning-parser qwen3 "
      "--tool-call-parser qwen3_coder",
      "--model-path=/srv/models/Qwen3.6-27B --served-model-name=qwen3.6-27b --speculative-algorithm=NEXTN --speculative-num-steps=3 "
      "--speculative-eagle-topk=1 --speculative-num-draft-tokens=4 --disable-cuda-graph",
      "--model-path Qwen/Qwen3-8B --speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16 "
      "--attention-backend fa3 --dtype bfloat16 --max-running-requests 32 --cuda-graph-bs 1 2 4 8 "
      "--cuda-graph-max-bs 32",
      "--model-path /models/Qwen3.6-27B --speculative-algorithm DDTREE --speculative-draft-model-path /models/Qwen3.6-27B-DFlash "
      "--speculative-ddtree-budget 32 --speculative-ddtree-shadow linear --tp 1",
      "--model-path /models/Qwen3.6-27B --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
      "--speculative-num-draft-tokens 4 --mamba-full-memory-ratio 0.9 --mamba-ssm-dtype float32 "
      "--enable-metrics --schedule-conservativeness 0.3",
      "--model-path Qwen/Qwen3.6-35B-A3B --speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3.6-35B-A3B-DFlash "
      "--speculative-num-draft-tokens 16 --chunked-prefill-size 8192 --max-prefill-tokens 16384 "
      "--page-size 1 --moe-runner-backend triton --api-key secret --log-level warning --random-seed 1 --watchdog-timeout 600 "
      "--enable-cache-report",
      "--model-path /m --speculative-algorithm NONE --chunked-prefill-size -1 --disable-radix-cache --disable-overlap-schedule "
      "--stream-interval 1 --kv-cache-dtype auto --load-format safetensors --quantization none",
  };
  for (const std::string& line : lines) good(line);

  CHECK(good("--model-path /m --disable-cuda-graph").service.no_graphs);
  CHECK_FALSE(good("--model-path /m").service.no_graphs);
  const ServeConfig dflash = good(lines[0]);
  CHECK(dflash.service.engine.mode == SpeculationMode::kDflash);
  CHECK(dflash.service.mode_given);
  CHECK(dflash.service.engine.block_size == 16);
  CHECK(dflash.service.draft_path == "z-lab/Qwen3.5-27B-DFlash");
  for (const char* flag : {"--attention-backend", "--speculative-draft-attention-backend", "--mem-fraction-static",
                           "--mamba-scheduler-strategy", "--trust-remote-code"}) {
    INFO(flag);
    CHECK(noted(dflash, flag));
  }
  CHECK(dflash.notes.size() == 5);  // --tp-size 1 is what happens anyway: no line

  const ServeConfig nextn = good(lines[2]);
  CHECK(nextn.service.engine.mode == SpeculationMode::kNextn);
  CHECK(nextn.service.engine.nextn_steps == 3);
  CHECK(nextn.service.engine.context_length == 262144);
  CHECK(nextn.service.reasoning_parser == "qwen3");
  CHECK(nextn.notes.size() == 1);

  CHECK(good(lines[4]).service.served_names == std::vector<std::string>{"qwen3.6-27b"});
  const ServeConfig tree = good(lines[6]);
  CHECK(tree.service.engine.mode == SpeculationMode::kDdtree);
  CHECK(tree.service.engine.budget == 32);
  CHECK(tree.service.engine.shadow_linear);
  CHECK(noted(good(lines[7]), "--speculative-algorithm EAGLE"));
  const ServeConfig moe = good(lines[8]);
  CHECK(moe.service.engine.prefill_chunk == 4096);
  CHECK(noted(moe, "--chunked-prefill-size 8192"));
  CHECK(moe.service.page_size == 16);
  CHECK(noted(moe, "--page-size 1"));
  CHECK(moe.http.api_key == "secret");
  CHECK(moe.log_level == log::Level::kWarn);
}

TEST_CASE("the flags agree with each other or say why not") {
  CHECK_THAT(refused("--speculative-algorithm DFLASH --speculative-dflash-block-size 16 --speculative-num-draft-tokens 8"),
             ContainsSubstring("same figure"));
  CHECK_THAT(refused("--speculative-algorithm DFLASH --speculative-num-draft-tokens 1"), ContainsSubstring("at least 2"));
  CHECK(good("--speculative-algorithm NEXTN --speculative-num-draft-tokens 5").service.engine.nextn_steps == 4);
  CHECK(noted(good("--speculative-algorithm NEXTN --speculative-eagle-topk 4"), "--speculative-eagle-topk 4"));
  CHECK_THAT(refused("--speculative-algorithm NONE --speculative-ddtree-shadow linear"), ContainsSubstring("DDTREE"));
  CHECK_THAT(refused("--stuck-seconds 60 --stuck-exit-seconds 4"), ContainsSubstring("--stuck-exit-seconds 4"));
  CHECK(good("--stuck-seconds 60 --stuck-exit-seconds 0").service.watch.stuck_exit_seconds == 0);
  CHECK_THAT(refused("--load-format dummy"), ContainsSubstring("--model-config"));
  CHECK_THAT(refused("--model-config qwen3.6-27b"), ContainsSubstring("--load-format dummy"));
  CHECK(good("--speculative-ddtree-budget auto").service.engine.budget == 0);
  CHECK(good("--max-total-tokens 4096 --page-size 64").service.pages == 64);
  CHECK(good("--page-size 64 --max-total-tokens 4096").service.pages == 64);
  // Numbers that are too large are told where the end is.
  CHECK_THAT(refused("--max-total-tokens 999999999999"), ContainsSubstring("from 1 to 2147483647"));
  CHECK_THAT(refused("--max-total-tokens 99999999999999999999999"), ContainsSubstring("from 1 to 2147483647"));
  CHECK_THAT(refused("--max-total-tokens x"), ContainsSubstring("at least 1"));
  CHECK(good("--served-model-name a b --served-model-name c").service.served_names == std::vector<std::string>{"a", "b", "c"});
  CHECK(good("--max-body-size 1MiB").http.max_body == 1u << 20);
  CHECK(good("--max-body-size 2048").http.max_body == 2048);
}

TEST_CASE("what would change capacity or results and is not built is refused with what works instead") {
  for (const char* line : {"--tp-size 2", "--tp 4", "--dp-size 2", "--pp-size 2", "--quantization fp8", "--kv-cache-dtype fp8_e4m3",
                           "--device tpu", "--enable-lora", "--load-format gguf", "--speculative-accept-threshold-single 0.5",
                           "--tokenizer-path /x", "--nnodes 2", "--cpu-offload-gb 8", "--speculative-draft-model-quantization fp8"}) {
    const std::string message = refused(line);
    INFO(message);
    CHECK(message.rfind(line, 0) == 0);  // the flag and its value as given
    CHECK(message.size() > std::string(line).size() + 20);
  }
  CHECK_THAT(refused("--speculative-algorithm EAGLE3"), ContainsSubstring("DDTREE"));
}

TEST_CASE("unknown flags name the nearest known one") {
  CHECK_THAT(refused("--modle-path x"), ContainsSubstring("--model-path?"));
  CHECK_THAT(refused("--speculative-ddtree-buget 8"), ContainsSubstring("--speculative-ddtree-budget?"));
  CHECK_THAT(refused("--max-running-request 8"), ContainsSubstring("--max-running-requests?"));
  CHECK_THAT(refused("--disable-cuda-grpah"), ContainsSubstring("--disable-cuda-graph?"));
  CHECK_THAT(refused("--zzzzzzzzzzzzzzzzzzzzzzzz"), ContainsSubstring("--help"));
  CHECK_THAT(refused("/models/x"), ContainsSubstring("--model-path"));
  CHECK_THAT(refused("-p 5"), ContainsSubstring("-p"));
}

TEST_CASE("values are checked") {
  CHECK_THAT(refused("--port"), ContainsSubstring("needs a value"));
  CHECK_THAT(refused("--port --host x"), ContainsSubstring("needs a value"));
  CHECK_THAT(refused("--port 65536"), ContainsSubstring("0 to 65535"));
  CHECK_THAT(refused("--port 80x"), ContainsSubstring("whole number"));
  CHECK_THAT(refused("--speculative-ddtree-budget 257"), ContainsSubstring("1 to 256"));
  CHECK_THAT(refused("--speculative-ddtree-budget 0"), ContainsSubstring("auto"));
  CHECK_THAT(refused("--speculative-ddtree-shadow tree"), ContainsSubstring("linear"));
  CHECK_THAT(refused("--speculative-algorithm MAGIC"), ContainsSubstring("NEXTN"));
  CHECK_THAT(refused("--drain-timeout -1"), ContainsSubstring("seconds"));
  CHECK_THAT(refused("--retain-days -1"), ContainsSubstring("--retain-days"));
  CHECK_THAT(refused("--retain-size 3parsecs"), ContainsSubstring("512MiB"));
  CHECK_THAT(refused("--retain-size 100K"), ContainsSubstring("at least 1MiB"));
  CHECK(good("--retain-days 7 --retain-size 512MiB").service.retain_bytes == int64_t{512} << 20);
  CHECK(good("--retain-size 0").service.retain_bytes == 0);
  CHECK((good("").service.retain_days == 90 && good("").service.retain_bytes == int64_t{1} << 30));
  CHECK_THAT(refused("--max-body-size 10Q"), ContainsSubstring("bytes"));
  CHECK_THAT(refused("--store-text=yes"), ContainsSubstring("no value"));
  CHECK_THAT(refused("--trust-remote-code=1"), ContainsSubstring("no value"));
  CHECK_THAT(refused("--log-level loud"), ContainsSubstring("debug"));
  CHECK_THAT(refused("--context-length 0"), ContainsSubstring("at least 16"));
}

TEST_CASE("a page is a multiple of 16 tokens, and pages fit 32-bit places") {
  for (const char* wrong : {"0", "1025", "1040", "-16", "x", "16.0"}) {
    const std::string m = refused(std::string("--page-size ") + wrong);
    CHECK_THAT(m, ContainsSubstring("from 1 to 1024"));
  }
  for (int size = 1; size <= 1024; ++size) {
    const ServeConfig c = good("--page-size " + std::to_string(size));
    const int32_t used = c.service.page_size;
    CHECK((used % 16 == 0 && used >= size && used < size + 16));
    CHECK(noted(c, "--page-size") == (used != size));
  }
  CHECK_THAT(serve_help(), ContainsSubstring("multiple of 16"));
  CHECK_THAT(refused("--kv-pages 2147483647"), ContainsSubstring("give at most 67108863"));
  CHECK(good("--kv-pages 67108863").service.pages == 67108863);
}

TEST_CASE("values of flags that mean nothing here are checked all the same") {
  // Every compat flag that takes a value: one that is right, several that are not.
  for (const std::string& name : compat_flag_names()) {
    const CompatFlag* flag = find_compat(name);
    INFO(name);
    REQUIRE(flag);
    if (flag->arity == CompatFlag::kSwitch) {
      CHECK_THAT(refused(name + "=1"), ContainsSubstring("takes no value"));
      continue;
    }
    const auto wrong = [&](const std::string& value) {
      INFO(value);
      CHECK_THAT(refused(name + "=" + value), ContainsSubstring(name + " " + value + ": must be "));
    };
    switch (flag->value.kind) {
      case CompatValue::kAny: break;
      case CompatValue::kName:
        wrong("16");
        wrong("a,b");
        wrong("");
        break;
      case CompatValue::kOneOf:
        wrong("int3");
        wrong("Auto");
        for (const char* word : flag->value.words) CHECK(flag->wrong(word).empty());
        break;
      case CompatValue::kWhole: wrong("1.5"); [[fallthrough]];
      case CompatValue::kNumber:
      case CompatValue::kAbove:
        wrong("x");
        wrong("1x");
        wrong("nan");
        wrong("inf");
        wrong("1e300");
        wrong("-1e300");
        break;
    }
  }
  CHECK_THAT(refused("--mem-fraction-static 1.01"), ContainsSubstring("a number above 0 and at most 1"));
  CHECK_THAT(refused("--mem-fraction-static 0"), ContainsSubstring("above 0"));
  CHECK_THAT(refused("--gpu-memory-utilization nan"), ContainsSubstring("above 0"));
  CHECK(good("--mem-fraction-static 0.85").service.mem_fraction == 0.85);
  CHECK(noted(good("--mem-fraction-static 0.85"), "--mem-fraction-static 0.85"));
  CHECK(good("--gpu-memory-utilization 0.9").notes.empty());  // vLLM's means the same
  CHECK_THAT(refused("--dtype int3"), ContainsSubstring("bfloat16, float16, float32, half or float"));
  CHECK_THAT(refused("--cuda-graph-bs 1 2 x"), ContainsSubstring("each"));
  CHECK_THAT(refused("--tp-size 0"), ContainsSubstring("at least 1"));
  CHECK_THAT(refused("--tp-size 2"), ContainsSubstring("not built") && ContainsSubstring("--device cpu"));
  CHECK_THAT(refused("--device cuda --tp-size 2"), ContainsSubstring("no collectives"));
  CHECK_THAT(refused("--tensor-parallel-size 65 --device cpu"), ContainsSubstring("at most 64"));
  CHECK(good("--tp-size 2 --device cpu").service.tp_size == 2);  // whichever comes first
  CHECK(good("--device cpu --tp 4").service.tp_size == 4);
  CHECK(good("--tp-size 1 --device cuda").service.tp_size == 1);
  for (const char* type : {"bfloat16", "float16", "float32", "half", "float"}) {
    const ServeConfig c = good(std::string("--dtype ") + type);
    REQUIRE(c.notes.size() == 1);
    CHECK_THAT(c.notes[0], ContainsSubstring(type) && ContainsSubstring("as the checkpoint stores them"));
  }
  CHECK(good("--dtype auto").notes.empty());
  CHECK(good("--revision 3f2a9c --dist-init-addr 127.0.0.1:5000 --random-seed -1 --watchdog-timeout 0").notes.size() == 4);
}

TEST_CASE("an unknown flag is told in the words of the command that was asked, with its own flags") {
  const auto said = [](const char* flag) { return parse_serve_flags({flag}, "smoke", {"--json", "--list"}).status().message(); };
  CHECK(said("--jsn") == "--jsn is no flag of ddtree smoke; did you mean --json?");
  CHECK(said("--modle-path") == "--modle-path is no flag of ddtree smoke; did you mean --model-path?");
  CHECK(said("--zzzzzzzzzzzzzzzzzzzzzzzz") == "--zzzzzzzzzzzzzzzzzzzzzzzz is no flag of ddtree smoke; ddtree smoke --help lists them");
}

TEST_CASE("help lists every flag, and every flag of the issue is there") {
  const std::string help = serve_help();
  for (const char* flag : {"--model-path",
                           "--host",
                           "--port",
                           "--tp-size",
                           "--mem-fraction-static",
                           "--context-length",
                           "--max-running-requests",
                           "--chunked-prefill-size",
                           "--dtype",
                           "--trust-remote-code",
                           "--attention-backend",
                           "--disable-cuda-graph",
                           "--mamba-full-memory-ratio",
                           "--mamba-scheduler-strategy",
                           "--reasoning-parser",
                           "--tool-call-parser",
                           "--speculative-algorithm",
                           "--speculative-draft-model-path",
                           "--speculative-num-draft-tokens",
                           "--speculative-num-steps",
                           "--speculative-eagle-topk",
                           "--speculative-dflash-block-size",
                           "--speculative-dflash-draft-window-size",
                           "--speculative-draft-attention-backend",
                           "--speculative-ddtree-budget",
                           "--speculative-ddtree-shadow",
                           "--served-model-name",
                           "--api-key",
                           "--db"}) {
    INFO(flag);
    CHECK(help.find(flag) != std::string::npos);
  }
  for (const std::string& name : compat_flag_names()) {
    INFO(name);
    CHECK(help.find(name) != std::string::npos);
    CHECK(nearest_flag(name) == name);
  }
  CHECK(good("--help").help);
}

TEST_CASE("help names each group once, and every flag under one") {
  const std::string help = serve_help();
  std::map<std::string, int> groups;
  std::istringstream lines(help.substr(0, help.find("\nOther flags of SGLang")));
  std::string before = "x";
  int flags = 0;
  for (std::string line; std::getline(lines, line); before = line) {
    if (before.empty() && !line.empty() && line[0] >= 'A' && line[0] <= 'Z' && !line.starts_with("Serves")) ++groups[line];
    flags += line.starts_with("  --");
  }
  CHECK(groups.size() >= 5);
  for (const auto& [name, count] : groups) {
    INFO(name);
    CHECK(count == 1);
  }
  CHECK(groups.contains("Model"));
  CHECK(flags > 30);
}
