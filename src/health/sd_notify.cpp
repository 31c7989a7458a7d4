#include "health/sd_notify.h"

#include <fmt/core.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace ddtree {

namespace {

constexpr size_t kLongest = sizeof sockaddr_un::sun_path - 1;

// Empty, or what is wrong with the socket's name.
std::string wrong_socket(const std::string& path) {
  if (path[0] != '/' && path[0] != '@') return "must be an absolute path, or begin with @ for the abstract name space";
  if (path.size() > kLongest) return fmt::format("is {} bytes long, and at most {} fit a socket's address", path.size(), kLongest);
  return {};
}

}  // namespace

std::vector<std::string> notify_environment_troubles() {
  std::vector<std::string> out;
  const auto set = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value ? value : "";
  };
  if (const std::string path = set("NOTIFY_SOCKET"); !path.empty())
    if (const std::string wrong = wrong_socket(path); !wrong.empty())
      out.push_back(fmt::format("NOTIFY_SOCKET is \"{}\", but {}: nobody will hear READY=1", path.substr(0, 200), wrong));
  const auto whole = [&](const char* name, const char* what, const char* otherwise) {
    const std::string text = set(name);
    int64_t n = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), n);
    if (!text.empty() && (code != std::errc() || end != text.data() + text.size() || n <= 0))
      out.push_back(fmt::format("{} is \"{}\", but must be {}: {}", name, text.substr(0, 200), what, otherwise));
  };
  whole("WATCHDOG_USEC", "a whole number of microseconds above 0, like 60000000", "no WATCHDOG=1 will be sent");
  whole("WATCHDOG_PID", "a process id", "it is taken as not set");
  return out;
}

bool sd_notify(const std::string& state, std::string* why) {
  const char* name = std::getenv("NOTIFY_SOCKET");
  const std::string path = name ? name : "";
  if (path.empty() || !wrong_socket(path).empty()) return false;
  const auto failed = [&] {
    if (why) *why = fmt::format("NOTIFY_SOCKET={}: {}", path, std::strerror(errno));
    return false;
  };
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (path[0] == '@') address.sun_path[0] = 0;  // the abstract name space
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return failed();
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  const ssize_t sent = ::sendto(fd, state.data(), state.size(), MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&address), size);
  if (sent != static_cast<ssize_t>(state.size())) failed();
  ::close(fd);
  return sent == static_cast<ssize_t>(state.size());
}

}  // namespace ddtree
