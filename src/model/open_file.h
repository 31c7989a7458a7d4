// A file of a checkpoint, kept open to be read piece by piece, and what it was when its header was checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace ddtree {

class OpenFile {
 public:
  // Takes over the descriptor; size and time of change as fstat(2) gave them.
  OpenFile(std::string path, int fd, uint64_t size, int64_t modified_ns)
      : path_(std::move(path)), fd_(fd), size_(size), modified_ns_(modified_ns) {}
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }

  // Reads bytes [offset, offset + bytes) into `to`, from any thread. `what` names the tensor for messages. kBadModel: the file ends
  // before, so it was cut after its header had been checked; kStorage with the system's reason: it cannot be read.
  // Unlike a mapping, a file that is cut meanwhile ends in an error, not in a signal; and what was read is not in this process's memory.
  Status read(uint64_t offset, size_t bytes, std::byte* to, std::string_view what) const;

  // Reads of these bytes will follow, in pieces: a hint, which makes a disk read them at once. They only pass through the system's cache.
  void will_read(uint64_t offset, size_t bytes) const;

  // kBadModel with both sizes or times where the file is no longer what was opened: what was read may be of two files.
  Status unchanged() const;

 private:
  std::string path_;
  int fd_;
  uint64_t size_;
  int64_t modified_ns_;
};

}  // namespace ddtree
