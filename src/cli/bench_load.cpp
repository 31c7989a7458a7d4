#include "cli/bench_load.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>
#include <vector>

#include "model/checkpoint.h"
#include "nn/cuda_executor.h"
#include "ops/cpu/cpu_backend.h"

namespace ddtree::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr int64_t kBlock = 2 << 20;  // of one write and one read
constexpr int kReaders = 8;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }
double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

struct Matrix {
  const char* name;
  int64_t n, k;
};

// One layer's matrices, of the 27B's shapes where they fit several times.
std::vector<Matrix> layer_matrices(int64_t bytes) {
  const int64_t h = bytes >= 4'000'000'000 ? 5120 : bytes >= 200'000'000 ? 1024 : 256, i = h * 17 / 5 / 64 * 64;
  return {{"input_norm", h, 1}, {"q", 2 * h, h}, {"k", h / 4, h}, {"v", h / 4, h},
          {"o", h, h},          {"gate", i, h},  {"up", i, h},    {"down", h, i}};
}
std::string tensor_name(int64_t layer, const char* matrix) { return fmt::format("layers.{}.{}.weight", layer, matrix); }

Status write_all(int fd, const char* data, size_t size, const std::string& path) {
  while (size > 0) {
    const ssize_t n = write(fd, data, size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return {Code::kStorage, fmt::format("{}: cannot be written: {}", path, std::strerror(errno))};
    data += n, size -= static_cast<size_t>(n);
  }
  return {};
}

Status write_shard(const std::string& path, const std::vector<Matrix>& matrices, int64_t first_layer, int64_t layers) {
  Json header = Json::object();
  int64_t at = 0;
  for (int64_t l = first_layer; l < first_layer + layers; ++l)
    for (const Matrix& m : matrices) {
      const Json shape = m.k == 1 ? Json{m.n} : Json{m.n, m.k};
      header[tensor_name(l, m.name)] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {at, at + m.n * m.k * 2}}};
      at += m.n * m.k * 2;
    }
  const std::string text = header.dump();
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return {Code::kStorage, fmt::format("{}: cannot be written: {}", path, std::strerror(errno))};
  const uint64_t length = text.size();
  Status status = write_all(fd, reinterpret_cast<const char*>(&length), 8, path);
  if (status.ok()) status = write_all(fd, text.data(), text.size(), path);
  // Noise, so that a file system that compresses or finds blocks again gains nothing.
  std::vector<uint64_t> block(kBlock / 8);
  uint64_t state = static_cast<uint64_t>(first_layer) * 0x9E3779B97F4A7C15u + 1;
  for (int64_t left = at; left > 0 && status.ok(); left -= kBlock) {
    for (uint64_t& word : block) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      word = state & 0xBFFFBFFFBFFFBFFFu;  // no BF16 that is infinite or not a number
    }
    status = write_all(fd, reinterpret_cast<const char*>(block.data()), static_cast<size_t>(std::min(left, kBlock)), path);
  }
  if (close(fd) != 0 && status.ok()) status = {Code::kStorage, fmt::format("{}: cannot be written: {}", path, std::strerror(errno))};
  return status;
}

// The folder's checkpoint: one that is there already, or a new one.
Status write_checkpoint(const std::string& folder, const LoadBenchOptions& o, bool* written) {
  std::error_code error;
  if (fs::exists(fs::path(folder) / "model.safetensors.index.json", error)) return {};
  const bool others = fs::exists(folder, error) && !fs::is_empty(folder, error);
  if (others)
    return {Code::kUsage, fmt::format("--dir {}: holds other files than a checkpoint; give an empty folder or a new one", folder)};
  fs::create_directories(folder, error);
  if (error) return {Code::kStorage, fmt::format("--dir {}: cannot be made: {}", folder, error.message())};
  *written = true;
  const fs::space_info space = fs::space(folder, error);
  if (!error && static_cast<int64_t>(space.available) < o.bytes + (int64_t{64} << 20))
    return {Code::kStorage,
            fmt::format("--dir {}: {:.1f} GB are free, the checkpoint needs {:.1f} GB; give a smaller --size or another folder", folder,
                        static_cast<double>(space.available) * 1e-9, static_cast<double>(o.bytes) * 1e-9)};
  const std::vector<Matrix> matrices = layer_matrices(o.bytes);
  int64_t layer = 0;
  for (const Matrix& m : matrices) layer += m.n * m.k * 2;
  const int64_t layers = std::max<int64_t>(1, (o.bytes + layer / 2) / layer), each = std::max<int64_t>(1, (layers + 3) / 4);  // four shards
  Json map = Json::object();
  for (int64_t first = 0, shard = 1; first < layers; first += each, ++shard) {
    const std::string name = fmt::format("model-{:05}.safetensors", shard);
    const int64_t count = std::min(each, layers - first);
    DDTREE_RETURN_IF_ERROR(write_shard(folder + "/" + name, matrices, first, count));
    for (int64_t l = first; l < first + count; ++l)
      for (const Matrix& m : matrices) map[tensor_name(l, m.name)] = name;
  }
  for (const auto& [name, text] : {std::pair<std::string, std::string>("config.json", "{}"),
                                   {"model.safetensors.index.json", Json{{"metadata", Json::object()}, {"weight_map", map}}.dump()}}) {
    const std::string path = folder + "/" + name;
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) return {Code::kStorage, fmt::format("{}: cannot be written: {}", path, std::strerror(errno))};
    const Status status = write_all(fd, text.data(), text.size(), path);
    close(fd);
    DDTREE_RETURN_IF_ERROR(status);
  }
  sync();  // writing back would take the disk, and the CPU, from what is measured
  return {};
}

// The files from begin to end by `threads` readers into memory of their own.
Result<double> read_files(const std::string& folder, int threads, int64_t block) {
  struct Piece {
    int fd;
    int64_t at, bytes;
  };
  std::vector<Piece> pieces;
  std::vector<int> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() != ".safetensors") continue;
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return Status(Code::kStorage, fmt::format("{}: cannot be read: {}", entry.path().string(), std::strerror(errno)));
    files.push_back(fd);
    const auto size = static_cast<int64_t>(entry.file_size());
    for (int64_t at = 0; at < size; at += block) pieces.push_back({fd, at, std::min(block, size - at)});
  }
  std::atomic<size_t> next{0};
  std::atomic<int> failure{0};
  std::vector<std::vector<std::byte>> buffers(static_cast<size_t>(threads));
  for (auto& b : buffers) b.resize(static_cast<size_t>(block));  // written once: what is timed is reading
  const auto begin = Clock::now();
  std::vector<std::thread> readers;
  for (int t = 0; t < threads; ++t)
    readers.emplace_back([&, t] {
      for (size_t i = next++; i < pieces.size(); i = next++)
        for (int64_t done = 0; done < pieces[i].bytes;) {
          const ssize_t n = pread(pieces[i].fd, buffers[static_cast<size_t>(t)].data() + done, static_cast<size_t>(pieces[i].bytes - done),
                                  pieces[i].at + done);
          if (n <= 0) {
            failure = n < 0 ? errno : EIO;
            return;
          }
          done += n;
        }
    });
  for (std::thread& r : readers) r.join();
  const double seconds = seconds_since(begin);
  for (const int fd : files) close(fd);
  if (failure) return Status(Code::kStorage, fmt::format("{}: cannot be read: {}", folder, std::strerror(failure)));
  return seconds;
}

// Out of the page cache, as far as the system listens (a file system in memory does not): they are written back already.
void drop_from_cache(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
}

struct Loaded {
  double seconds = 0, with_memory = 0;  // reading and placing; and taking the memory before
  double link = 0;                      // bytes a second; 0: none to cross
  int64_t bytes = 0;
  std::string backend;
};

Result<Loaded> load(const ServiceOptions& service, const LoadBenchOptions& o, const Checkpoint& checkpoint) {
  std::unique_ptr<ops::Backend> backend;
  if (service.cuda_device < 0) {
    backend = std::make_unique<ops::cpu::CpuBackend>(ops::cpu::CpuOptions{.threads = service.threads});
  } else {
    auto made = make_cuda_backend(service.cuda_device);
    if (!made) return made.status();
    backend = std::move(*made);
  }
  Loaded out;
  out.backend = backend->name();
  const auto begin = Clock::now();
  backend->begin_loading();
  for (int64_t layer = 0;; ++layer) {
    const auto tensor = [&](const char* name) { return checkpoint.find(tensor_name(layer, name)); };
    if (tensor("q") == nullptr) break;
    // As nn/ packs them.
    for (const std::vector<const char*>& names : {std::vector<const char*>{"q", "k", "v"}, {"o"}, {"gate", "up"}, {"down"}}) {
      std::vector<TensorView> parts;
      for (const char* name : names) {
        if (tensor(name) == nullptr)
          return Status(Code::kBadModel, fmt::format("{}: no tensor {}", checkpoint.location(), tensor_name(layer, name)));
        parts.push_back(*tensor(name));
      }
      if (auto packed = backend->pack_weight(parts); !packed) return packed.status();
    }
    if (const TensorView* norm = tensor("input_norm"))
      if (auto made = backend->norm_weight(*norm, 1.0f); !made) return made.status();
  }
  ops::LoadOptions options{.threads = o.readers, .buffer_bytes = o.buffer_bytes};
  options.progress = [&](const ops::LoadProgress& p) {
    if (isatty(STDERR_FILENO))
      fmt::print(stderr, "\r\033[Kloading, {:.0f} %, {:.1f} GB/s",
                 100.0 * static_cast<double>(p.bytes) / static_cast<double>(std::max<int64_t>(p.total, 1)), p.bytes_per_second() * 1e-9);
    out.bytes = p.total;
    return true;
  };
  const auto reading = Clock::now();
  DDTREE_RETURN_IF_ERROR(backend->finish_loading(options));
  out.seconds = seconds_since(reading), out.with_memory = seconds_since(begin);
  if (isatty(STDERR_FILENO)) fmt::print(stderr, "\r\033[K");
  if (out.bytes == 0)
    return Status(Code::kBadModel, fmt::format("{}: no tensor of a checkpoint that bench --only load wrote", checkpoint.location()));
  DDTREE_RETURN_IF_ERROR(backend->finish());
  auto link = backend->measure_link();
  if (!link) return link.status();
  out.link = *link;
  return out;
}

int64_t peak_resident() {  // bytes
  rusage u{};
  getrusage(RUSAGE_SELF, &u);
  return int64_t{u.ru_maxrss} * 1024;
}

Status measure(const ServiceOptions& service, const LoadBenchOptions& o, const std::string& folder, Json* json) {
  auto source = open_model_source(folder, ModelPart::kTarget);
  if (!source) return source.status();
  auto checkpoint = Checkpoint::open(*source);
  if (!checkpoint) return checkpoint.status();
  const int threads = o.readers > 0 ? o.readers : std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kReaders);
  const int64_t block = o.buffer_bytes > 0 ? o.buffer_bytes : kBlock, before = peak_resident();
  std::vector<double> reads, loads, whole;
  Loaded last;
  if (!o.cold)  // both from the page cache, as far as it holds them
    if (auto first = read_files(folder, threads, block); !first) return first.status();
  for (int i = 0; i < o.repeat; ++i) {
    if (o.cold) drop_from_cache(folder);
    auto read = read_files(folder, threads, block);
    if (!read) return read.status();
    if (o.cold) drop_from_cache(folder);
    auto loaded = load(service, o, **checkpoint);
    if (!loaded) return loaded.status();
    reads.push_back(*read), loads.push_back(loaded->seconds), whole.push_back(loaded->with_memory);
    last = *loaded;
  }
  const auto bytes = static_cast<double>(last.bytes);
  const double read_rate = bytes / median(reads) * 1e-9, load_rate = bytes / median(loads) * 1e-9;
  const int64_t host = peak_resident() - before;
  if (json != nullptr) {
    (*json)["load"] = {{"backend", last.backend},
                       {"folder", folder},
                       {"bytes", last.bytes},
                       {"readers", threads},
                       {"cold", o.cold},
                       {"read_seconds", reads},
                       {"load_seconds", loads},
                       {"load_seconds_with_memory", whole},
                       {"read_gb_per_second", read_rate},
                       {"load_gb_per_second", load_rate},
                       {"ratio", load_rate / read_rate},
                       {"link_gb_per_second", last.link * 1e-9},
                       {"peak_resident_growth_bytes", host}};
  } else {
    fmt::print("{:.2f} GB in {}, {} readers, {}, median of {}\n", bytes * 1e-9, folder, threads,
               o.cold ? "asked out of the page cache before each" : "from the page cache as far as it holds them", o.repeat);
    fmt::print("  reading the files        {:7.2f} GB/s  {:7.2f} s\n", read_rate, median(reads));
    fmt::print("  loading: {:<15.15} {:7.2f} GB/s  {:7.2f} s  ({:.2f} s with taking the memory)\n", last.backend, load_rate, median(loads),
               median(whole));
    if (last.link > 0)
      fmt::print("  the link, pinned memory  {:7.2f} GB/s            (loading over it {:.2f})\n", last.link * 1e-9,
                 load_rate * 1e9 / last.link);
    fmt::print("  loading over reading     {:7.2f}\n  host memory at most      {:+7.0f} MiB\n", load_rate / read_rate,
               static_cast<double>(host) / (1 << 20));
  }
  return {};
}

}  // namespace

Status bench_load(const ServiceOptions& service, const LoadBenchOptions& o, Json* json) {
  std::string folder = o.folder;
  if (folder.empty()) {
    std::error_code error;
    const fs::path temporary = fs::temp_directory_path(error);
    folder = (error ? fs::path("/tmp") : temporary) / fmt::format("ddtree-load-{}", getpid());
  }
  bool written = false;
  Status status = write_checkpoint(folder, o, &written);
  if (status.ok()) status = measure(service, o, folder, json);
  if (written && !o.keep) {
    std::error_code ignored;
    fs::remove_all(folder, ignored);
  }
  return status;
}

}  // namespace ddtree::cli
