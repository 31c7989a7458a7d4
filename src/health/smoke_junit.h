// A smoke report as JUnit XML, which CI systems show: one test case a check.
#pragma once

#include <string>

#include "health/smoke.h"

namespace ddtree {

// `what`: the model or address that was asked, a property of the suite. Always well-formed XML 1.0 in UTF-8, whatever the model wrote:
// bytes and characters that XML cannot hold become U+FFFD. A check that only warns is a pass with its message in system-out, unless
// `strict`: then it is a failure.
std::string smoke_junit(const SmokeReport& report, const std::string& what, bool strict = false);

}  // namespace ddtree
