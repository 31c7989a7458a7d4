#include "text/tokenizer_split.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/log.h"

namespace ddtree {
namespace {

constexpr size_t kMaxPatternBytes = 1 << 16;  // real ones have a few hundred
constexpr size_t kJitStackBytes = 1 << 20;
constexpr uint32_t kHeapLimitKib = 256 << 10;  // for the interpreter, where the JIT's stack was too small

struct FreePcre {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
  void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
  void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};

Status unsupported(std::string_view pattern, size_t at, std::string_view what) {
  return Status(Code::kBadModel, fmt::format("regular expression \"{}\": {} at byte {}", pattern.substr(0, 200), what, at));
}

std::string error_text(int code) {
  PCRE2_UCHAR buffer[256] = {};
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

// The two dialects agree on what tokenizers use: classes, properties, quantifiers, look-around. Where one spelling means different
// things (\h is a hex digit there and a blank here), it is rewritten, or refused rather than silently read in the wrong way.
Result<std::string> translate_onig_pattern(std::string_view pattern) {
  constexpr std::string_view kWord = "\\p{L}\\p{M}\\p{N}\\p{Pc}";
  if (pattern.size() > kMaxPatternBytes)
    return Status(Code::kBadModel, fmt::format("regular expression of {} bytes; at most {} are read", pattern.size(), kMaxPatternBytes));
  std::string out;
  bool in_class = false;
  size_t class_begin = 0;  // first character of the class's content
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      if (i + 1 == pattern.size()) return unsupported(pattern, i, "ends with a lone backslash");
      const char e = pattern[++i];
      switch (e) {
        case 'h': out += in_class ? "0-9a-fA-F" : "[0-9a-fA-F]"; break;
        case 'H':
          if (in_class) return unsupported(pattern, i, "\\H inside a class is not supported");
          out += "[^0-9a-fA-F]";
          break;
        case 'w': out += in_class ? std::string(kWord) : fmt::format("[{}]", kWord); break;
        case 'W':
          if (in_class) return unsupported(pattern, i, "\\W inside a class is not supported");
          out += fmt::format("[^{}]", kWord);
          break;
        case 'u': {
          if (i + 4 >= pattern.size()) return unsupported(pattern, i, "\\u needs four hexadecimal digits");
          const auto digits = pattern.substr(i + 1, 4);
          if (digits.find_first_not_of("0123456789abcdefABCDEF") != std::string_view::npos)
            return unsupported(pattern, i, "\\u needs four hexadecimal digits");
          out += fmt::format("\\x{{{}}}", digits);
          i += 4;
          break;
        }
        case 'p':
        case 'P':  // \p{^L}: both know it
        case 's':
        case 'S':
        case 'd':
        case 'D':
        case 'n':
        case 'r':
        case 't':
        case 'f':
        case 'v':
        case 'a':
        case 'e':
        case 'x':
          if (e == 'v') out += "\\x0B";  // any vertical space in PCRE2
          else (out += '\\') += e;
          break;
        case 'A':
        case 'Z':
        case 'z':
          if (in_class) return unsupported(pattern, i, fmt::format("\\{} inside a class is not supported", e));
          (out += '\\') += e;
          break;
        default:
          if ((e >= 'a' && e <= 'z') || (e >= 'A' && e <= 'Z') || (e >= '0' && e <= '9'))
            return unsupported(pattern, i, fmt::format("\\{} is not supported", e));
          (out += '\\') += e;
      }
      continue;
    }
    if (in_class) {
      if (c == ']' && i > class_begin) in_class = false;
      if (c == '[' && i + 1 < pattern.size() && pattern[i + 1] == ':') {  // [:alpha:]
        const size_t close = pattern.find(":]", i + 2);
        if (close == std::string_view::npos) return unsupported(pattern, i, "[: without :]");
        out += pattern.substr(i, close + 2 - i);
        i = close + 1;
        continue;
      }
      if (c == '[') return unsupported(pattern, i, "a class inside a class is not supported");
      if (c == '&' && i + 1 < pattern.size() && pattern[i + 1] == '&') return unsupported(pattern, i, "&& in a class is not supported");
      out += c;
      continue;
    }
    if (c == '[') {
      in_class = true;
      class_begin = i + 1;
      out += c;
      if (class_begin < pattern.size() && pattern[class_begin] == '^') {
        out += '^';
        i = class_begin++;
      }
      continue;
    }
    if (c == '(' && i + 1 < pattern.size() && pattern[i + 1] == '*') return unsupported(pattern, i, "(* is not supported");
    if (c == '(' && i + 2 < pattern.size() && pattern[i + 1] == '?') {
      size_t j = i + 2;  // inline options: only i means the same in both
      while (j < pattern.size() &&
             ((pattern[j] >= 'a' && pattern[j] <= 'z') || (pattern[j] >= 'A' && pattern[j] <= 'Z') || pattern[j] == '-')) {
        if (pattern[j] != 'i' && pattern[j] != '-') return unsupported(pattern, j, fmt::format("option ?{} is not supported", pattern[j]));
        ++j;
      }
      if (j == i + 2 && std::string_view(":=!>#<").find(pattern[j]) == std::string_view::npos)
        return unsupported(pattern, i, fmt::format("(?{} is not supported", pattern[j]));
    }
    out += c;
  }
  return out;
}

struct SplitPattern::Impl {
  std::unique_ptr<pcre2_code, FreePcre> code;
  bool jit = false;
  mutable std::atomic<bool> warned{false};
  std::string pattern;  // for the warning
};

struct SplitPattern::Scratch::Impl {
  std::unique_ptr<pcre2_match_data, FreePcre> match{pcre2_match_data_create(1, nullptr)};
  std::unique_ptr<pcre2_match_context, FreePcre> context{pcre2_match_context_create(nullptr)};
  std::unique_ptr<pcre2_jit_stack, FreePcre> stack{pcre2_jit_stack_create(32 << 10, kJitStackBytes, nullptr)};
  std::vector<std::pair<SplitRange, bool>> found;  // (range, is a match), covering the text
};

SplitPattern::Scratch::Scratch() : impl_(std::make_unique<Impl>()) {
  if (impl_->context == nullptr) return;
  if (impl_->stack != nullptr) pcre2_jit_stack_assign(impl_->context.get(), nullptr, impl_->stack.get());
  pcre2_set_heap_limit(impl_->context.get(), kHeapLimitKib);
}
SplitPattern::Scratch::~Scratch() = default;

SplitPattern::SplitPattern(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;
SplitPattern::~SplitPattern() = default;

Result<SplitPattern> SplitPattern::compile(std::string_view onig_pattern) {
  Result<std::string> translated = translate_onig_pattern(onig_pattern);
  if (!translated.ok()) return translated.status();
  std::unique_ptr<pcre2_compile_context, FreePcre> context(pcre2_compile_context_create(nullptr));
  if (context == nullptr) return Status(Code::kEngineFault, "out of memory for the pre-tokenizer's pattern");
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  auto impl = std::make_unique<Impl>();
  impl->pattern = onig_pattern;
  int error = 0;
  PCRE2_SIZE offset = 0;
  // MULTILINE: in Ruby's syntax ^ and $ always match at line ends.
  const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  impl->code.reset(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated->data()), translated->size(), options, &error, &offset, context.get()));
  if (impl->code == nullptr) return unsupported(*translated, offset, error_text(error));
  impl->jit = pcre2_jit_compile(impl->code.get(), PCRE2_JIT_COMPLETE) == 0;
  return SplitPattern(std::move(impl));
}

Result<SplitPattern> SplitPattern::literal(std::string_view text) {
  std::string pattern;
  for (char c : text) {
    if (std::string_view("\\^$.[]|()?*+{}#-&~/").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return compile(pattern);
}

void SplitPattern::split(std::string_view text, SplitBehavior behavior, bool invert, Scratch* scratch, std::vector<SplitRange>* out) const {
  if (text.empty()) return;
  auto& s = *scratch->impl_;
  auto& found = s.found;
  found.clear();
  const auto emit = [out](size_t begin, size_t end) {
    if (begin < end) out->push_back({begin, end});
  };
  // Linear-time patterns need a few steps a byte; a backtracking one is cut off here. PCRE2's default (10 M) would do for short texts only.
  pcre2_set_match_limit(s.context.get(), static_cast<uint32_t>(std::min<size_t>(10'000'000 + 16 * text.size(), 500'000'000)));

  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const PCRE2_SIZE* const match = pcre2_get_ovector_pointer(s.match.get());
  size_t previous = 0;  // everything before is dealt with
  size_t from = 0;      // where the search goes on
  bool any = false;     // an empty match right after another one does not count
  while (from <= text.size()) {
    int rc = impl_->jit ? pcre2_jit_match(impl_->code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK, s.match.get(), s.context.get())
                        : pcre2_match(impl_->code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK, s.match.get(), s.context.get());
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
      rc = pcre2_match(impl_->code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, s.match.get(), s.context.get());
    if (rc < 0) {
      if (rc != PCRE2_ERROR_NOMATCH && !impl_->warned.exchange(true))
        log::warn("the pre-tokenizer's pattern \"{}\" gave up on a text of {} bytes ({}): the rest from byte {} on is taken unsplit",
                  impl_->pattern.substr(0, 120), text.size(), error_text(rc), from);
      break;
    }
    const size_t begin = match[0], end = match[1];
    if (begin == end && any && begin == previous) {
      ++from;
      while (from < text.size() && (static_cast<unsigned char>(text[from]) & 0xC0) == 0x80) ++from;
      continue;
    }
    if (behavior == SplitBehavior::kIsolated) {
      emit(previous, begin);
      emit(begin, end);
    } else {
      if (previous != begin) found.push_back({{previous, begin}, invert});
      found.push_back({{begin, end}, !invert});
    }
    previous = from = end;
    any = true;
  }
  if (behavior == SplitBehavior::kIsolated) return emit(previous, text.size());
  if (previous != text.size()) found.push_back({{previous, text.size()}, invert});

  switch (behavior) {
    case SplitBehavior::kIsolated: break;
    case SplitBehavior::kRemoved:
      for (const auto& [range, is_match] : found)
        if (!is_match) emit(range.begin, range.end);
      break;
    case SplitBehavior::kContiguous: {  // neighbours of one kind become one part
      for (size_t i = 0; i < found.size();) {
        size_t j = i + 1;
        while (j < found.size() && found[j].second == found[i].second) ++j;
        emit(found[i].first.begin, found[j - 1].first.end);
        i = j;
      }
      break;
    }
    case SplitBehavior::kMergedWithPrevious: {
      for (size_t i = 0; i < found.size();) {
        const bool joins = !found[i].second && i + 1 < found.size() && found[i + 1].second;
        emit(found[i].first.begin, found[i + (joins ? 1 : 0)].first.end);
        i += joins ? 2 : 1;
      }
      break;
    }
    case SplitBehavior::kMergedWithNext: {
      // From the right: a match takes the non-match after it, unless a match stands between.
      std::vector<SplitRange> parts;
      for (size_t i = found.size(); i > 0;) {
        const bool joins = !found[i - 1].second && i > 1 && found[i - 2].second;
        parts.push_back({found[i - (joins ? 2 : 1)].first.begin, found[i - 1].first.end});
        i -= joins ? 2 : 1;
      }
      for (size_t i = parts.size(); i > 0; --i) emit(parts[i - 1].begin, parts[i - 1].end);
      break;
    }
  }
}

}  // namespace ddtree
