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
constexpr size_t kBuffer = 16384;
constexpr size_t kMaxHead = 128 << 10;  // httplib bounds each line, not how many there are

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
      const bool gone = (events[i].events & (EPOLLHUP | EPOLLERR)) != 0;
      if (!gone && !watch->half) {
        watch->half = true;
        if (watch->callback) watch->callback(Peer::Close::kHalf);
        // From now on only a reset: EPOLLRDHUP stays true for good.
        std::lock_guard watches(mutex_);
        epoll_event e{};
        e.events = EPOLLONESHOT;
        e.data.u64 = events[i].data.u64;
        if (watches_.contains(events[i].data.u64)) epoll_ctl(epoll_, EPOLL_CTL_MOD, watch->fd, &e);
      } else if (gone) {
        watch->gone = true;
        if (watch->callback) watch->callback(Peer::Close::kGone);
        watch->callback = nullptr;
      }
    }
  }
}

ConnectionStream::ConnectionStream(int fd, PeerWatcher& watcher, const Limits& limits)
    : fd_(fd), watcher_(watcher), limits_(limits), buffer_(kBuffer) {}

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

ConnectionStream::Head ConnectionStream::read_head(const std::atomic<bool>& stopping) {
  reply_begun_ = body_too_slow_ = interim_allowed_ = false;
  body_bytes_ = 0;
  const auto deadline = std::chrono::steady_clock::now() + limits_.head;
  // What came with the request before goes to the front.
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
  constexpr std::string_view kEnd = "\r\n\r\n";
  for (size_t looked = 0;;) {
    const std::string_view have(buffer_.data(), end_);
    if (const size_t at = have.find(kEnd, looked); at != std::string_view::npos) {
      interim_allowed_ = have.substr(0, have.find("\r\n")).ends_with("HTTP/1.1");
      drop_range(at + 2);
      body_bytes_ = static_cast<int64_t>(end_ - std::string_view(buffer_.data(), end_).find(kEnd) - kEnd.size());
      body_begin_ = std::chrono::steady_clock::now();
      return Head::kComplete;
    }
    looked = end_ < kEnd.size() ? 0 : end_ - (kEnd.size() - 1);
    if (end_ >= kMaxHead) return Head::kTooLarge;
    if (end_ == buffer_.size()) buffer_.resize(std::min(kMaxHead, 2 * buffer_.size()));
    for (;;) {
      const auto now = std::chrono::steady_clock::now();
      if (stopping) return Head::kStopping;
      if (now >= deadline) return Head::kTooSlow;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - now).count();
      if (poll_one(fd_, POLLIN, static_cast<int>(std::clamp<int64_t>(left, 1, 100))) != 0) break;
    }
    const ssize_t n = ::recv(fd_, buffer_.data() + end_, buffer_.size() - end_, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      body_begin_ = std::chrono::steady_clock::now();
      return Head::kClosed;
    }
    end_ += static_cast<size_t>(n);
  }
}

// head_end: where the empty line begins.
void ConnectionStream::drop_range(size_t head_end) {
  for (size_t line = 0; line < head_end;) {
    const size_t next = std::string_view(buffer_.data(), end_).find("\r\n", line) + 2;
    if (line > 0 && next - line > 6 && ::strncasecmp(buffer_.data() + line, "range:", 6) == 0) {
      std::memmove(buffer_.data() + line, buffer_.data() + next, end_ - next);
      end_ -= next - line;
      head_end -= next - line;
    } else {
      line = next;
    }
  }
}

std::chrono::milliseconds ConnectionStream::read_time() const {
  const auto allowed = limits_.body_grace + std::chrono::milliseconds(body_bytes_ * 1000 / limits_.body_bytes_a_second);
  const auto used = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - body_begin_);
  return std::clamp(allowed - used, std::chrono::milliseconds(0), std::chrono::milliseconds(kReadTimeoutMs));
}

Peer::Ask ConnectionStream::ask() {
  if (reply_begun_) return Ask::kWrite;
  constexpr std::string_view kInterim = "HTTP/1.1 100 Continue\r\n\r\n";
  if (!interim_allowed_ || !is_writable()) return Ask::kCannot;
  // A whole line or nothing: a reply has to follow it.
  if (::send(fd_, kInterim.data(), kInterim.size(), MSG_NOSIGNAL | MSG_DONTWAIT) != static_cast<ssize_t>(kInterim.size()))
    return Ask::kCannot;
  return Ask::kAsked;
}

void ConnectionStream::on_close(std::function<void(Close)> callback) {
  if (callback) reply_begun_ = false;  // what a handler that only begins may have seen written is an interim reply
  if (!watch_) {
    if (!callback) return;
    watch_ = std::make_shared<PeerWatcher::Watch>();
    watch_->fd = fd_;
    watch_->callback = std::move(callback);
    key_ = watcher_.add(watch_);
    return;
  }
  std::lock_guard lock(watch_->mutex);
  if (callback && watch_->half) callback(Close::kHalf);
  if (callback && watch_->gone) return callback(Close::kGone);
  watch_->callback = std::move(callback);
}

bool ConnectionStream::is_readable() const {
  return begin_ < end_ || (poll_one(fd_, POLLIN, static_cast<int>(read_time().count())) & POLLIN) != 0;
}

bool ConnectionStream::is_writable() const {
  const short got = poll_one(fd_, POLLOUT, kWriteTimeoutMs);
  return (got & POLLOUT) != 0 && (got & (POLLERR | POLLHUP)) == 0;
}

ssize_t ConnectionStream::read(char* data, size_t size) {
  if (begin_ == end_) {
    // A byte that comes after the time is up is late too.
    if (read_time().count() == 0 || !is_readable()) {
      body_too_slow_ = true;
      return -1;
    }
    begin_ = end_ = 0;
    // Bodies go straight to their buffer, lines through ours.
    char* into = size >= kBuffer ? data : buffer_.data();
    ssize_t n;
    do {
      n = ::recv(fd_, into, size >= kBuffer ? size : buffer_.size(), 0);
    } while (n < 0 && errno == EINTR);
    if (n > 0) body_bytes_ += n;
    if (n <= 0 || into == data) return n;
    end_ = static_cast<size_t>(n);
  }
  const size_t n = std::min(size, end_ - begin_);
  std::memcpy(data, buffer_.data() + begin_, n);
  begin_ += n;
  return static_cast<ssize_t>(n);
}

ssize_t ConnectionStream::write(const char* data, size_t size) {
  if (mute) return -1;
  reply_begun_ = true;
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
