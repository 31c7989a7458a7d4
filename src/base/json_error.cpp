#include "base/json_error.h"

namespace ddtree {

namespace {

bool take(std::string_view* text, std::string_view prefix) {
  if (!text->starts_with(prefix)) return false;
  text->remove_prefix(prefix.size());
  return true;
}

}  // namespace

std::string json_error_text(std::string_view what) {
  if (what.starts_with("[json.exception."))
    if (const size_t end = what.find("] "); end != std::string_view::npos) what.remove_prefix(end + 2);
  std::string place;
  if (take(&what, "parse error")) {
    if (const size_t colon = what.find(": "); take(&what, " at ") && colon != std::string_view::npos) {
      place = std::string(what.substr(0, colon - 4)) + ": ";
      what.remove_prefix(colon - 4 + 2);
    } else {
      take(&what, ": ");
    }
  }
  // "syntax error while parsing object key - " names the grammar's rule, not the writer's mistake.
  if (what.starts_with("syntax error"))
    if (const size_t dash = what.find(" - "); dash != std::string_view::npos) what.remove_prefix(dash + 3);
  std::string text(what);
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) c = ' ';
  if (text.size() > 200) text = text.substr(0, 100) + " ... " + text.substr(text.size() - 95);
  return place + text;
}

}  // namespace ddtree
