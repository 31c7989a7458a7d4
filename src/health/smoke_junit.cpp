#include "health/smoke_junit.h"

#include <fmt/core.h>

#include <ctime>

namespace ddtree {
namespace {

// Text and attribute values alike: quotes and line ends are references, so that attributes keep them.
std::string escaped(const std::string& text, bool attribute) {
  std::string out;
  const auto bad = [&] { out += "\xEF\xBF\xBD"; };
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x80) {
      ++i;
      switch (byte) {
        case '<': out += "&lt;"; break;
        case '>': out += "&gt;"; break;
        case '&': out += "&amp;"; break;
        case '"': out += "&quot;"; break;
        case '\r': out += "&#13;"; break;
        case '\n': out += attribute ? "&#10;" : "\n"; break;
        case '\t': out += attribute ? "&#9;" : "\t"; break;
        default:
          if (byte < 0x20 || byte == 0x7F) bad();
          else out += static_cast<char>(byte);
      }
      continue;
    }
    const size_t length = byte >= 0xF0 && byte < 0xF5 ? 4 : byte >= 0xE0 && byte < 0xF0 ? 3 : byte >= 0xC2 && byte < 0xE0 ? 2 : 0;
    uint32_t code = length == 4 ? byte & 0x07u : length == 3 ? byte & 0x0Fu : byte & 0x1Fu;
    size_t have = length > 0 ? 1 : 0;
    while (have > 0 && have < length && i + have < text.size() && (static_cast<unsigned char>(text[i + have]) & 0xC0) == 0x80)
      code = code << 6 | (static_cast<unsigned char>(text[i + have++]) & 0x3Fu);
    const bool whole = length > 0 && have == length &&
                       code >= (length == 4   ? 0x10000u
                                : length == 3 ? 0x800u
                                              : 0x80u) &&
                       code <= 0x10FFFF && (code < 0xD800 || code > 0xDFFF) && code != 0xFFFE && code != 0xFFFF;
    if (whole) out += text.substr(i, length);
    else bad();
    i += whole ? length : 1;
  }
  return out;
}

std::string time_stamp(int64_t ms) {
  const auto seconds = static_cast<time_t>(ms / 1000);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  return text;
}

}  // namespace

std::string smoke_junit(const SmokeReport& report, const std::string& what, bool strict) {
  int failures = 0, skipped = 0;
  const auto fails = [&](const SmokeCheckResult& c) {
    return c.verdict == SmokeVerdict::kFail || (strict && c.verdict == SmokeVerdict::kWarn);
  };
  for (const SmokeCheckResult& c : report.checks) failures += fails(c), skipped += c.verdict == SmokeVerdict::kSkip;
  const double seconds = static_cast<double>(report.finished_ms - report.started_ms) / 1000;
  std::string out = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";
  out += fmt::format("<testsuites tests=\"{0}\" failures=\"{1}\" errors=\"0\" skipped=\"{2}\" time=\"{3:.3f}\">\n", report.checks.size(),
                     failures, skipped, seconds);
  out += fmt::format(
      "  <testsuite name=\"ddtree smoke\" tests=\"{}\" failures=\"{}\" errors=\"0\" skipped=\"{}\" time=\"{:.3f}\" timestamp=\"{}\">\n"
      "    <properties>\n",
      report.checks.size(), failures, skipped, seconds, time_stamp(report.started_ms));
  const auto property = [&](const char* name, const std::string& value) {
    out += fmt::format("      <property name=\"{}\" value=\"{}\"/>\n", name, escaped(value, true));
  };
  property("asked", what);
  property("ddtree", DDTREE_VERSION);
  property("verdict", smoke_verdict_name(report.verdict));
  property("message", report.message);
  if (!report.warning.empty()) property("warning", report.warning);
  property("tokens_per_second", fmt::format("{:.2f}", report.tokens_per_second));
  property("tokens_per_round", fmt::format("{:.3f}", report.acceptance));
  out += "    </properties>\n";
  for (const SmokeCheckResult& c : report.checks) {
    std::string name = c.name;
    for (const std::string& part : {c.mode, c.input_id})
      if (!part.empty()) name += " " + part;
    out += fmt::format("    <testcase classname=\"ddtree.smoke.{}\" name=\"{}\" time=\"{:.3f}\">\n", escaped(c.name, true),
                       escaped(name, true), c.milliseconds / 1000);
    if (fails(c))
      out += fmt::format("      <failure message=\"{}\" type=\"{}\">{}</failure>\n", escaped(c.message, true), escaped(c.name, true),
                         escaped(c.message, false));
    else if (c.verdict == SmokeVerdict::kSkip) out += fmt::format("      <skipped message=\"{}\"/>\n", escaped(c.message, true));
    std::string said = c.output;
    if (!c.unit.empty()) said += fmt::format("{}{:.4g} {}", said.empty() ? "" : "\n", c.figure, c.unit);
    if (!fails(c) && c.verdict != SmokeVerdict::kSkip && !c.message.empty()) said += (said.empty() ? "" : "\n") + c.message;
    if (!said.empty()) out += fmt::format("      <system-out>{}</system-out>\n", escaped(said, false));
    out += "    </testcase>\n";
  }
  return out + "  </testsuite>\n</testsuites>\n";
}

}  // namespace ddtree
