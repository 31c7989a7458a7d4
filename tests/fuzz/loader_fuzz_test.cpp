// 1,000 seeded mutations of a model's files: the loader and the tokenizer never crash, hang or ask for absurd memory. A mutation that still
// loads is fine; then everything that it gave is read, so that a bad bound shows itself.
//
//   DDTREE_FUZZ_SEED=n    another seed (printed at the start)        DDTREE_FUZZ_COUNT=n   more or fewer mutations
//   DDTREE_FUZZ_ONLY=i    only the i-th, to reproduce
#include <sys/resource.h>

#include <catch2/catch_test_macros.hpp>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "model/describe.h"
#include "model/pair.h"
#include "support/mutate.h"
#include "support/small_model.h"
#include "text/tokenizer.h"

using namespace ddtree;
using namespace ddtree::test;

namespace {

uint64_t environment(const char* name, uint64_t absent) {
  const char* value = std::getenv(name);
  return value == nullptr ? absent : std::strtoull(value, nullptr, 10);
}

// Ends the process, naming the mutation, when one takes longer than a minute: each takes milliseconds, so that is a hang on any machine.
class Watchdog {
 public:
  explicit Watchdog(uint64_t seed) : seed_(seed), thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  void begin(uint64_t iteration) {
    const std::lock_guard lock(mutex_);
    iteration_ = iteration;
    since_ = std::chrono::steady_clock::now();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, std::chrono::seconds(1), [this] { return stop_; })) {
      if (std::chrono::steady_clock::now() - since_ < std::chrono::seconds(60)) continue;
      std::fprintf(stderr, "a mutation hangs: DDTREE_FUZZ_SEED=%llu DDTREE_FUZZ_ONLY=%llu\n", static_cast<unsigned long long>(seed_),
                   static_cast<unsigned long long>(iteration_));
      std::abort();
    }
  }

  const uint64_t seed_;
  uint64_t iteration_ = 0;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

// An allocation bomb becomes std::bad_alloc, which escapes and fails the test. (Sanitizers reserve terabytes of address space themselves.)
void limit_memory() {
#ifndef DDTREE_SANITIZED
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, rlim_t{4} << 30);
  REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
#endif
}

std::string damaged_safetensors(Mutator& m, const std::string& file, std::string* log) {
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const std::string header = file.substr(8, length), data = file.substr(8 + length);
  switch (m.below(5)) {
    case 0: {  // the length itself
      std::string out = file;
      out[m.below(8)] = static_cast<char>(m.below(256));
      *log = "header length";
      return out;
    }
    case 1: *log = "cut"; return file.substr(0, m.below(file.size()));
    case 2: {  // the header changes size, the length does not
      std::string out = file.substr(0, 8) + m.json_text(header, log) + data;
      *log += " (stale length)";
      return out;
    }
    default: return safetensors_bytes(m.json_text(header, log), data);
  }
}

// Reads all that a loaded pair points at.
double read_everything(const LoadedPair& pair) {
  double sum = 0;
  std::vector<float> row;
  for (const Checkpoint* c : {pair.checkpoint.get(), pair.drafter ? pair.drafter->checkpoint.get() : nullptr}) {
    if (c == nullptr) continue;
    for (const auto& [name, t] : c->tensors()) {
      if (t.dtype == DType::kBf16 || t.dtype == DType::kF16 || t.dtype == DType::kF32) {
        row.resize(static_cast<size_t>(t.elements()));
        to_float32(t, row.data());
        for (const float f : row) sum += f;
      } else {
        for (size_t i = 0; i < t.bytes; ++i) sum += static_cast<double>(t.data[i]);
      }
    }
  }
  return sum + static_cast<double>(describe(pair).size());
}

void use_tokenizer(const std::string& json, const std::string& config) {
  Result<Tokenizer> tokenizer = Tokenizer::from_json(json, config, "tokenizer.json");
  if (!tokenizer.ok()) {
    CHECK(tokenizer.status().code() == Code::kBadModel);
    CHECK_FALSE(tokenizer.status().message().empty());
    return;
  }
  const std::vector<int32_t> ids =
      tokenizer->encode("Hello <|im_end|> def gcd(a, b):\n    while b: 12345 \xc3\xa9\xe2\x82\xac \xff<|im_start|>");
  tokenizer->decode(ids, false);
  const std::vector<int32_t> odd = {-1, 0, INT32_MAX, INT32_MIN, tokenizer->id_count()};
  tokenizer->decode(odd, true);
}

}  // namespace

TEST_CASE("mutated model files never crash or hang the loader") {
  const uint64_t seed = environment("DDTREE_FUZZ_SEED", 20261130), count = environment("DDTREE_FUZZ_COUNT", 1000),
                 only = environment("DDTREE_FUZZ_ONLY", UINT64_MAX);
  std::printf("loader fuzz: DDTREE_FUZZ_SEED=%llu, %llu mutations\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(count));
  std::fflush(stdout);
  limit_memory();
  Watchdog watchdog(seed);

  const TemporaryFolder folder;
  SmallModel().write(folder.path() / "target", 2);
  SmallDrafter().write(folder.path() / "draft");
  const std::string target = folder / "target", draft = folder / "draft";
  REQUIRE(load_pair(target, draft).status().message() == "");
  const std::string real_tokenizer = read_file(DDTREE_SOURCE_DIR "/models/tiny/target/tokenizer.json");
  REQUIRE(Tokenizer::from_json(real_tokenizer, "{}", "tokenizer.json").status().message() == "");
  const char* const kFiles[] = {"target/config.json",
                                "draft/config.json",
                                "target/generation_config.json",
                                "target/tokenizer.json",
                                "target/tokenizer_config.json",
                                "target/model.safetensors.index.json",
                                "target/model-00001-of-00002.safetensors",
                                "target/model-00002-of-00002.safetensors",
                                "draft/model.safetensors",
                                "real tokenizer.json"};
  size_t loaded = 0, refused = 0;
  double sum = 0;
  for (uint64_t i = 0; i < count; ++i) {
    if (only != UINT64_MAX && i != only) continue;
    watchdog.begin(i);
    Mutator m(seed * 1000003 + i);
    const std::string file = kFiles[m.below(std::size(kFiles))];
    std::string log;
    if (file == "real tokenizer.json") {
      const std::string text = m.json_text(real_tokenizer, &log);
      INFO("DDTREE_FUZZ_SEED=" << seed << " DDTREE_FUZZ_ONLY=" << i << ": " << file << ": " << log);
      use_tokenizer(text, "{}");
      continue;
    }
    const std::string good = read_file(folder.path() / file);
    const std::string bad = file.ends_with(".safetensors") ? damaged_safetensors(m, good, &log) : m.json_text(good, &log);
    INFO("DDTREE_FUZZ_SEED=" << seed << " DDTREE_FUZZ_ONLY=" << i << ": " << file << ": " << log);
    write_file(folder.path() / file, bad);
    {
      Result<LoadedPair> pair = load_pair(target, draft);
      if (pair.ok()) {
        ++loaded;
        sum += read_everything(*pair);
        use_tokenizer(pair->tokenizer_json, pair->tokenizer_config_json);
      } else {
        ++refused;
        // A user must learn which file is at fault.
        CAPTURE(pair.status().message());
        CHECK(pair.status().code() == Code::kBadModel);
        CHECK(pair.status().message().find(folder.path().string()) != std::string::npos);
        CHECK(pair.status().message().size() < 8192);
      }
    }
    write_file(folder.path() / file, good);
  }
  std::printf("loader fuzz: %zu refused, %zu loaded all the same (checksum %g)\n", refused, loaded, sum);
  if (only == UINT64_MAX && count >= 100) {
    CHECK(refused > count / 4);  // otherwise the mutations do not reach what they should
    CHECK(loaded > 0);
  }
  REQUIRE(load_pair(target, draft).ok());
}
