#include "base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace ddtree::log {
namespace {

spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> instance = [] {
    auto made = spdlog::stderr_color_mt("ddtree");
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%L%$ %v");
    return made;
  }();
  return *instance;
}

spdlog::level::level_enum of(Level level) {
  switch (level) {
    case Level::kDebug: return spdlog::level::debug;
    case Level::kInfo: return spdlog::level::info;
    case Level::kWarn: return spdlog::level::warn;
    case Level::kError: return spdlog::level::err;
  }
  return spdlog::level::info;
}

}  // namespace

void set_level(Level level) { logger().set_level(of(level)); }
void write(Level level, std::string_view message) { logger().log(of(level), spdlog::string_view_t(message.data(), message.size())); }

}  // namespace ddtree::log
