// ddtree serve: the server, from flags to exit code.
#include <fmt/core.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <thread>

#include "base/log.h"
#include "cli/command.h"
#include "health/phases.h"
#include "health/sd_notify.h"
#include "server/http_server.h"
#include "server/routes.h"
#include "server/serve_flags.h"
#include "server/service.h"

namespace ddtree::cli {
namespace {

// Signals are taken by one thread that waits for them: handlers could do next to nothing.
sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
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

int serve(int argc, char** argv) {
  auto parsed = parse_serve_flags(std::vector<std::string>(argv + 1, argv + argc));
  if (!parsed) return fail(parsed.status());
  ServeConfig& config = *parsed;
  if (config.help) return std::fputs(serve_help().c_str(), stdout), 0;
  log::set_level(config.log_level);
  for (const std::string& note : config.notes) log::info("{}", note);
  raise_file_limit();
  // A thread for every stream that may run or wait, and some for probes and the dashboard.
  config.http.max_connections = config.service.engine.max_running + config.service.engine.max_queue + 128;

  const sigset_t signals = stop_signals();
  // The loader's word that it failed is a signal of its own: it must not pass for a user's second one.
  sigset_t heard = signals;
  sigaddset(&heard, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &heard, nullptr);

  Service service(config.service);
  HttpServer http(config.http);
  register_routes(http, service);
  // The port comes first: a second server on it must not touch the first one's history.
  if (Status s = http.start(); !s.ok()) return fail(s);
  if (Status s = service.open_store(); !s.ok()) return fail(s);
  service.phases().add_listener([](const PhaseState&, const PhaseState& to) {
    // systemd hears READY=1 when the smoke test has passed (or was waived), never before.
    if (to.serving()) sd_notify("READY=1");
    if (to.phase == Phase::kDraining) sd_notify("STOPPING=1");
    sd_status(to.sentence());
  });
  sd_status(service.phases().state().sentence());

  // Loading runs beside the signals, so that a stop is heard at any time.
  std::atomic<bool> loaded{false};
  Status load_status;
  // What a browser on this machine opens.
  std::string shown = config.http.host;
  if (shown == "0.0.0.0" || shown == "::") shown = "127.0.0.1";
  if (shown.find(':') != std::string::npos) shown = "[" + shown + "]";
  const std::string address = fmt::format("http://{}:{}", shown, http.port());
  const pid_t self = getpid();
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

  int signal = 0;
  do {
    sigwait(&heard, &signal);
  } while (signal == SIGUSR1 && !loaded);  // somebody else's
  const bool failed = loaded && !load_status.ok();
  if (!failed) {
    log::info("{}: draining; a second one stops at once", signal == SIGINT ? "SIGINT" : "SIGTERM");
    // The second signal does not wait for anything, not even for a loader inside a long pass.
    std::thread([signals] {
      int second = 0;
      sigwait(&signals, &second);
      std::fprintf(stderr, "ddtree serve: stopped at once\n");
      _exit(0);
    }).detach();
    service.drain(config.service.drain_seconds);
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
