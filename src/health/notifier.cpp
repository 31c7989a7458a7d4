#include "health/notifier.h"

#include <fmt/core.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>

namespace ddtree {
namespace {

constexpr int64_t kWork = 50'000;  // microseconds of CPU time, or as much reading: less is idling

int64_t number(const char* name) {
  const char* text = std::getenv(name);
  if (!text || !*text) return -1;
  int64_t n = 0;
  const char* const last = text + std::strlen(text);
  const auto [end, code] = std::from_chars(text, last, n);
  return code != std::errc() || end != last ? -1 : n;  // notify_environment_troubles() says so
}

}  // namespace

double Notifier::watchdog_of_environment() {
  const int64_t usec = number("WATCHDOG_USEC"), pid = number("WATCHDOG_PID");
  if (usec <= 0 || (pid > 0 && pid != getpid())) return 0;
  return static_cast<double>(usec) * 1e-6;
}

int64_t Notifier::work_so_far() {
  rusage u{};
  getrusage(RUSAGE_SELF, &u);
  const auto micros = [](const timeval& t) { return static_cast<int64_t>(t.tv_sec) * 1'000'000 + t.tv_usec; };
  // A page that had to come from the disk (weights are mapped) counts as a millisecond, a block read as a tenth of one.
  return micros(u.ru_utime) + micros(u.ru_stime) + u.ru_majflt * 1000 + u.ru_inblock * 100;
}

std::string Notifier::tick(double now, const Input& in) {
  const PhaseState& p = in.phase;
  std::string out;
  const auto line = [&](const std::string& text) { out += (out.empty() ? "" : "\n") + text; };
  if (!begun_) begun_ = true, worked_at_ = moved_at_ = now, work_ = in.work;
  const bool entered = p.sequence != sequence_;
  if (entered || p.progress != progress_) moved_at_ = worked_at_ = now;
  sequence_ = p.sequence;
  progress_ = p.progress;
  if (in.work - work_ >= kWork) work_ = in.work, worked_at_ = now;

  if (p.serving() && !ready_) ready_ = true, line("READY=1");
  if ((p.phase == Phase::kDraining || p.over()) && !stopping_) stopping_ = true, line("STOPPING=1");
  if (std::string words = p.sentence(); words != told_) {
    std::replace(words.begin(), words.end(), '\n', ' ');
    line("STATUS=" + words);
    told_ = p.sentence();
  }
  const bool loading = p.loading() && now - worked_at_ < options_.still_after && now - moved_at_ < options_.longest_phase;
  const bool draining = p.phase == Phase::kDraining && in.alive && now - moved_at_ < options_.drain_seconds + options_.extend_by;
  if ((loading || draining) && (entered || now - extended_at_ >= options_.extend_every)) {
    extended_at_ = now;
    line(fmt::format("EXTEND_TIMEOUT_USEC={:.0f}", options_.extend_by * 1e6));
  }
  // Half of what systemd waits for. A loader that stands still is no better than a stuck round.
  const bool progressing = in.alive && (!p.loading() || loading);
  if (options_.watchdog_seconds > 0 && progressing && now - pinged_at_ >= options_.watchdog_seconds / 2) {
    pinged_at_ = now;
    line("WATCHDOG=1");
  }
  return out;
}

}  // namespace ddtree
