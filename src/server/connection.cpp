#include "server/connection.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace ddtree {

namespace {

constexpr int kReadTimeoutMs = 30'000;                         // a client that stops in the middle of its request
constexpr int kWriteTimeoutMs = 30'000;                        // a client that stops reading its reply
constexpr auto kCrowdedIdle = std::chrono::milliseconds(500);  // kept alive at least so long, however many wait
constexpr uint64_t kWakeKey = 0;

// poll() on one descriptor, EINTR aside. Returns revents, 0 on time-out.
short poll_one(int fd, short events, int timeout_ms) {
  pollfd p{fd, events, 0};
  int rc;
  do {
    rc = ::poll(&p, 1, timeout_ms);
  } while (rc < 0 && errno == EINTR);
  return rc > 0 ? p.revents : static_cast<short>(0);
}

void address(int fd, bool remote, std::string* ip, int* port) {
  sockaddr_storage a{};
  socklen_t size = sizeof a;
  const int rc = remote ? getpeername(fd, reinterpret_cast<sockaddr*>(&a), &size) : getsockname(fd, reinterpret_cast<sockaddr*>(&a), &size);
  if (rc != 0) return;
  char text[INET6_ADDRSTRLEN] = "";
  if (a.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&a);
    inet_ntop(AF_INET, &v4->sin_addr, text, sizeof text);
    *port = ntohs(v4->sin_port);
  } else if (a.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&a);
    inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof text);
    *port = ntohs(v6->sin6_port);
  }
  *ip = text;
}

}  // namespace

PeerWatcher::PeerWatcher() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event e{};
  e.events = EPOLLIN;
  e.data.u64 = kWakeKey;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &e);
  thread_ = std::thread([this] { run(); });
}

PeerWatcher::~PeerWatcher() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_, &one, sizeof one);
  thread_.join();
  ::close(epoll_);
  ::close(wake_);
}

uint64_t PeerWatcher::add(std::shared_ptr<Watch> watch) {
  std::lock_guard lock(mutex_);
  const uint64_t key = next_++;
  epoll_event e{};
  e.events = EPOLLRDHUP | EPOLLONESHOT;  // EPOLLHUP and EPOLLERR come unasked
  e.data.u64 = key;
  const int fd = watch->fd;
  watches_[key] = std::move(watch);
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &e);
  return key;
}

void PeerWatcher::remove(uint64_t key, int fd) {
  std::lock_guard lock(mutex_);
  epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
  watches_.erase(key);
}

void PeerWatcher::run() {
  epoll_event events[64];
  for (;;) {
    const int n = epoll_wait(epoll_, events, 64, -1);
    for (int i = 0; i < n; ++i) {
      if (events[i].data.u64 == kWakeKey) return;
      std::shared_ptr<Watch> watch;
      {
        std::lock_guard lock(mutex_);
        const auto it = watches_.find(events[i].data.u64);
        if (it != watches_.end()) watch = it->second;
      }
      if (!watch) continue;
      std::lock_guard lock(watch->mutex);
      watch->gone = true;
      if (watch->callback) watch->callback();
      watch->callback = nullptr;
    }
  }
}

ConnectionStream::ConnectionStream(int fd, PeerWatcher& watcher) : fd_(fd), watcher_(watcher), buffer_(16384) {}

ConnectionStream::~ConnectionStream() {
  on_close(nullptr);
  if (key_) watcher_.remove(key_, fd_);
}

ConnectionStream*& ConnectionStream::current() {
  static thread_local ConnectionStream* stream = nullptr;
  return stream;
}

bool ConnectionStream::wait_for_request(int seconds, const std::atomic<bool>& stopping, std::atomic<int>& crowded) {
  if (begin_ < end_) return true;
  const auto begin = std::chrono::steady_clock::now(), deadline = begin + std::chrono::seconds(seconds);
  while (!stopping) {
    if (poll_one(fd_, POLLIN, 100) != 0) {
      char c;
      return ::recv(fd_, &c, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
    }
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) return false;
    // Idle connections that fill all threads must not keep out who asks for something, health probes not least. One goes for each that
    // waits.
    if (int n = crowded; n > 0 && now - begin >= kCrowdedIdle && crowded.compare_exchange_strong(n, n - 1)) return false;
  }
  return false;
}

void ConnectionStream::linger() {
  ::shutdown(fd_, SHUT_WR);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  char scrap[16384];
  while (std::chrono::steady_clock::now() < deadline) {
    if (poll_one(fd_, POLLIN, 200) == 0) continue;
    if (::recv(fd_, scrap, sizeof scrap, MSG_DONTWAIT) <= 0) return;
  }
}

bool ConnectionStream::closed() const {
  if (watch_) {
    std::lock_guard lock(watch_->mutex);
    if (watch_->gone) return true;
  }
  return (poll_one(fd_, POLLRDHUP, 0) & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
}

void ConnectionStream::on_close(std::function<void()> callback) {
  if (!watch_) {
    if (!callback) return;
    watch_ = std::make_shared<PeerWatcher::Watch>();
    watch_->fd = fd_;
    watch_->callback = std::move(callback);
    key_ = watcher_.add(watch_);
    return;
  }
  std::lock_guard lock(watch_->mutex);
  if (watch_->gone && callback) {
    callback();
    return;
  }
  watch_->callback = std::move(callback);
}

bool ConnectionStream::is_readable() const { return begin_ < end_ || (poll_one(fd_, POLLIN, kReadTimeoutMs) & POLLIN) != 0; }

bool ConnectionStream::is_writable() const {
  const short got = poll_one(fd_, POLLOUT, kWriteTimeoutMs);
  return (got & POLLOUT) != 0 && (got & (POLLERR | POLLHUP)) == 0;
}

ssize_t ConnectionStream::read(char* data, size_t size) {
  if (begin_ == end_) {
    if (!is_readable()) return -1;
    begin_ = end_ = 0;
    // Bodies go straight to their buffer, lines through ours.
    char* into = size >= buffer_.size() ? data : buffer_.data();
    ssize_t n;
    do {
      n = ::recv(fd_, into, size >= buffer_.size() ? size : buffer_.size(), 0);
    } while (n < 0 && errno == EINTR);
    if (n <= 0 || into == data) return n;
    end_ = static_cast<size_t>(n);
  }
  const size_t n = std::min(size, end_ - begin_);
  std::memcpy(data, buffer_.data() + begin_, n);
  begin_ += n;
  return static_cast<ssize_t>(n);
}

ssize_t ConnectionStream::write(const char* data, size_t size) {
  if (!is_writable()) return -1;
  ssize_t n;
  do {
    n = ::send(fd_, data, size, MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
  return n;
}

void ConnectionStream::get_remote_ip_and_port(std::string& ip, int& port) const { address(fd_, true, &ip, &port); }
void ConnectionStream::get_local_ip_and_port(std::string& ip, int& port) const { address(fd_, false, &ip, &port); }

bool ElasticPool::enqueue(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  if (stopping_ || tasks_.size() >= static_cast<size_t>(most_)) return false;
  tasks_.push_back(std::move(task));
  if (static_cast<size_t>(idle_) >= tasks_.size()) {
    wake_.notify_one();
  } else if (threads_ < most_) {
    ++threads_;
    std::thread([this] { work(); }).detach();
  }
  count_crowd();
  return true;
}

void ElasticPool::count_crowd() { crowded_ = threads_ < most_ ? 0 : std::max(0, static_cast<int>(tasks_.size()) - idle_); }

void ElasticPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    const bool woken = wake_.wait_for(lock, std::chrono::seconds(60), [&] { return stopping_ || !tasks_.empty(); });
    --idle_;
    if (tasks_.empty() && (stopping_ || !woken)) break;
    const auto task = std::move(tasks_.front());
    tasks_.pop_front();
    count_crowd();
    lock.unlock();
    task();
    lock.lock();
  }
  --threads_;
  done_.notify_all();
}

void ElasticPool::shutdown() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  wake_.notify_all();
  done_.wait(lock, [&] { return threads_ == 0; });
}

}  // namespace ddtree
