#include "server/units/shell_script.h"

#include <fmt/core.h>

#include <cctype>
#include <map>

namespace ddtree {

namespace {

bool name_start(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_'; }
bool name_char(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// A dollar that is one: doubled, as command lines of units write it.
std::string literal(const std::string& s) {
  std::string out;
  for (const char c : s) out += c == '$' ? "$$" : std::string(1, c);
  return out;
}

class Parser {
 public:
  Parser(const std::string& text, const std::string& where, const std::function<std::optional<std::string>(const std::string&)>& lookup)
      : text_(text), where_(where), lookup_(lookup) {}

  Result<std::vector<ShellCommand>> parse() {
    while (at_ < text_.size()) DDTREE_RETURN_IF_ERROR(step());
    DDTREE_RETURN_IF_ERROR(end_command());
    return std::move(commands_);
  }

 private:
  Status wrong(const std::string& what) const {
    return {Code::kUsage, fmt::format("{}:{}: {}; put the server's command itself into ExecStart=", where_, line_, what)};
  }
  bool looking_at(const char* s) const { return text_.compare(at_, std::char_traits<char>::length(s), s) == 0; }

  Status step() {
    const char c = text_[at_];
    if (c == '\\' && at_ + 1 < text_.size() && text_[at_ + 1] == '\n') return at_ += 2, ++line_, Status();
    if (c == ' ' || c == '\t' || c == '\r') return ++at_, Status();
    if (c == '#') {
      at_ = std::min(text_.find('\n', at_), text_.size());
      return {};
    }
    if (c == '\n' || c == ';' || looking_at("&&")) {
      DDTREE_RETURN_IF_ERROR(end_command());
      if (c == '\n') ++line_;
      at_ += c == '&' ? 2 : 1;
      return {};
    }
    if (looking_at("||")) {
      DDTREE_RETURN_IF_ERROR(end_command());
      at_ += 2;
      fallback_ = true;
      return {};
    }
    if (c == '|') return wrong("a pipe needs a shell");
    if (c == '&' && !looking_at("&>")) return wrong("a command in the background (&) is not what systemd watches");
    if (c == '(' || c == ')') return wrong("a subshell or a function needs a shell");
    const size_t redirect = redirection_length();
    if (redirect) return take_redirection(redirect);
    return take_word();
  }

  // "2>>", ">", "&>", "<" …: how long the operator is; 0: there is none here.
  size_t redirection_length() const {
    size_t n = at_;
    if (text_[n] == '&') ++n;
    else
      while (n < text_.size() && std::isdigit(static_cast<unsigned char>(text_[n]))) ++n;
    if (n >= text_.size() || (text_[n] != '>' && text_[n] != '<')) return 0;
    ++n;
    while (n < text_.size() && (text_[n] == '>' || text_[n] == '<' || text_[n] == '&' || text_[n] == '|')) ++n;
    return n - at_;
  }

  Status take_redirection(size_t length) {
    std::string op = text_.substr(at_, length);
    if (op.find("<<") != std::string::npos) return wrong("a here-document needs a shell");
    const size_t begin = at_;
    at_ += length;
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t')) ++at_;
    std::vector<std::string> target;
    bool assignment = false;
    DDTREE_RETURN_IF_ERROR(read_word(&target, &assignment));
    if (target.size() != 1) return wrong(fmt::format("{} needs one file", op));
    current_.redirections.push_back(op + target[0]);
    note(begin);
    return {};
  }

  Status take_word() {
    const size_t begin = at_;
    std::vector<std::string> words;
    bool assignment = false;
    DDTREE_RETURN_IF_ERROR(read_word(&words, &assignment));
    const std::string raw = text_.substr(begin, at_ - begin);
    if (current_.words.empty()) {
      for (const char* keyword :
           {"if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac", "function", "{", "}", "[[", "!"})
        if (raw == keyword) return wrong(fmt::format("'{}' needs a shell", keyword));
      if (assignment) {
        const size_t equal = words[0].find('=');
        current_.assignments.emplace_back(words[0].substr(0, equal), words[0].substr(equal + 1));
        note(begin);
        return {};
      }
    }
    if (current_.words.empty()) current_.line = line_;
    current_.words.insert(current_.words.end(), words.begin(), words.end());
    note(begin);
    return {};
  }

  void note(size_t begin) {
    if (!current_.text.empty()) current_.text += ' ';
    for (size_t i = begin; i < at_; ++i)
      if (text_[i] != '\n' && !(text_[i] == '\\' && i + 1 < at_ && text_[i + 1] == '\n')) current_.text += text_[i];
  }

  // One word of the text: none where it was an unquoted variable with nothing in it, several where one had spaces.
  Status read_word(std::vector<std::string>* out, bool* assignment) {
    std::string word;
    bool inside = false, plain_so_far = true;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\\') {
        if (at_ + 1 == text_.size()) return wrong("a backslash at the end escapes nothing");
        if (text_[at_ + 1] == '\n') {
          at_ += 2, ++line_;
          continue;
        }
        word += literal(text_.substr(at_ + 1, 1));
        at_ += 2;
        inside = true;
        plain_so_far = false;
      } else if (c == '\'') {
        const size_t close = text_.find('\'', at_ + 1);
        if (close == std::string::npos) return wrong("a ' is open at the end");
        for (size_t i = at_ + 1; i < close; ++i) line_ += text_[i] == '\n';
        word += literal(text_.substr(at_ + 1, close - at_ - 1));
        at_ = close + 1;
        inside = true;
        plain_so_far = false;
      } else if (looking_at("\"$@\"")) {
        at_ += 4;  // no arguments: no word
      } else if (c == '"') {
        ++at_;
        inside = true;
        plain_so_far = false;
        DDTREE_RETURN_IF_ERROR(read_quoted(&word));
      } else if (c == '`' || looking_at("$(")) {
        DDTREE_RETURN_IF_ERROR(read_substitution(&word));
        inside = true;
        plain_so_far = false;
      } else if (c == '$') {
        std::string value;
        bool known = false;
        DDTREE_RETURN_IF_ERROR(read_variable(&value, *assignment, &known));
        if (known && !*assignment) {  // split at spaces; an assignment is not
          for (size_t i = 0; i < value.size(); ++i) {
            if (!std::isspace(static_cast<unsigned char>(value[i]))) {
              word += value[i];
              inside = true;
            } else if (inside) {
              out->push_back(std::move(word));
              word.clear();
              inside = false;
            }
          }
        } else {
          word += value;
          inside = inside || !value.empty();
        }
        plain_so_far = false;
      } else if (std::isspace(static_cast<unsigned char>(c)) || c == ';' || c == '&' || c == '|' || c == '(' || c == ')' || c == '<' ||
                 c == '>') {
        break;
      } else {
        if (c == '=' && plain_so_far && !word.empty() && name_start(word[0]) && word.find_first_of("=-./") == std::string::npos) {
          bool name = true;
          for (const char n : word) name = name && name_char(n);
          *assignment = *assignment || name;
        }
        word += c;
        inside = true;
        ++at_;
      }
    }
    if (inside || *assignment) out->push_back(std::move(word));
    return {};
  }

  Status read_quoted(std::string* word) {
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '"') return ++at_, Status();
      if (c == '\n') ++line_;
      if (c == '`' || looking_at("$(")) {
        DDTREE_RETURN_IF_ERROR(read_substitution(word));
        --at_;
        continue;
      }
      if (c == '$') {
        bool known = false;
        DDTREE_RETURN_IF_ERROR(read_variable(word, true, &known));
        --at_;
        continue;
      }
      if (c == '\\' && at_ + 1 < text_.size()) {
        const char next = text_[at_ + 1];
        if (next == '\n') {
          ++at_, ++line_;
          continue;
        }
        if (next == '"' || next == '\\' || next == '$' || next == '`') {
          *word += literal(std::string(1, next));
          ++at_;
          continue;
        }
      }
      *word += c;
    }
    return wrong("a \" is open at the end");
  }

  // $NAME, ${NAME}, ${NAME:-word}, ${NAME-word}; appends its value, or ${NAME} where that is the unit's or not known.
  Status read_variable(std::string* out, bool quoted, bool* known) {
    size_t n = at_ + 1;
    const bool braces = n < text_.size() && text_[n] == '{';
    if (braces) ++n;
    const size_t begin = n;
    if (n < text_.size() && name_start(text_[n]))
      while (n < text_.size() && name_char(text_[n])) ++n;
    const std::string name = text_.substr(begin, n - begin);
    if (name.empty()) {
      if (!braces && (n >= text_.size() || text_[n] == ' ' || text_[n] == '"')) return *out += "$$", ++at_, Status();
      if (looking_at("$@") || looking_at("$*")) return *known = true, at_ += 2, Status();  // a unit's script has no arguments
      return wrong(fmt::format("'{}' is no variable that can be read here", text_.substr(at_, 3)));
    }
    std::optional<std::string> value;
    if (const auto it = own_.find(name); it != own_.end()) value = it->second;
    // A variable of the unit stays one: its value may be a secret, and may change. Only words that the shell would make of it are written
    // out.
    else if (const auto outside = lookup_(name); outside && !outside->empty())
      value = !quoted && outside->find_first_of(" \t\n") != std::string::npos ? literal(*outside) : "${" + name + "}";
    else if (outside) value = "";
    if (braces) {
      const bool colon = n < text_.size() && text_[n] == ':';
      if (colon) ++n;
      if (n < text_.size() && text_[n] == '-') {
        const size_t close = text_.find('}', n);
        const std::string otherwise = close == std::string::npos ? "" : text_.substr(n + 1, close - n - 1);
        if (close == std::string::npos || otherwise.find_first_of("$`\"'") != std::string::npos)
          return wrong(fmt::format("${{{}:-…}} is too deep to be read here", name));
        if (!value || (colon && value->empty())) value = otherwise;
        n = close;
      }
      if (n >= text_.size() || text_[n] != '}') return wrong(fmt::format("${{{}…}} is no form that can be read here", name));
      ++n;
    }
    at_ = n;
    *known = value.has_value();
    *out += value ? *value : "${" + name + "}";
    return {};
  }

  // $(…) and `…`: kept as they are written. Whoever wants to use the word sees that nobody knows what it is.
  Status read_substitution(std::string* out) {
    const size_t begin = at_;
    int depth = 0;
    if (text_[at_] == '`') {
      at_ = text_.find('`', at_ + 1);
      if (at_ == std::string::npos) return at_ = begin, wrong("a ` is open at the end");
      ++at_;
    } else {
      for (++at_; at_ < text_.size(); ++at_) {
        if (text_[at_] == '(') ++depth;
        if (text_[at_] == ')' && --depth == 0) break;
      }
      if (at_ == text_.size()) return at_ = begin, wrong("a $( is open at the end");
      ++at_;
    }
    for (size_t i = begin; i < at_; ++i) line_ += text_[i] == '\n';
    out->append(text_, begin, at_ - begin);
    return {};
  }

  Status end_command() {
    if (current_.words.empty() && current_.assignments.empty() && current_.redirections.empty()) return current_ = {}, Status();
    // Alone, or after export: for the rest of the script.
    if (current_.words.empty())
      for (const auto& [name, value] : current_.assignments) own_[name] = value;
    if (!current_.words.empty() && current_.words[0] == "export")
      for (size_t i = 1; i < current_.words.size(); ++i)
        if (const size_t equal = current_.words[i].find('='); equal != std::string::npos)
          own_[current_.words[i].substr(0, equal)] = current_.words[i].substr(equal + 1);
    current_.fallback = fallback_;
    fallback_ = false;
    commands_.push_back(std::move(current_));
    current_ = {};
    return {};
  }

  const std::string& text_;
  const std::string& where_;
  const std::function<std::optional<std::string>(const std::string&)>& lookup_;
  size_t at_ = 0;
  int line_ = 1;
  bool fallback_ = false;
  std::map<std::string, std::string> own_;
  ShellCommand current_;
  std::vector<ShellCommand> commands_;
};

}  // namespace

Result<std::vector<ShellCommand>> parse_shell_script(const std::string& text, const std::string& where,
                                                     const std::function<std::optional<std::string>(const std::string&)>& lookup) {
  return Parser(text, where, lookup).parse();
}

}  // namespace ddtree
