// One client connection and the watch over it. Private to http_server.cpp (it includes httplib).
#pragma once

#include <httplib.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "server/http_server.h"

namespace ddtree {

// One thread that waits in epoll for clients to go away, so that a request ends within a round although nobody reads or writes its
// socket meanwhile.
class PeerWatcher {
 public:
  PeerWatcher();
  ~PeerWatcher();

  struct Watch {
    std::mutex mutex;  // held while the callback runs
    std::function<void(Peer::Close)> callback;
    bool half = false, gone = false;
    int fd = -1;
  };
  uint64_t add(std::shared_ptr<Watch> watch);
  void remove(uint64_t key, int fd);

 private:
  void run();
  int epoll_ = -1, wake_ = -1;
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Watch>> watches_;
  uint64_t next_ = 1;
  std::thread thread_;
};

class ConnectionStream final : public httplib::Stream, public Peer {
 public:
  // How long a client may take. Totals: a byte now and then does not extend them.
  struct Limits {
    std::chrono::milliseconds head;
    std::chrono::milliseconds body_grace;
    int64_t body_bytes_a_second;
  };

  ConnectionStream(int fd, PeerWatcher& watcher, const Limits& limits);
  ~ConnectionStream() override;

  // The connection whose request this thread handles.
  static ConnectionStream*& current();

  // Waits for the first byte of the next request. False: closed, idle too long, or stopping.
  // `crowded`: connections that wait for a thread; an idle one gives its own up for one of them.
  bool wait_for_request(int seconds, const std::atomic<bool>& stopping, std::atomic<int>& crowded);
  // Then its line and headers, all of them, so that they have one time limit. `Range` is taken out: a server may ignore it, generated
  // replies have no ranges, and httplib refuses what it does not understand before anybody is asked. kClosed: the client ended before the
  // head did; what came is there to be read, and so is refused as broken.
  enum class Head : uint8_t { kComplete, kClosed, kTooSlow, kTooLarge, kStopping };
  Head read_head(const std::atomic<bool>& stopping);
  bool body_too_slow() const { return body_too_slow_; }
  // After a refusal that left part of the body unread: reads it away for a moment, or the client would see a reset, not the reply.
  void linger();
  bool close_after = false;  // end the connection after this reply
  bool mute = false;         // nothing is written any more: the client is taken for gone

  void on_close(std::function<void(Close)> callback) override;
  Ask ask() override;

  bool is_readable() const override;
  bool is_writable() const override;
  ssize_t read(char* data, size_t size) override;
  ssize_t write(const char* data, size_t size) override;
  void get_remote_ip_and_port(std::string& ip, int& port) const override;
  void get_local_ip_and_port(std::string& ip, int& port) const override;
  // httplib asks only in order to refuse what select() cannot hold; everything here polls.
  socket_t socket() const override { return 0; }

 private:
  int fd_;
  PeerWatcher& watcher_;
  std::shared_ptr<PeerWatcher::Watch> watch_;
  uint64_t key_ = 0;
  void drop_range(size_t head_end);
  std::chrono::milliseconds read_time() const;  // left for the next read of a body

  const Limits limits_;
  std::vector<char> buffer_;
  size_t begin_ = 0, end_ = 0;
  // Of the request at hand.
  std::chrono::steady_clock::time_point body_begin_;
  int64_t body_bytes_ = 0;
  bool body_too_slow_ = false, reply_begun_ = false, interim_allowed_ = false;
};

// A thread for every busy connection, made when needed and given back when idle.
class ElasticPool final : public httplib::TaskQueue {
 public:
  // crowded: kept at the number of tasks that no thread can take.
  ElasticPool(int most, std::atomic<int>& crowded) : most_(most), crowded_(crowded) {}
  bool enqueue(std::function<void()> task) override;
  void shutdown() override;

 private:
  void work();
  void count_crowd();  // mutex_ held
  const int most_;
  std::atomic<int>& crowded_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<std::function<void()>> tasks_;
  int threads_ = 0, idle_ = 0;
  bool stopping_ = false;
};

}  // namespace ddtree
