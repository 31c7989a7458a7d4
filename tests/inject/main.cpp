// The flag --inject of ddtree-inject, the tests' executable. Everything else is `ddtree`, linked from the same libraries.
#include <utility>

#include "health/phases.h"
#include "inject/faults.h"
#include "server/serve_flags.h"
#include "server/service.h"
#include "store/store.h"

namespace ddtree::inject {
namespace {

const bool registered = [] {
  add_serve_flag({"--inject", "KIND[:after=N,for=N,start=1,every=N,ms=X,seconds=X,token=N]",
                  "a fault on demand, may be given more than once; N counts target passes since the service was first ready",
                  [](const std::string& value, ServeConfig& config) -> Status {
                    auto fault = parse_fault(value);
                    if (!fault) return fault.status();
                    Faults& all = Faults::instance();
                    all.add(*fault);
                    config.service.wrap_executor = [&all](std::unique_ptr<Executor> inner) { return all.wrap(std::move(inner)); };
                    config.service.before_store_commit = [&all] { return all.store_commit(); };
                    config.started = [&all](Service& service) {
                      service.phases().add_listener([&all, &service, first = true](const PhaseState&, const PhaseState& to) mutable {
                        if (!to.serving() || !std::exchange(first, false)) return;
                        all.arm();
                        if (Store* store = service.store()) all.lock_store(store->path());
                      });
                    };
                    return {};
                  }});
  return true;
}();

}  // namespace
}  // namespace ddtree::inject
