// hermes: {"name": NAME, "arguments": {...}} inside <tool_call>. The object is read character by character: what cannot be JSON ends the
// attempt at once, and once the name is known the arguments are passed on as they come.
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "text/tool_grammar.h"

namespace ddtree {
namespace {

using Json = nlohmann::ordered_json;
constexpr std::string_view kEndCall = "</tool_call>";
constexpr size_t kMaxDepth = 200;

// Accepts JSON one character at a time.
class JsonReader {
 public:
  bool done() const { return done_; }
  size_t depth() const { return open_.size(); }
  bool in_string() const { return string_; }
  bool expects_value() const { return expect_ == Expect::kValue || expect_ == Expect::kValueOrEnd; }
  bool expects_key() const { return expect_ == Expect::kKey || expect_ == Expect::kKeyOrEnd; }

  bool feed(char c) {
    if (done_) return false;
    if (string_) return in_string_char(c);
    if (!scalar_.empty()) {
      if (std::strchr(",]} \t\r\n", c) == nullptr) {
        scalar_ += c;
        return scalar_fits();
      }
      if (!Json::accept(scalar_)) return false;
      scalar_.clear();
      value_ended();
    }
    if (c == ' ' || c == '\t' || c == '\r' || c == '\n') return true;
    switch (expect_) {
      case Expect::kKeyOrEnd:
        if (c == '}') return close('{');
        [[fallthrough]];
      case Expect::kKey:
        if (c != '"') return false;
        string_ = key_ = true;
        return true;
      case Expect::kColon: expect_ = Expect::kValue; return c == ':';
      case Expect::kValueOrEnd:
        if (c == ']') return close('[');
        [[fallthrough]];
      case Expect::kValue:
        if (c == '"') {
          string_ = true;
          key_ = false;
          return true;
        }
        if (c == '{' || c == '[') {
          open_ += c;
          expect_ = c == '{' ? Expect::kKeyOrEnd : Expect::kValueOrEnd;
          return open_.size() <= kMaxDepth;
        }
        scalar_ = c;
        return scalar_fits();
      case Expect::kCommaOrEnd:
        if (c == ',') {
          expect_ = open_.back() == '{' ? Expect::kKey : Expect::kValue;
          return true;
        }
        return c == '}' ? close('{') : c == ']' ? close('[') : false;
    }
    return false;
  }

 private:
  enum class Expect { kKey, kKeyOrEnd, kColon, kValue, kValueOrEnd, kCommaOrEnd };

  bool in_string_char(char c) {
    if (hex_ > 0) {
      --hex_;
      return std::isxdigit(static_cast<unsigned char>(c)) != 0;
    }
    if (escape_) {
      escape_ = false;
      if (c == 'u') hex_ = 4;
      return std::strchr("\"\\/bfnrtu", c) != nullptr && c != '\0';
    }
    if (c == '\\') {
      escape_ = true;
    } else if (c == '"') {
      string_ = false;
      if (key_) expect_ = Expect::kColon;
      else value_ended();
    }
    return true;
  }
  bool scalar_fits() const {
    for (const std::string_view word : {"true", "false", "null"})
      if (word.starts_with(scalar_)) return true;
    return (scalar_[0] == '-' || std::isdigit(static_cast<unsigned char>(scalar_[0]))) &&
           scalar_.find_first_not_of("-+.0123456789eE") == std::string::npos;
  }
  void value_ended() {
    if (open_.empty()) done_ = true;
    else expect_ = Expect::kCommaOrEnd;
  }
  bool close(char opening) {
    if (open_.empty() || open_.back() != opening) return false;
    open_.pop_back();
    value_ended();
    return true;
  }

  std::string open_, scalar_;
  Expect expect_ = Expect::kValue;
  bool string_ = false, key_ = false, escape_ = false, done_ = false;
  int hex_ = 0;
};

class HermesGrammar final : public ToolCallGrammar {
 public:
  explicit HermesGrammar(ToolOptions options) : ToolCallGrammar(std::move(options)) {}

 protected:
  void open() override {
    reader_ = JsonReader();
    text_.clear();
    key_from_ = value_from_ = std::string::npos;
    key_.clear();
    name_.reset();
    sending_ = false;
    begun_ = false;
    after_ = false;
  }
  bool call_open() const override { return begun_ && !after_; }
  bool takes_tags_as_text() const override { return reader_.in_string(); }

  Step step(AnswerDelta& out) override {
    if (after_) return after();
    std::string send;
    size_t i = 0;
    bool good = true;
    for (; i < buffer_.size() && good && !reader_.done(); ++i) good = take(buffer_[i], send, out);
    fragment(std::move(send), out);
    if (!good) {
      buffer_.erase(0, i - 1);
      after_ = begun_;
      return begun_ ? Step::kEnd : Step::kNotACall;
    }
    buffer_.erase(0, i);
    if (!reader_.done()) return Step::kWait;
    if (!begun_ && !whole(out)) return Step::kNotACall;
    after_ = true;
    return Step::kAgain;
  }

  Step closed(AnswerDelta&) override {
    if (!after_) return Step::kNotACall;
    buffer_ = std::string(skip_space(buffer_));
    return Step::kEnd;
  }

 private:
  bool take(char c, std::string& send, AnswerDelta& out) {
    const bool was_string = reader_.in_string(), key_next = reader_.expects_key(), value_next = reader_.expects_value();
    const size_t depth = reader_.depth();
    if (depth == 0 && value_next && c != '{' && std::strchr(" \t\r\n", c) == nullptr) return false;  // a call is an object
    if (!reader_.feed(c)) return false;
    // Models put raw control characters into strings; JSON wants them escaped.
    std::string shown(1, c);
    if (was_string && static_cast<unsigned char>(c) < 0x20) {
      shown = json_string(shown);
      shown = shown.substr(1, shown.size() - 2);
    }
    const size_t at = text_.size();
    text_ += shown;
    if (depth == 1) {
      if (key_next && !was_string && reader_.in_string()) key_from_ = at;
      if (was_string && !reader_.in_string()) {
        if (key_from_ != std::string::npos) {
          key_ = string_at(key_from_).value_or("");
          key_from_ = std::string::npos;
        } else if (key_ == "name" && value_from_ != std::string::npos) {
          name_ = string_at(value_from_);
          value_from_ = std::string::npos;
        }
      }
      if (value_next && !was_string && reader_.in_string()) value_from_ = at;
      if (value_next && !was_string && c == '{' && name_ && !begun_ && (key_ == "arguments" || key_ == "parameters")) {
        begin_call(*name_, out);
        begun_ = sending_ = true;
        send += shown;
        return true;
      }
    }
    if (sending_) {
      send += shown;
      if (reader_.depth() == 1) sending_ = false;
    }
    return true;
  }

  std::optional<std::string> string_at(size_t from) const {
    const Json value = Json::parse(text_.substr(from), nullptr, false);
    if (!value.is_string()) return std::nullopt;
    return value.get<std::string>();
  }

  // The object is complete and nothing was sent: arguments came before the name, are missing, or are a JSON text.
  bool whole(AnswerDelta& out) {
    const Json call = Json::parse(text_, nullptr, false);
    if (!call.is_object() || !call.contains("name") || !call["name"].is_string()) return false;
    Json arguments = call.contains("arguments") ? call["arguments"] : call.contains("parameters") ? call["parameters"] : Json::object();
    if (arguments.is_string()) {
      const Json inner = Json::parse(arguments.get<std::string>(), nullptr, false);
      if (inner.is_object()) arguments = inner;
    }
    if (arguments.is_null()) arguments = Json::object();
    if (!arguments.is_object()) return false;
    begin_call(call["name"].get<std::string>(), out);
    begun_ = true;
    fragment(arguments.dump(-1, ' ', false, Json::error_handler_t::replace), out);
    return true;
  }

  Step after() {
    const std::string_view text = skip_space(buffer_);
    if (close_by_text() && text.starts_with(kEndCall)) {
      buffer_ = std::string(text.substr(kEndCall.size()));
      return Step::kEnd;
    }
    if (text.empty() || (close_by_text() && kEndCall.starts_with(text))) return Step::kWait;
    return Step::kEnd;
  }

  JsonReader reader_;
  std::string text_;  // of the object so far, escapes mended
  size_t key_from_ = std::string::npos, value_from_ = std::string::npos;
  std::string key_;                  // the last key of the outer object
  std::optional<std::string> name_;  // the function's name, once read
  bool sending_ = false;             // inside the arguments
  bool begun_ = false;
  bool after_ = false;  // the object is complete
};

}  // namespace

std::unique_ptr<ToolCallGrammar> hermes_grammar(ToolOptions options) { return std::make_unique<HermesGrammar>(std::move(options)); }

}  // namespace ddtree
