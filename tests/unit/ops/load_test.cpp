// The loader of weights: whatever the shapes, types, shards, packings, buffers and readers, every place holds what the file does; and
// what goes wrong with a file ends in one error that names it.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <mutex>
#include <set>
#include <thread>

#include "model/checkpoint.h"
#include "model/shard.h"
#include "ops/weight_loader.h"
#include "support/opened_checkpoint.h"
#include "support/safetensors_writer.h"
#include "support/target_views.h"
#include "unit/ops/support.h"

namespace ddtree::ops::test {
namespace {

using ddtree::test::element_count;
using ddtree::test::open_checkpoint;
using ddtree::test::TemporaryFolder;
using ddtree::test::TestTensors;
using ddtree::test::write_sharded;
using ddtree::test::write_single;

// A device in host memory: copies are made later, by a thread of its own and in order, as a card's copy engine does. A buffer that is
// written before its copies are done gives wrong contents.
class LaggingSink : public LoadSink {
 public:
  ~LaggingSink() override { close(); }
  Result<std::byte*> open(int count, int64_t bytes) override {
    memory_.assign(static_cast<size_t>(count * bytes), std::byte{0x5A});
    pending_.assign(static_cast<size_t>(count), 0);
    open_buffers = count, open_bytes = bytes;
    engine_ = std::thread([this] { copy(); });
    return memory_.data();
  }
  void close() override {
    if (!engine_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    engine_.join();
    CHECK(std::all_of(pending_.begin(), pending_.end(), [](int n) { return n == 0; }));  // nobody left a copy behind
    memory_.clear();
  }
  Status put(int buffer, const std::byte* from, const LoadItem& item, int64_t first, int64_t count) override {
    const int64_t size = item.element == Element::kFloat32 ? 4 : 2;
    if (on_put) on_put();
    const std::lock_guard lock(mutex_);
    if (item.place == fail_at) return {Code::kEngineFault, "the copy of " + std::string(item.from.name) + " was refused"};
    largest = std::max(largest, count * size);
    put_bytes += count * size;
    pieces.push_back({item.from.file, item.from.offset + static_cast<uint64_t>(first)});
    queue_.push_back({buffer, from, places.at(static_cast<size_t>(item.place)).data() + first * size, static_cast<size_t>(count * size)});
    ++pending_[buffer];
    changed_.notify_all();
    return {};
  }
  Status wait(int buffer) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return pending_[buffer] == 0; });
    return wait_error;
  }

  int64_t add_place(int64_t bytes) {
    places.emplace_back(static_cast<size_t>(bytes), std::byte{0xEE});
    return static_cast<int64_t>(places.size()) - 1;
  }

  std::vector<std::vector<std::byte>> places;
  std::function<void()> on_put;
  int64_t fail_at = -1;
  Status wait_error;
  int open_buffers = 0;
  int64_t open_bytes = 0, largest = 0, put_bytes = 0;
  std::vector<std::pair<std::string_view, uint64_t>> pieces;

 private:
  struct Copy {
    int buffer;
    const std::byte* from;
    std::byte* to;
    size_t bytes;
  };
  void copy() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const Copy c = queue_.front();
      queue_.pop_front();
      lock.unlock();
      std::this_thread::yield();
      std::memcpy(c.to, c.from, c.bytes);
      lock.lock();
      --pending_[c.buffer];
      changed_.notify_all();
    }
  }
  std::vector<std::byte> memory_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Copy> queue_;
  std::vector<int> pending_;
  bool stop_ = false;
  std::thread engine_;
};

// What a place must hold, by the plain path through the mapping.
std::vector<std::byte> plain(const LoadItem& item) {
  if (item.element == Element::kBfloat16) return {item.from.data, item.from.data + item.from.bytes};
  Floats values(static_cast<size_t>(item.from.elements()));
  to_float32(item.from, values.data());
  for (float& v : values) v += item.add;
  std::vector<std::byte> out(values.size() * 4);
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

TestTensors random_tensors(Random* random, int count) {
  TestTensors t;
  for (int i = 0; i < count; ++i) {
    auto& tensor = t["layer." + std::to_string(i) + ".weight"];
    tensor.dtype = std::array{"BF16", "BF16", "F16", "F32"}[static_cast<size_t>(random->below(4))];
    tensor.shape = {random->below(40) + 1};
    if (random->below(3) > 0) tensor.shape.push_back(random->below(90) + 1);
  }
  return t;
}

int64_t add_items(WeightLoader* loader, LaggingSink* sink, const Checkpoint& checkpoint, Random* random, std::vector<LoadItem>* items) {
  int64_t total = 0;
  for (const auto& [name, view] : checkpoint.tensors()) {
    total += static_cast<int64_t>(view.bytes);
    // Some are wanted twice in the same form, as a drafter's k and v are.
    const bool narrow = view.dtype == DType::kBf16 && random->below(2) == 0;
    const float add = !narrow && random->below(2) == 0 ? 1.0f : 0.0f;
    for (int copies = random->below(4) == 0 ? 2 : 1; copies > 0; --copies) {
      const auto element = narrow ? Element::kBfloat16 : Element::kFloat32;
      LoadItem item{view, element, add, sink->add_place(view.elements() * (narrow ? 2 : 4))};
      items->push_back(item);
      loader->add(item);
    }
  }
  return total;
}

}  // namespace

TEST_CASE("loading: any shapes, types, shards, buffers and readers give what the files hold", "[load]") {
  Random random(std::random_device{}());
  for (int round = 0; round < 24; ++round) {
    TemporaryFolder folder;
    const TestTensors tensors = random_tensors(&random, 30);
    const int shards = 1 + random.below(4);
    if (shards == 1) write_single(folder.path(), tensors);
    else write_sharded(folder.path(), tensors, static_cast<size_t>(shards));
    const auto checkpoint = open_checkpoint(folder);
    LaggingSink sink;
    WeightLoader loader;
    std::vector<LoadItem> items;
    const int64_t total = add_items(&loader, &sink, *checkpoint, &random, &items);  // bytes of all tensors
    LoadOptions options{.threads = 1 + random.below(8), .buffer_bytes = int64_t{64} << random.below(10), .buffers = 1 + random.below(6)};
    std::vector<LoadProgress> told;
    options.progress = [&](const LoadProgress& p) {
      told.push_back(p);
      return true;
    };
    INFO("threads " << options.threads << ", buffers " << options.buffers << " of " << options.buffer_bytes << ", shards " << shards);
    const Status status = loader.run(&sink, options);
    INFO(status.message());
    REQUIRE(status.ok());
    for (const LoadItem& item : items) {
      INFO(item.from.name << " " << dtype_name(item.from.dtype) << " " << shape_text(item.from.shape));
      REQUIRE(sink.places[static_cast<size_t>(item.place)] == plain(item));
    }
    CHECK(sink.open_buffers <= options.buffers);
    CHECK(sink.open_bytes <= options.buffer_bytes);
    CHECK(sink.largest <= options.buffer_bytes);
    REQUIRE(!told.empty());
    for (size_t i = 1; i < told.size(); ++i) CHECK(told[i].bytes >= told[i - 1].bytes);
    CHECK(told.back().bytes == total);  // a tensor wanted twice counts once: it was read once
    CHECK(told.back().total == total);
    CHECK(std::count_if(told.begin(), told.end(), [](const LoadProgress& p) { return p.bytes == p.total; }) == 1);
    CHECK(loader.empty());
  }
}

TEST_CASE("loading: one reader goes through every file forwards, each byte once", "[load]") {
  Random random(5);
  TemporaryFolder folder;
  write_sharded(folder.path(), random_tensors(&random, 40), 3);
  const auto checkpoint = open_checkpoint(folder);
  LaggingSink sink;
  WeightLoader loader;
  std::vector<std::string> names;
  int64_t bytes = 0;
  for (const auto& [name, view] : checkpoint->tensors()) names.push_back(name), bytes += view.elements() * 4;
  for (size_t i = names.size(); i > 1; --i) std::swap(names[i - 1], names[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  for (const std::string& name : names) {
    const TensorView& view = *checkpoint->find(name);
    loader.add({view, Element::kFloat32, 0, sink.add_place(view.elements() * 4)});
  }
  REQUIRE(loader.run(&sink, {.threads = 1, .buffer_bytes = 256, .buffers = 3}).ok());
  CHECK(sink.put_bytes == bytes);
  std::set<std::string_view> seen;
  for (size_t i = 0; i < sink.pieces.size(); ++i) {
    const auto& [file, offset] = sink.pieces[i];
    if (i > 0 && sink.pieces[i - 1].first == file) CHECK(sink.pieces[i - 1].second < offset);
    else CHECK(seen.insert(file).second);  // no file is come back to
  }
  CHECK(seen.size() == 3);
}

TEST_CASE("loading: ranks read a target's every byte once, but for what they replicate", "[load]") {
  ModelSpec s;
  s.vocab_size = 107, s.hidden_size = 24, s.intermediate_size = 32;
  s.layers = {LayerKind::kGatedDelta, LayerKind::kFullAttention};
  s.heads = 24, s.kv_heads = 4, s.head_dim = 4;  // the ratios of Qwen3.6-27B
  s.key_heads = 16, s.value_heads = 48, s.key_dim = 4, s.value_dim = 4;
  s.mtp_layers = 1;
  // Names and shapes from a dummy; every element of every tensor a number of its own, exact in float32.
  const auto shapes = Checkpoint::dummy("dummy:shapes", 1);
  ModelSpec bound = s;
  REQUIRE(bind_target(*shapes, &bound).ok());
  TestTensors tensors;
  std::vector<const std::string*> owner;  // of each number
  uint32_t number = 0;
  for (const auto& [name, view] : shapes->tensors()) {
    ddtree::test::TestTensor& t = tensors[name];
    t.dtype = "F32", t.shape = view.shape;
    for (int64_t i = 0; i < view.elements(); ++i) {
      const auto value = static_cast<float>(number++);
      t.data.append(reinterpret_cast<const char*>(&value), 4);
      owner.push_back(&name);
    }
  }
  REQUIRE(number < (1u << 24));
  TemporaryFolder folder;
  write_sharded(folder.path(), tensors, 3);
  const auto checkpoint = open_checkpoint(folder);
  auto whole = bind_target(*checkpoint, &bound);
  REQUIRE(whole.ok());
  for (const int ranks : {1, 2, 4, 8}) {
    std::vector<int> read(number, 0);
    int64_t total = 0;
    for (int r = 0; r < ranks; ++r) {
      const auto share = share_of(bound, ranks, r);
      REQUIRE(share.ok());
      LaggingSink sink;
      WeightLoader loader;
      int64_t bytes = 0;
      ddtree::test::for_views(share_tensors(*whole, bound, *share), [&](const TensorView& v) {
        loader.add({v, Element::kFloat32, 0, sink.add_place(v.elements() * 4)});
        bytes += static_cast<int64_t>(v.bytes);
      });
      LoadProgress last;
      const LoadOptions options{
          .threads = 2, .buffer_bytes = 512, .buffers = 3, .progress = [&](const LoadProgress& p) { return last = p, true; }};
      const Status status = loader.run(&sink, options);
      INFO(status.message());
      REQUIRE(status.ok());
      CHECK(sink.put_bytes == bytes);
      CHECK(last.total == bytes);
      total += bytes;
      for (const auto& place : sink.places)
        for (size_t i = 0; i < place.size(); i += 4) {
          float value;
          std::memcpy(&value, place.data() + i, 4);
          ++read.at(static_cast<size_t>(value));
        }
    }
    // Which tensors are replicated, by name: norms everywhere, K and V heads where ranks outnumber them.
    uint64_t got = 0, want = 0;
    int64_t replicated = 0;
    for (uint32_t i = 0; i < number; ++i) {
      const std::string& name = *owner[i];
      const bool norm = name.find("norm") != std::string::npos;
      const bool kv = name.find("k_proj") != std::string::npos || name.find("v_proj") != std::string::npos;
      const int times = norm ? ranks : kv && ranks == 8 ? 2 : 1;
      got += static_cast<uint64_t>(read[i]) * (i + 1) * 0x9E3779B97F4A7C15u,
          want += static_cast<uint64_t>(times) * (i + 1) * 0x9E3779B97F4A7C15u;
      replicated += times - 1;
      if (read[i] != times)
        FAIL("element " << i << " (" << name << ") was read " << read[i] << " times by " << ranks << " ranks, not " << times);
    }
    CHECK(got == want);
    CHECK(total == (int64_t{number} + replicated) * 4);
  }
}

TEST_CASE("loading: a file cut or written to meanwhile is one error that names it", "[load]") {
  TemporaryFolder folder;
  TestTensors tensors;
  for (const char* name : {"a.weight", "b.weight", "c.weight"}) tensors[name].shape = {64, 96};
  write_single(folder.path(), tensors);
  const std::string path = folder / "model.safetensors";
  // A file system's clock ticks every few milliseconds: a file written in the same tick as before would look untouched.
  std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  const auto checkpoint = open_checkpoint(folder);
  const auto size = std::filesystem::file_size(path);
  const int threads = 1 + static_cast<int>(std::random_device{}() % 8);
  LaggingSink sink;
  WeightLoader loader;
  for (const auto& [name, view] : checkpoint->tensors()) loader.add({view, Element::kBfloat16, 0, sink.add_place(view.elements() * 2)});
  const auto run = [&](std::function<void()> first_put) {
    std::atomic<bool> done{false};
    if (first_put)
      sink.on_put = [&] {
        if (!done.exchange(true)) first_put();
      };
    std::vector<LoadProgress> told;
    const Status s = loader.run(&sink, {.threads = threads, .buffer_bytes = 1024, .buffers = 2, .progress = [&](const LoadProgress& p) {
                                          told.push_back(p);
                                          return true;
                                        }});
    if (!s.ok())
      for (const LoadProgress& p : told) CHECK(p.bytes < p.total);  // never 100 % of what failed
    return s;
  };
  SECTION("cut before loading") {
    std::filesystem::resize_file(path, size - 5000);
    const Status s = run({});
    CHECK(s.code() == Code::kBadModel);
    CHECK(s.message().find(path) != std::string::npos);
    CHECK(s.message().find(std::to_string(size) + " bytes when its header was checked, " + std::to_string(size - 5000) + " now") !=
          std::string::npos);
  }
  SECTION("cut while loading") {
    const Status s = run([&] { std::filesystem::resize_file(path, size - 5000); });
    CHECK(s.code() == Code::kBadModel);
    INFO(s.message());
    CHECK(s.message().find(path) != std::string::npos);
    CHECK(s.message().find("tensor c.weight: the file ends at " + std::to_string(size - 5000)) != std::string::npos);
  }
  SECTION("written to while loading") {
    const Status s = run([&] {
      const int fd = open(path.c_str(), O_WRONLY);
      REQUIRE(pwrite(fd, "x", 1, static_cast<off_t>(size) - 1) == 1);
      close(fd);
    });
    CHECK(s.code() == Code::kBadModel);
    INFO(s.message());
    CHECK(s.message().find(path + ": written to") != std::string::npos);
  }
  SECTION("another file in its place is no harm: the one that was checked is read") {
    const auto kept = plain({*checkpoint->find("c.weight"), Element::kBfloat16, 0, 0});
    const Status s = run([&] {
      ddtree::test::write_file(path + ".new", "not a checkpoint");
      std::filesystem::rename(path + ".new", path);
    });
    INFO(s.message());
    CHECK(s.ok());
    CHECK(sink.places.back() == kept);
  }
  SECTION("the error is said once and nothing is left in the loader") {
    sink.fail_at = 1;
    const Status s = run({});
    CHECK(s.code() == Code::kEngineFault);
    CHECK(s.message() == "the copy of b.weight was refused");
    CHECK(loader.empty());
  }
  SECTION("a copy that fails later") {
    sink.wait_error = {Code::kEngineFault, "the link is down"};
    CHECK(run({}).message() == "the link is down");
  }
}

TEST_CASE("loading ends where its caller says so", "[load]") {
  TemporaryFolder folder;
  TestTensors tensors;
  tensors["a.weight"].shape = {64, 96};
  write_single(folder.path(), tensors);
  const auto checkpoint = open_checkpoint(folder);
  LaggingSink sink;
  sink.on_put = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
  WeightLoader loader;
  const TensorView& view = *checkpoint->find("a.weight");
  loader.add({view, Element::kBfloat16, 0, sink.add_place(view.elements() * 2)});
  int asked = 0;
  const Status s = loader.run(&sink, {.threads = 2, .buffer_bytes = 64, .buffers = 3, .progress = [&](const LoadProgress& p) {
                                        CHECK(p.bytes < p.total);
                                        return ++asked < 2;
                                      }});
  CHECK(s.code() == Code::kCancelled);
  CHECK(asked == 2);
}

TEST_CASE("loading refuses to narrow", "[load]") {
  std::vector<std::byte> bytes(64);
  TensorView view;
  view.dtype = DType::kF32, view.shape = {16}, view.data = bytes.data(), view.bytes = 64, view.name = "w";
  LaggingSink sink;
  WeightLoader loader;
  loader.add({view, Element::kBfloat16, 0, sink.add_place(64)});
  CHECK(loader.run(&sink, {.threads = 1, .buffer_bytes = 64, .buffers = 1}).message() == "tensor w of F32 cannot be loaded as BF16");
}

TEST_CASE("loading: the host's memory does not grow with the checkpoint", "[load]") {
#ifdef DDTREE_SANITIZED
  SKIP("the sanitizers' own allocator keeps what was freed");
#endif
  class Discard final : public LoadSink {
   public:
    Result<std::byte*> open(int count, int64_t bytes) override {
      memory.resize(static_cast<size_t>(count * bytes));
      return memory.data();
    }
    void close() override { memory = {}; }
    Status put(int, const std::byte*, const LoadItem&, int64_t, int64_t) override {
      long size = 0, resident = 0;
      std::FILE* f = std::fopen("/proc/self/statm", "r");
      if (f == nullptr || std::fscanf(f, "%ld %ld", &size, &resident) != 2) return {Code::kEngineFault, "statm"};
      std::fclose(f);
      int64_t now = resident * sysconf(_SC_PAGESIZE);
      for (int64_t before = most; before < now && !most.compare_exchange_weak(before, now);) continue;
      return {};
    }
    Status wait(int) override { return {}; }
    std::vector<std::byte> memory;
    std::atomic<int64_t> most{0};
  };
  TemporaryFolder folder;
  {
    TestTensors tensors;
    for (int i = 0; i < 4; ++i) {
      auto& t = tensors["w" + std::to_string(i)];
      t.shape = {4096, 2048};
      t.data.assign(size_t{4096} * 2048 * 2, static_cast<char>(i));
    }
    write_sharded(folder.path(), tensors, 2);
  }
  const auto checkpoint = open_checkpoint(folder);
  const auto most = [&](int tensors) {
    WeightLoader loader;
    for (const auto& [name, view] : checkpoint->tensors())
      if (tensors-- > 0) loader.add({view, Element::kFloat32, 0, 0});
    Discard sink;
    REQUIRE(loader.run(&sink, {.threads = 4, .buffer_bytes = 256 << 10, .buffers = 8}).ok());
    return sink.most.load();
  };
  const int64_t one = most(1), all = most(4);  // 16 and 64 MiB
  CHECK(all - one < (4 << 20));
}

// The same through a backend: packed weights and norms, laid out first and read together.
TEST_CASE("loading a CPU backend: packings hold their parts' rows", "[load]") {
  Random random(std::random_device{}());
  for (int round = 0; round < 12; ++round) {
    TemporaryFolder folder;
    const int64_t k = 1 + random.below(70);
    TestTensors tensors;
    const bool mixed = round % 3 == 2;  // not all BF16: the whole is float32
    for (int i = 0; i < 9; ++i) {
      auto& t = tensors["t" + std::to_string(i)];
      t.shape = {round % 2 == 0 ? 1 + random.below(80) : 32 * (1 + random.below(3)), k};  // on panels, and across them
      if (mixed) t.dtype = std::array{"BF16", "F16", "F32"}[static_cast<size_t>(random.below(3))];
    }
    tensors["norm"].shape = {k};
    write_sharded(folder.path(), tensors, 3);
    const auto checkpoint = open_checkpoint(folder);
    cpu::CpuBackend backend({.threads = 2});
    REQUIRE(backend.set_limits({.max_rows = 100, .max_positions = 64, .max_linear_inputs = k, .staged_bytes = 4096}).ok());
    backend.begin_loading();
    std::vector<std::pair<std::vector<TensorView>, const Weight*>> packs;
    for (int i = 0; i < 9; i += 3) {
      std::vector<TensorView> parts;
      for (int j = i; j < i + 3; ++j) parts.push_back(*checkpoint->find("t" + std::to_string(j)));
      const auto w = backend.pack_weight(parts);
      REQUIRE(w.ok());
      packs.emplace_back(parts, *w);
    }
    const auto norm = backend.norm_weight(*checkpoint->find("norm"), 1.0f);
    REQUIRE(norm.ok());
    LoadOptions options{.threads = 1 + random.below(8), .buffer_bytes = int64_t{64} << random.below(12), .buffers = 1 + random.below(4)};
    INFO("threads " << options.threads << ", buffers " << options.buffers << " of " << options.buffer_bytes << ", K " << k);
    REQUIRE(backend.finish_loading(options).ok());
    for (const auto& [parts, weight] : packs) {
      int64_t row = 0;
      for (const TensorView& part : parts) {
        Floats want(static_cast<size_t>(part.elements()));
        to_float32(part, want.data());
        const auto y = backend.make_tensor(part.shape[0], k, Element::kFloat32);
        REQUIRE(y.ok());
        std::vector<int32_t> ids(static_cast<size_t>(part.shape[0]));
        std::iota(ids.begin(), ids.end(), static_cast<int32_t>(row));
        backend.embed({.token = ids.data(), .rows = static_cast<int32_t>(ids.size()), .weight = weight, .y = *y});
        REQUIRE(Floats(y->f32(), y->f32() + want.size()) == want);
        row += part.shape[0];
      }
      CHECK(weight->n() == row);
    }
    Floats want(static_cast<size_t>(k));
    to_float32(*checkpoint->find("norm"), want.data());
    for (int64_t i = 0; i < k; ++i) CHECK(norm->f32()[i] == want[static_cast<size_t>(i)] + 1.0f);
  }
}

}  // namespace ddtree::ops::test
