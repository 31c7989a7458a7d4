#include "model/open_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ddtree {

OpenFile::~OpenFile() { close(fd_); }

Status OpenFile::read(uint64_t offset, size_t bytes, std::byte* to, std::string_view what) const {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = pread(fd_, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return {Code::kStorage, fmt::format("{}: tensor {}: {} bytes at {} cannot be read: {}", path_, what, bytes - done, offset + done,
                                          std::strerror(errno))};
    if (n == 0) {
      // Other readers may meet the end first, and behind it: the size is asked for.
      struct stat now {};
      const uint64_t end = fstat(fd_, &now) == 0 ? static_cast<uint64_t>(now.st_size) : offset + done;
      return {Code::kBadModel,
              fmt::format("{}: tensor {}: the file ends at {}, but held {} bytes when its header was checked: it was cut or written anew "
                          "while it was read; load again when it is whole",
                          path_, what, end, size_)};
    }
    done += static_cast<size_t>(n);
  }
  return {};
}

void OpenFile::will_read(uint64_t offset, size_t bytes) const {
  posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);  // a hint: errors change nothing
}

Status OpenFile::unchanged() const {
  struct stat now {};
  if (fstat(fd_, &now) != 0) return {Code::kStorage, fmt::format("{}: cannot be read: {}", path_, std::strerror(errno))};
  const auto size = static_cast<uint64_t>(now.st_size);
  if (size != size_)
    return {Code::kBadModel,
            fmt::format("{}: {} bytes when its header was checked, {} now: it changed while it was read; load again when it "
                        "is whole",
                        path_, size_, size)};
  const int64_t modified = int64_t{now.st_mtim.tv_sec} * 1'000'000'000 + now.st_mtim.tv_nsec;
  if (modified != modified_ns_)
    return {Code::kBadModel, fmt::format("{}: written to {:.3f} s after its header was checked, while it was read; load again when nothing "
                                         "writes to it",
                                         path_, static_cast<double>(modified - modified_ns_) * 1e-9)};
  return {};
}

}  // namespace ddtree
