#include "ops/weight_loader.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <tuple>

#include "model/open_file.h"

namespace ddtree::ops {
namespace {

constexpr auto kTell = std::chrono::milliseconds(100);
constexpr int64_t kAlign = 64;  // of buffers, and the least size of one
constexpr int64_t kRows = 32;   // rows that stay together where a buffer holds so many: a panel of the CPU's layout

// One read: a tensor and everyone who wants it in one form.
struct Source {
  std::vector<const LoadItem*> items;
  int64_t row = 1;  // elements that should stay together
};

struct Piece {
  int32_t source;
  int64_t first, count;  // elements
};

int64_t element_bytes(Element e) { return e == Element::kFloat32 ? 4 : 2; }

// Sources in the order of the files, so that a disk is read forwards. Files come in the order of their first use.
std::vector<Source> sources_of(const std::vector<LoadItem>& items) {
  std::map<const OpenFile*, size_t> order;
  for (const LoadItem& item : items) order.emplace(item.from.on_disk, order.size());
  std::vector<const LoadItem*> sorted;
  for (const LoadItem& item : items) sorted.push_back(&item);
  const auto key = [&](const LoadItem* i) {
    const TensorView& t = i->from;
    const int64_t first = t.blocks.empty() ? 0 : t.blocks.front().first;
    return std::tuple(order.at(t.on_disk), t.on_disk ? t.offset : 0, t.on_disk ? nullptr : t.data, t.fill.seed, first, t.bytes,
                      static_cast<int>(i->element), i->add);
  };
  // Two parts of one tensor may begin together and be as large, and are not the same.
  const auto same = [&](const LoadItem* a, const LoadItem* b) { return key(a) == key(b) && a->from.blocks == b->from.blocks; };
  std::stable_sort(sorted.begin(), sorted.end(), [&](const LoadItem* a, const LoadItem* b) { return key(a) < key(b); });
  std::vector<Source> out;
  for (const LoadItem* item : sorted) {
    if (item->from.elements() == 0) continue;
    if (out.empty() || !same(out.back().items.front(), item)) out.emplace_back();
    out.back().items.push_back(item);
    if (item->from.shape.size() > 1) out.back().row = item->from.shape.back();
  }
  return out;
}

class Run {
 public:
  Run(const std::vector<LoadItem>& items, LoadSink* sink, const LoadOptions& options)
      : sources_(sources_of(items)), sink_(sink), options_(options), begin_(std::chrono::steady_clock::now()) {
    int64_t largest = 0;
    for (const Source& s : sources_) {
      const LoadItem& item = *s.items.front();
      largest = std::max(largest, item.from.elements() * std::max<int64_t>(element_bytes(item.element), 4));
    }
    buffer_bytes_ = std::max(std::min(options.buffer_bytes, (largest + kAlign - 1) / kAlign * kAlign) / kAlign * kAlign, kAlign);
    for (size_t s = 0; s < sources_.size(); ++s) {
      const LoadItem& item = *sources_[s].items.front();
      // Narrow elements are widened where they lie: they are read to the buffer's end and written from its begin.
      int64_t most = buffer_bytes_ / std::max<int64_t>(element_bytes(item.element), static_cast<int64_t>(dtype_size(item.from.dtype)));
      for (const int64_t whole : {kRows * sources_[s].row, sources_[s].row})
        if (most > whole) {
          most -= most % whole;
          break;
        }
      const int64_t elements = item.from.elements();
      total_ += static_cast<int64_t>(item.from.bytes);
      for (int64_t first = 0; first < elements; first += most)
        pieces_.push_back({static_cast<int32_t>(s), first, std::min(most, elements - first)});
      if (item.from.on_disk) files_.insert(item.from.on_disk);
    }
  }

  Status run() {
    for (const OpenFile* f : files_) DDTREE_RETURN_IF_ERROR(f->unchanged());
    const int threads =
        static_cast<int>(std::clamp<int64_t>(options_.threads, 1, std::max<int64_t>(static_cast<int64_t>(pieces_.size()), 1)));
    const int buffers =
        static_cast<int>(std::clamp<int64_t>(options_.buffers, 1, std::max<int64_t>(static_cast<int64_t>(pieces_.size()), 1)));
    Result<std::byte*> memory = sink_->open(buffers, buffer_bytes_);
    if (!memory.ok()) return memory.status();
    memory_ = *memory;
    for (int b = 0; b < buffers; ++b) free_.push_back(b);
    std::vector<std::thread> readers;
    try {
      while (static_cast<int>(readers.size()) < threads) readers.emplace_back([this] { reader(); });
    } catch (const std::system_error& e) {  // a limit on threads: slower with those there are
      if (readers.empty()) fail({Code::kTemporary, fmt::format("loading weights: no thread could be started: {}", e.what())});
    }
    running_ = static_cast<int>(readers.size());  // readers begin only with tell()
    tell();
    for (std::thread& t : readers) t.join();
    // Also after an error: no copy may still read a buffer that close() takes away.
    for (const int b : in_flight_) fail(sink_->wait(b));
    sink_->close();
    for (const OpenFile* f : files_) fail(f->unchanged());
    if (error_.ok() && options_.progress) options_.progress({total_, total_, seconds()});
    return error_;
  }

 private:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

  void fail(Status status) {
    if (status.ok()) return;
    const std::lock_guard lock(mutex_);
    if (error_.ok()) error_ = std::move(status);
    failed_ = true;
    changed_.notify_all();
  }

  // Waits for the readers, and says how far they are. The last word, that all is there, is run()'s.
  void tell() {
    std::unique_lock lock(mutex_);
    started_ = true;
    changed_.notify_all();
    int64_t told = -1;
    while (running_ > 0) {
      ended_.wait_for(lock, kTell, [&] { return running_ == 0; });
      const int64_t now = std::min(done_.load(), total_ - 1);
      if (failed_ || now < told || !options_.progress) continue;
      told = now;
      lock.unlock();
      const bool on = options_.progress({now, total_, seconds()});
      lock.lock();
      if (!on && error_.ok()) {
        error_ = {Code::kCancelled, "loading weights was stopped"};
        failed_ = true;
        changed_.notify_all();
      }
    }
  }

  // A buffer that nothing reads any more; -1: the load has failed.
  Result<int> take_buffer() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (failed_) return -1;
      if (!free_.empty()) {
        const int b = free_.back();
        free_.pop_back();
        return b;
      }
      if (!in_flight_.empty()) {
        const int b = in_flight_.front();  // copies end in their order: the oldest is the next
        in_flight_.pop_front();
        lock.unlock();
        Status s = sink_->wait(b);
        if (s.ok()) return b;
        return s;
      }
      changed_.wait(lock);
    }
  }

  Status read(const Piece& piece, int buffer) {
    const Source& source = sources_[piece.source];
    const LoadItem& item = *source.items.front();
    const auto in = static_cast<int64_t>(dtype_size(item.from.dtype)), out = element_bytes(item.element);
    std::byte* begin = memory_ + buffer * buffer_bytes_;
    // Where the element grows, reading to the end and widening from the front never writes what is still to be read: element i is
    // written up to out·(i+1), element i+1 is read from room - in·(count-i-1), and room >= out·count.
    const int64_t room = out * piece.count;
    std::byte* raw = in < out ? begin + room - in * piece.count : begin;
    DDTREE_RETURN_IF_ERROR(read_bytes(item.from, piece.first * in, piece.count * in, raw));
    if (item.element == Element::kFloat32) {
      for (int64_t i = 0; i < piece.count; ++i) {
        float v;
        widen(item.from.dtype, raw + i * in, 1, &v);
        v += item.add;
        std::memcpy(begin + i * out, &v, sizeof v);
      }
    }
    for (const LoadItem* to : source.items) DDTREE_RETURN_IF_ERROR(sink_->put(buffer, begin, *to, piece.first, piece.count));
    done_ += piece.count * in;
    return {};
  }

  void reader() {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return started_; });
    }
    Status status = sink_->begin_thread();
    while (status.ok()) {
      // The buffer first: then pieces are taken in order, and one that is taken is read at once.
      Result<int> buffer = take_buffer();
      if (!buffer.ok()) status = buffer.status();
      if (!status.ok() || *buffer < 0) break;
      const size_t piece = next_++;
      const bool any = piece < pieces_.size();
      if (any) status = read(pieces_[piece], *buffer);
      const std::lock_guard lock(mutex_);
      // Also after an error: earlier puts of this piece may be under way.
      if (any) in_flight_.push_back(*buffer);
      else free_.push_back(*buffer);
      changed_.notify_one();
      if (!any) break;
    }
    fail(std::move(status));
    const std::lock_guard lock(mutex_);
    --running_;
    ended_.notify_all();
  }

  const std::vector<Source> sources_;
  LoadSink* sink_;
  const LoadOptions& options_;
  const std::chrono::steady_clock::time_point begin_;
  int64_t buffer_bytes_ = 0, total_ = 0;
  std::vector<Piece> pieces_;
  std::set<const OpenFile*> files_;
  std::byte* memory_ = nullptr;
  std::atomic<size_t> next_{0};
  std::atomic<int64_t> done_{0};

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_, ended_;
  std::vector<int> free_;
  std::deque<int> in_flight_;
  int running_ = 0;
  bool started_ = false, failed_ = false;
  Status error_;
};

}  // namespace

Status WeightLoader::run(LoadSink* sink, const LoadOptions& options) {
  const std::vector<LoadItem> items = std::move(items_);
  items_.clear();
  if (items.empty()) {
    if (options.progress) options.progress({0, 0, 0});
    return {};
  }
  for (const LoadItem& item : items) {
    const DType d = item.from.dtype;
    const bool narrow = item.element == Element::kBfloat16;
    if ((d != DType::kBf16 && d != DType::kF16 && d != DType::kF32) || (narrow && (d != DType::kBf16 || item.add != 0)))
      return {Code::kEngineFault,
              fmt::format("tensor {} of {} cannot be loaded as {}", item.from.name, dtype_name(d), narrow ? "BF16" : "F32")};
  }
  return Run(items, sink, options).run();
}

}  // namespace ddtree::ops
