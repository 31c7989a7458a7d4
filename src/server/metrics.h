// Counters of the HTTP side, and /metrics in Prometheus's text format.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace ddtree {

class Service;

// Cumulative, as Prometheus wants it: counts[i] observations were <= bounds[i].
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);
  void observe(double value);
  void write(std::string* out, const std::string& name, const char* help) const;

 private:
  mutable std::mutex mutex_;
  std::vector<double> bounds_;
  std::vector<int64_t> counts_;  // [bounds + 1], not cumulative
  double sum_ = 0;
};

struct HttpCounters {
  Histogram request_seconds{{0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300}};
  Histogram first_token_seconds{{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30}};
  Histogram token_seconds{{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5}};
  Histogram queue_seconds{{0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60}};

  std::mutex mutex;
  std::map<std::string, int64_t> finished;                 // by finish reason
  std::map<std::pair<std::string, int>, int64_t> replies;  // generation requests by endpoint and HTTP status
};

std::string metrics_text(Service& service);

}  // namespace ddtree
