// Logging: one line a fact, to standard error, through spdlog (kept out of this header: it is heavy).
#pragma once

#include <fmt/core.h>

#include <string_view>

namespace ddtree::log {

enum class Level { kDebug, kInfo, kWarn, kError };

void set_level(Level level);  // default kInfo
void write(Level level, std::string_view message);

template <class... A>
void debug(fmt::format_string<A...> format, A&&... a) {
  write(Level::kDebug, fmt::format(format, std::forward<A>(a)...));
}
template <class... A>
void info(fmt::format_string<A...> format, A&&... a) {
  write(Level::kInfo, fmt::format(format, std::forward<A>(a)...));
}
template <class... A>
void warn(fmt::format_string<A...> format, A&&... a) {
  write(Level::kWarn, fmt::format(format, std::forward<A>(a)...));
}
template <class... A>
void error(fmt::format_string<A...> format, A&&... a) {
  write(Level::kError, fmt::format(format, std::forward<A>(a)...));
}

}  // namespace ddtree::log
