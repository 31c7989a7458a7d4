#include "server/units/unit_file.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <cstdint>

namespace ddtree {

namespace {

std::string trimmed(const std::string& s) {
  const size_t a = s.find_first_not_of(" \t\r"), b = s.find_last_not_of(" \t\r");
  return a == std::string::npos ? std::string() : s.substr(a, b - a + 1);
}

bool is_name(const std::string& s) {
  if (s.empty() || std::isdigit(static_cast<unsigned char>(s[0]))) return false;
  return std::all_of(s.begin(), s.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

// The escape after a backslash at text[i]; moves i to its last character. False: there is none like it.
bool unescape(const std::string& text, size_t& i, std::string* out) {
  static const std::pair<char, char> kPlain[] = {{'a', '\a'}, {'b', '\b'}, {'f', '\f'},  {'n', '\n'}, {'r', '\r'}, {'t', '\t'},
                                                 {'v', '\v'}, {'s', ' '},  {'\\', '\\'}, {'"', '"'},  {'\'', '\''}};
  for (const auto& [c, meaning] : kPlain)
    if (text[i] == c) return *out += meaning, true;
  const auto digits = [&](size_t from, size_t count, int base) {
    if (from + count > text.size()) return false;
    int value = 0;
    for (size_t n = from; n < from + count; ++n) {
      const int c = std::tolower(static_cast<unsigned char>(text[n]));
      const int digit = std::isdigit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : 99;
      if (digit >= base) return false;
      value = value * base + digit;
    }
    if (value == 0 || value > 255) return false;
    *out += static_cast<char>(value);
    i = from + count - 1;
    return true;
  };
  return text[i] == 'x' ? digits(i + 1, 2, 16) : digits(i, 3, 8);
}

}  // namespace

Result<UnitFile> UnitFile::parse(const std::string& text, const std::string& path) {
  UnitFile out;
  std::string section, joined;
  int line = 0, begin = 0;
  bool open = false;  // the line before ended in a backslash
  const auto wrong = [&](const std::string& what) { return Status(Code::kUsage, fmt::format("{}:{}: {}", path, begin, what)); };
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // systemd skips it, too
  for (size_t at = text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string raw = text.substr(at, end - at);
    at = end + 1;
    ++line;
    if (!raw.empty() && raw.back() == '\r') raw.pop_back();
    if (raw.find('\0') != std::string::npos) return begin = line, wrong("holds a NUL byte, which ends the line for systemd");
    const std::string bare = trimmed(raw);
    if (!bare.empty() && (bare[0] == '#' || bare[0] == ';')) continue;  // also between continued lines
    if (!open) {
      joined.clear();
      begin = line;
    }
    open = !raw.empty() && raw.back() == '\\';
    if (open) raw.back() = ' ';
    joined += raw;
    if (open && at < text.size()) continue;
    open = false;
    const std::string whole = trimmed(joined);
    if (whole.empty()) continue;
    if (whole[0] == '[') {
      if (whole.back() != ']' || whole.size() < 3) return wrong(fmt::format("found '{}', a section's name ends with ]", whole));
      section = whole.substr(1, whole.size() - 2);
      continue;
    }
    const size_t equal = whole.find('=');
    if (equal == std::string::npos || equal == 0) return wrong(fmt::format("found '{}', a setting is NAME=VALUE", whole));
    if (section.empty()) return wrong(fmt::format("{} stands before any [Section]", trimmed(whole.substr(0, equal))));
    out.settings_.push_back({section, trimmed(whole.substr(0, equal)), trimmed(whole.substr(equal + 1)), path, begin});
  }
  return out;
}

void UnitFile::add(const UnitFile& drop_in) { settings_.insert(settings_.end(), drop_in.settings_.begin(), drop_in.settings_.end()); }

std::vector<UnitSetting> UnitFile::values(const std::string& section, const std::string& name) const {
  std::vector<UnitSetting> out;
  for (const UnitSetting& s : settings_) {
    if (s.section != section || s.name != name) continue;
    if (s.value.empty()) out.clear();
    else out.push_back(s);
  }
  return out;
}

std::string UnitFile::value(const std::string& section, const std::string& name) const {
  const auto all = values(section, name);
  return all.empty() ? std::string() : all.back().value;
}

Result<std::vector<std::string>> split_unit_words(const std::string& text) {
  std::vector<std::string> out;
  std::string word;
  bool inside = false;
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\\') {
      if (++i == text.size()) return Status(Code::kUsage, "a backslash at the end of the line escapes nothing");
      inside = true;
      // An escape that is none stays as it is written; systemd only warns of it.
      if (!unescape(text, i, &word)) word += std::string("\\") + text[i];
    } else if (quote) {
      if (c == quote) quote = 0;
      else word += c;
    } else if (c == '"' || c == '\'') {
      quote = c;
      inside = true;
    } else if (c == ' ' || c == '\t' || c == '\n') {
      if (inside) out.push_back(std::move(word));
      word.clear();
      inside = false;
    } else {
      word += c;
      inside = true;
    }
  }
  if (quote) return Status(Code::kUsage, fmt::format("a {} is open at the end of the line", quote));
  if (inside) out.push_back(std::move(word));
  return out;
}

std::string quote_unit_word(const std::string& word) {
  // A word that is only a semicolon separates commands.
  if (!word.empty() && word != ";" &&
      std::none_of(word.begin(), word.end(), [](unsigned char c) { return c <= ' ' || c == '"' || c == '\'' || c == '\\' || c == 127; }))
    return word;
  std::string out = "\"";
  for (const char c : word) {
    if (c == '\n') out += "\\n";
    else if (c == '\t') out += "\\t";
    else if (c == '"' || c == '\\') out += std::string("\\") + c;
    else if (static_cast<unsigned char>(c) < ' ' || c == 127) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    else out += c;
  }
  return out + "\"";
}

std::string without_specifiers(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '%' ? "%%" : std::string(1, c);
  return out;
}

Result<Variables> parse_environment(const std::string& value) {
  auto words = split_unit_words(value);
  if (!words) return words.status();
  Variables out;
  for (const std::string& word : *words) {
    const size_t equal = word.find('=');
    if (equal == std::string::npos || !is_name(word.substr(0, equal)))
      return Status(Code::kUsage, fmt::format("'{}' is no NAME=VALUE; a value with spaces is quoted as in \"NAME=a b\"", word));
    out.emplace_back(word.substr(0, equal), word.substr(equal + 1));
  }
  return out;
}

Variables parse_environment_file(const std::string& text) {
  Variables out;
  for (size_t at = 0; at < text.size();) {
    std::string line;
    for (bool more = true; more && at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      line += text.substr(at, end - at);
      at = end + 1;
      more = !line.empty() && line.back() == '\\';
      if (more) line.pop_back();
    }
    line = trimmed(line);
    const size_t equal = line.find('=');
    if (line.empty() || line[0] == '#' || line[0] == ';' || equal == std::string::npos) continue;
    const std::string name = trimmed(line.substr(0, equal));
    if (!is_name(name)) continue;
    const std::string raw = trimmed(line.substr(equal + 1));
    // Quotes may stand anywhere in the value; spaces inside it stay outside quotes too.
    std::string value;
    char quote = 0;
    for (size_t i = 0; i < raw.size(); ++i) {
      const char c = raw[i];
      if (c == '\\' && quote != '\'' && i + 1 < raw.size()) value += raw[++i];
      else if (quote && c == quote) quote = 0;
      else if (!quote && (c == '"' || c == '\'')) quote = c;
      else value += c;
    }
    out.emplace_back(name, value);
  }
  return out;
}

std::optional<std::string> find_variable(const Variables& variables, const std::string& name) {
  for (auto it = variables.rbegin(); it != variables.rend(); ++it)
    if (it->first == name) return it->second;
  return std::nullopt;
}

}  // namespace ddtree
