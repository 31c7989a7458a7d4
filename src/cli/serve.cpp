// ddtree serve: the server, from flags to exit code.
#include <fmt/core.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <mutex>
#include <thread>

#include "base/log.h"
#include "cli/command.h"
#include "health/notifier.h"
#include "health/phases.h"
#include "health/sd_notify.h"
#include "server/http_server.h"
#include "server/routes.h"
#include "server/serve_flags.h"
#include "server/service.h"

namespace ddtree::cli {
namespace {

const char* signal_name(int signal) {
  switch (signal) {
    case SIGTERM: return "SIGTERM";
    case SIGINT: return "SIGINT";
    case SIGHUP: return "SIGHUP";
    case SIGUSR2: return "SIGUSR2";
    case SIGALRM: return "SIGALRM";
    case SIGVTALRM: return "SIGVTALRM";
    case SIGIO: return "SIGIO";
    case SIGPWR: return "SIGPWR";
    default: return "a signal";
  }
}

// Signals are taken by one thread that waits for them: handlers could do next to nothing. Those that would end the process without a drain,
// and that nobody means for it, are heard too.
sigset_t heard_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGIO, SIGPWR}) sigaddset(&set, signal);
  // A terminal that was closed asks for an end, unless nohup said otherwise.
  struct sigaction old {};
  if (sigaction(SIGHUP, nullptr, &old) == 0 && old.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);
  return set;
}

// Waits for a signal that asks for an end; SIGUSR1 counts where `woken` says that it is this process's own word.
template <class Woken>
int wait_for_stop(const sigset_t& heard, Woken woken) {
  for (;;) {
    int signal = 0;
    if (sigwait(&heard, &signal) != 0) continue;
    if (signal == SIGTERM || signal == SIGINT || signal == SIGHUP) return signal;
    if (signal == SIGUSR1 && woken()) return signal;
    log::warn("{} was sent and is ignored; SIGTERM stops", signal == SIGUSR1 ? "SIGUSR1" : signal_name(signal));
  }
}

void raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
}

int fail(const Status& status) {
  std::fprintf(stderr, "ddtree serve: %s\n", status.message().c_str());
  return exit_code(status.code() == Code::kInvalidArgument ? Code::kUsage : status.code());
}

// Tells systemd how things stand: a few times a second, and at once where a phase is entered, before anything else comes of it.
class Herald {
 public:
  Herald(Service& service, double drain_seconds)
      : service_(service),
        notifier_({.watchdog_seconds = Notifier::watchdog_of_environment(), .drain_seconds = drain_seconds}),
        listener_(service_.phases().add_listener([this](const PhaseState&, const PhaseState&) { tell(); })),
        thread_([this] { run(); }) {}
  ~Herald() {
    service_.phases().remove_listener(listener_);
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

 private:
  void tell() {
    const std::lock_guard lock(telling_);
    const double now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    const std::string lines = notifier_.tick(now, {service_.phases().state(), service_.alive(), Notifier::work_so_far()});
    std::string why;
    if (!lines.empty() && !sd_notify(lines, &why) && !why.empty() && !told_) {
      told_ = true;
      log::warn("{}: nobody hears what systemd should know", why);
    }
  }
  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      lock.unlock();
      tell();
      lock.lock();
      wake_.wait_for(lock, std::chrono::milliseconds(200), [this] { return stop_; });
    }
  }

  Service& service_;
  std::mutex telling_;
  Notifier notifier_;
  bool told_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  const int listener_;
  std::thread thread_;
};

// The end of a process whose engine may never answer again. Requests that can still be told get `seconds` for it.
[[noreturn]] void leave_at_once(Service& service, int code, const std::string& reason, double seconds) {
  static std::atomic<bool> done{false};  // read by a thread that may outlive this call
  if (seconds > 0)
    std::thread([&service] {
      service.drain(0);
      done = true;
    }).detach();
  for (int i = 0; i < static_cast<int>(seconds * 20) && !done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  // Not even the history may hold the end up.
  std::thread([code] {
    std::this_thread::sleep_for(std::chrono::seconds(5));
    _exit(code);
  }).detach();
  service.abandon(code, reason);
  _exit(code);
}

int serve(int argc, char** argv) {
  auto parsed = parse_serve_flags(std::vector<std::string>(argv + 1, argv + argc));
  if (!parsed) return fail(parsed.status());
  ServeConfig& config = *parsed;
  if (config.help) return std::fputs(serve_help().c_str(), stdout), 0;
  log::set_level(config.log_level);
  for (const std::string& note : config.notes) log::info("{}", note);
  for (const std::string& trouble : notify_environment_troubles()) log::warn("{}", trouble);
  raise_file_limit();
  // A thread for every stream that may run or wait, and some for probes and the dashboard.
  config.http.max_connections = config.service.engine.max_running + config.service.engine.max_queue + 128;

  // SIGUSR1 is the loader's word that it failed, and the watch's that it gave up: it must not pass for a user's second signal.
  const sigset_t heard = heard_signals();
  pthread_sigmask(SIG_BLOCK, &heard, nullptr);

  Service service(config.service);
  if (config.started) config.started(service);
  HttpServer http(config.http);
  register_routes(http, service);
  // The port comes first: a second server on it must not touch the first one's history.
  if (Status s = http.start(); !s.ok()) return fail(s);
  if (Status s = service.open_store(); !s.ok()) return fail(s);
  const Herald herald(service, config.service.drain_seconds);

  // Loading runs beside the signals, so that a stop is heard at any time.
  std::atomic<bool> loaded{false};
  Status load_status;
  // What a browser on this machine opens.
  std::string shown = config.http.host;
  if (shown == "0.0.0.0" || shown == "::") shown = "127.0.0.1";
  if (shown.find(':') != std::string::npos) shown = "[" + shown + "]";
  const std::string address = fmt::format("http://{}:{}", shown, http.port());
  const pid_t self = getpid();
  // The fault ladder's last step.
  std::atomic<bool> gave_up{false};
  Status why;
  service.on_give_up([&](const Status& status) {
    why = status;
    gave_up = true;
    kill(self, SIGUSR1);
  });
  std::thread loader([&] {
    load_status = service.load();
    loaded = true;
    if (load_status.ok()) {
      const auto serving = service.serving();
      log::info("{} is served at {}/v1 (mode {}, context {}); the dashboard is at {}/{}", serving->info.name, address,
                mode_name(serving->engine->options().mode), serving->info.context_length, address,
                service.smoke_skipped() ? "; the smoke test was skipped: nothing has shown that this model writes sensible text" : "");
    } else {
      kill(self, SIGUSR1);  // wakes the wait below
    }
  });

  const int signal = wait_for_stop(heard, [&] { return gave_up || (loaded && !load_status.ok()); });
  if (gave_up) {
    const int code = fail(why);
    leave_at_once(service, code, "failed: " + why.message(), 3);
  }
  const bool failed = loaded && !load_status.ok();
  if (!failed) {
    log::info("{}: draining; a second one stops at once", signal_name(signal));
    // The second signal does not wait for anything, not even for a loader inside a long pass.
    std::thread([&service, &gave_up, &why, heard, begin = std::chrono::steady_clock::now()] {
      // A terminal's end is told more than once; and what signals a process and its group (timeout, some shells) is one wish, not two.
      constexpr auto kSameWish = std::chrono::milliseconds(100);
      for (;;) {
        const int again = wait_for_stop(heard, [&gave_up] { return gave_up.load(); });
        if (gave_up || (again != SIGHUP && std::chrono::steady_clock::now() - begin > kSameWish)) break;
      }
      if (gave_up) leave_at_once(service, fail(why), "failed: " + why.message(), 0);
      std::fprintf(stderr, "ddtree serve: stopped at once\n");
      leave_at_once(service, 0, "asked to stop; a second signal stopped it at once", 0);
    }).detach();
    // An engine inside a round that never ends cannot even cancel: what was asked for, an end within the drain's time, comes all the same.
    std::atomic<bool> drained{false};
    std::thread drainer([&] {
      service.drain(config.service.drain_seconds);
      drained = true;
    });
    constexpr double kCutOffSeconds = 5;  // for answers that are cut off at the limit to be told so
    const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(config.service.drain_seconds + kCutOffSeconds);
    while (!drained && std::chrono::steady_clock::now() < limit) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (!drained) {
      log::warn("a round does not end, and its requests with it: stopped without them");
      leave_at_once(service, 0, "asked to stop; a round that did not end was cut off", 0);
    }
    drainer.join();
  }
  loader.join();
  http.stop();
  if (failed && load_status.code() != Code::kCancelled) {
    const int code = fail(load_status);
    service.close(code, "failed: " + load_status.message());
    return code;
  }
  service.close(0, "asked to stop");
  return 0;
}

}  // namespace

DDTREE_COMMAND("serve", "serve a model over the OpenAI API, with the dashboard", serve);

}  // namespace ddtree::cli
