#include "health/degeneracy.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <unordered_set>

namespace ddtree {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// The next character of valid or broken UTF-8: a lead byte with its continuation bytes.
std::string_view character_at(std::string_view text, size_t at) {
  size_t end = at + 1;
  while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) ++end;
  return text.substr(at, end - at);
}

// Without a character at the end whose bytes have not all come.
std::string_view whole_characters(std::string_view text) {
  size_t start = text.size();
  while (start > 0 && text.size() - start < 4 && (static_cast<unsigned char>(text[start - 1]) & 0xC0) == 0x80) --start;
  if (start == 0) return text;
  const auto lead = static_cast<unsigned char>(text[start - 1]);
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
  return text.size() - (start - 1) < length ? text.substr(0, start - 1) : text;
}

bool blank(std::string_view character) {
  return character == " " || character == "\n" || character == "\t" || character == "\r" || character == "\xC2\xA0" ||
         character == "\xE3\x80\x80";
}

// Characters that people draw lines and fill forms with. Box drawing is U+2500 … U+259F, all in E2 94/95/96.
bool draws_rules(std::string_view character) {
  if (character.size() == 1) return std::string_view("-=_*#.~+|:/\\<>^").find(character[0]) != std::string_view::npos;
  return character.size() == 3 && character[0] == '\xE2' && character[1] >= '\x94' && character[1] <= '\x96';
}

struct Period {
  size_t length = 0;  // bytes of the unit; 0: the end repeats nothing
  size_t bytes = 0;   // length of the repeating end
};

// Calls each(period) for every end of text that repeats a unit of at most max_period bytes at least twice, with its shortest unit, until
// each returns true. From the border table (Knuth, Morris, Pratt) of the reversed text: O(n).
template <class Each>
void for_each_tail_period(std::string_view text, size_t max_period, Each each) {
  const size_t n = text.size();
  const auto reversed = [&](size_t i) { return text[n - 1 - i]; };
  std::vector<uint32_t> border(n, 0);  // of the first i + 1 reversed bytes
  for (size_t i = 1; i < n; ++i) {
    uint32_t k = border[i - 1];
    while (k > 0 && reversed(i) != reversed(k)) k = border[k - 1];
    if (reversed(i) == reversed(k)) ++k;
    border[i] = k;
    const Period period{i + 1 - k, i + 1};
    if (period.length <= max_period && period.bytes >= 2 * period.length && each(period)) return;
  }
}

// The longest repeating end.
Period tail_period(std::string_view text, size_t max_period) {
  Period longest;
  for_each_tail_period(text, max_period, [&](const Period& period) {
    longest = period;
    return false;
  });
  return longest;
}

template <class T>
double distinct_ratio(std::span<const T> items) {
  if (items.size() < 8) return 1;
  std::unordered_set<uint64_t> seen;
  for (size_t i = 0; i + 4 <= items.size(); ++i) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t j = i; j < i + 4; ++j) hash = (hash ^ static_cast<uint64_t>(items[j])) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    seen.insert(hash);
  }
  return static_cast<double>(seen.size()) / static_cast<double>(items.size() - 3);
}

std::vector<uint64_t> word_hashes(std::string_view text) {
  std::vector<uint64_t> words;
  uint64_t hash = 0;
  bool inside = false;
  for (const char c : text) {
    if (c == ' ' || c == '\n' || c == '\t' || c == '\r') {
      if (inside) words.push_back(hash);
      inside = false, hash = 0;
      continue;
    }
    inside = true;
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u + 1;
  }
  if (inside) words.push_back(hash);
  return words;
}

std::string quoted(std::string_view text, size_t most = 40) {
  std::string out = "'";
  for (size_t i = 0; i < text.size();) {
    const std::string_view character = character_at(text, i);
    if (out.size() + character.size() > most) return out + "…'";
    if (character == "\n") out += "\\n";
    else if (character == "\t") out += "\\t";
    else out += character;
    i += character.size();
  }
  return out + "'";
}

}  // namespace

DegeneracyFigures measure_text(std::string_view text, std::span<const int32_t> ids) {
  DegeneracyFigures figures;
  std::string_view last;
  int64_t run = 0;
  for (size_t i = 0; i < text.size();) {
    const std::string_view character = character_at(text, i);
    ++figures.characters;
    if (character == kReplacement) ++figures.replacement;
    run = character == last ? run + 1 : 1;
    last = character;
    if (!blank(character)) figures.longest_run = std::max(figures.longest_run, run);
    i += character.size();
  }
  const Period period = tail_period(text.substr(text.size() > 16384 ? text.size() - 16384 : 0), 4096);
  if (period.length > 0) {
    figures.tail_period = static_cast<int64_t>(period.length);
    figures.tail_bytes = static_cast<int64_t>(period.bytes);
    figures.tail_repeats = static_cast<int64_t>(period.bytes / period.length);
  }
  if (!ids.empty()) {
    figures.distinct_4grams = distinct_ratio(ids);
  } else {
    const std::vector<uint64_t> words = word_hashes(text);
    figures.distinct_4grams = distinct_ratio(std::span<const uint64_t>(words));
  }
  return figures;
}

std::string incoherence(std::string_view text, std::span<const int32_t> ids) {
  const size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
  const size_t end = text.find_last_not_of(" \t\r\n");
  const std::string_view body = end == std::string_view::npos ? std::string_view() : text.substr(begin, end + 1 - begin);
  if (body.empty()) return "the answer is empty";
  const DegeneracyFigures figures = measure_text(body, ids);
  if (figures.replacement > 0) return fmt::format("{} replacement characters (U+FFFD): broken token ids", figures.replacement);

  int64_t letters = 0, visible = 0;
  for (size_t i = 0; i < body.size();) {
    const std::string_view character = character_at(body, i);
    i += character.size();
    if (blank(character)) continue;
    ++visible;
    const auto first = static_cast<unsigned char>(character[0]);
    letters += first >= 0x80 || std::isalnum(first) != 0;  // letters of all scripts lie beyond ASCII
  }
  if (letters * 4 < visible) return fmt::format("only {} of {} characters are letters or digits: {}", letters, visible, quoted(body));
  // "Whoooo" is language, eight equal characters in a row that fill the answer are not.
  if (figures.longest_run >= 8 && figures.longest_run * 2 > visible) return fmt::format("mostly one character repeated: {}", quoted(body));
  if (figures.tail_repeats >= 4 && figures.tail_bytes >= 16 && figures.tail_bytes * 10 > static_cast<int64_t>(body.size()) * 6) {
    return fmt::format("mostly {} repeated {} times", quoted(body.substr(body.size() - static_cast<size_t>(figures.tail_period))),
                       figures.tail_repeats);
  }
  if (ids.size() >= 32 && figures.distinct_4grams < 0.3) {
    return fmt::format("only {:.0f} % of the 4-grams of tokens are distinct", figures.distinct_4grams * 100);
  }
  return {};
}

bool DegeneracyDetector::add(std::string_view text, std::span<const int32_t> ids) {
  if (tripped()) return true;
  const size_t keep = tail_bytes();
  const auto keep_ids = static_cast<size_t>(limits_.window_tokens);
  while (!text.empty() || !ids.empty()) {
    // In slices, so that a long run inside one call is not lost between its ends.
    const size_t slice = std::min<size_t>(text.size(), 256), id_slice = std::min<size_t>(ids.size(), 64);
    tail_.append(text.substr(0, slice)), text.remove_prefix(slice);
    ids_.insert(ids_.end(), ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(id_slice)), ids = ids.subspan(id_slice);
    if (tail_.size() > 2 * keep) tail_.erase(0, tail_.size() - keep);
    if (ids_.size() > 2 * keep_ids) ids_.erase(ids_.begin(), ids_.end() - static_cast<std::ptrdiff_t>(keep_ids));
    unchecked_ += slice, unchecked_ids_ += id_slice;
    // The check reads the whole tail: once in 64 bytes keeps it under a microsecond a byte.
    if (unchecked_ >= 64 || unchecked_ids_ >= 64) {
      unchecked_ = unchecked_ids_ = 0;
      check();
      if (tripped()) return true;
    }
  }
  return false;
}

// Twelve repeats of the longest unit fit, and the longest runs in characters of four bytes.
size_t DegeneracyDetector::tail_bytes() const {
  return static_cast<size_t>(std::max({limits_.max_period * 12, limits_.blank_run * 4, limits_.run * 4, limits_.rule_run * 4}));
}

void DegeneracyDetector::check() {
  // One character in a row, from the end.
  std::string_view text = whole_characters(tail_);
  const size_t keep = tail_bytes();
  if (text.size() > keep) text.remove_prefix(text.size() - keep);
  size_t at = text.size();
  const auto previous = [&](size_t from) {
    size_t start = from - 1;
    while (start > 0 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
    return start;
  };
  int64_t run = 0, replacement = 0, seen = 0, blanks = 0;
  std::string_view last;
  bool running = true, only_blanks = true;
  while (at > 0 && (running || only_blanks || seen < 256)) {
    const size_t start = previous(at);
    const std::string_view character = text.substr(start, at - start);
    if (last.empty()) last = character;
    running = running && character == last;
    run += running;
    only_blanks = only_blanks && blank(character);
    blanks += only_blanks;
    if (seen < 256) replacement += character == kReplacement;
    ++seen;
    at = start;
  }
  if (blanks >= limits_.blank_run) {
    reason_ = fmt::format("nothing but white space for {} characters", blanks);
  } else if (!last.empty() && !blank(last) && run >= (draws_rules(last) ? limits_.rule_run : limits_.run)) {
    reason_ = fmt::format("the same character {} {} times in a row", quoted(last), run);
  } else if (replacement >= limits_.replacement) {
    reason_ = fmt::format("{} replacement characters (U+FFFD) among the last 256", replacement);
  }
  if (tripped()) return;

  for_each_tail_period(text, static_cast<size_t>(limits_.max_period), [&](const Period& period) {
    if (period.bytes < static_cast<size_t>(limits_.min_loop_bytes)) return false;
    // How often a unit may come: a laugh or a row of equal cells is short; a sentence nobody needs a dozen times.
    const size_t repeats = period.length <= 8 ? 80 : period.length <= 24 ? 32 : period.length <= 64 ? 14 : 10;
    if (period.bytes / period.length < repeats) return false;
    const std::string_view unit = text.substr(text.size() - period.length);
    if (character_at(unit, 0).size() == unit.size()) return false;  // runs of one character were judged above
    bool words = false;  // a unit of rule characters and white space alone is a rule or an empty table
    for (size_t i = 0; i < unit.size() && !words;) {
      const std::string_view character = character_at(unit, i);
      words = !blank(character) && !draws_rules(character);
      i += character.size();
    }
    if (!words && period.bytes / period.length < repeats * 4) return false;
    reason_ = fmt::format("{} repeated {} times", quoted(unit), period.bytes / period.length);
    return true;
  });
  if (tripped()) return;
  if (static_cast<int64_t>(ids_.size()) >= limits_.window_tokens) {
    const std::span<const int32_t> window(ids_.data() + ids_.size() - static_cast<size_t>(limits_.window_tokens),
                                          static_cast<size_t>(limits_.window_tokens));
    const double ratio = distinct_ratio(window);
    if (ratio < limits_.distinct_4grams) {
      reason_ = fmt::format("only {:.1f} % of the 4-grams of the last {} tokens are distinct", ratio * 100, limits_.window_tokens);
    }
  }
}

}  // namespace ddtree
