// qwen3_coder: <function=NAME> <parameter=KEY> VALUE </parameter> ... </function>. None of these tags is an added token, so they are found
// by text. Values of text type are passed on as they come, others once they are whole.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "text/jinja.h"
#include "text/jinja_strings.h"
#include "text/jinja_value.h"
#include "text/tool_grammar.h"

namespace ddtree {

using Json = nlohmann::ordered_json;

namespace {

constexpr std::string_view kFunction = "<function=", kParameter = "<parameter=", kEndParameter = "</parameter>",
                           kEndFunction = "</function>", kEndCall = "</tool_call>";
constexpr size_t kMaxName = 256;

std::string lowered(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

std::string_view declared(const ParameterTypes* types, std::string_view key) {
  if (!types) return "string";
  const auto at = types->find(key);
  return at == types->end() ? std::string_view("string") : std::string_view(at->second);
}

// As Python's json.dumps(ensure_ascii=False) writes it, which is how the model reads it back in the history.
std::string dump(const Json& json) {
  try {
    return jinja::to_json_text(jinja::Value::from_json(json), {}, SIZE_MAX);
  } catch (const jinja::Error&) {  // nested too deeply
    return json.dump();
  }
}

std::string python_literal(std::string_view text) {
  Json value;
  return jinja::parse_python_literal(text, value) ? dump(value) : json_string(text);
}

}  // namespace

std::string json_string(std::string_view text) { return Json(std::string(text)).dump(-1, ' ', false, Json::error_handler_t::replace); }

bool is_text_type(const ParameterTypes* types, std::string_view key) {
  const auto type = declared(types, key);
  return type == "string" || type == "str" || type == "text" || type == "varchar" || type == "char" || type == "enum";
}

std::string convert_value(std::string_view text, const ParameterTypes* types, std::string_view key) {
  if (lowered(text) == "null") return "null";
  if (is_text_type(types, key)) return json_string(text);
  const std::string_view type = declared(types, key);
  const auto starts = [&](std::initializer_list<std::string_view> prefixes) {
    return std::any_of(prefixes.begin(), prefixes.end(), [&](auto p) { return type.starts_with(p); });
  };
  const std::string_view bare = jinja::strip(text);
  if (starts({"int", "uint", "long", "short", "unsigned"})) {
    const bool sign = !bare.empty() && (bare[0] == '-' || bare[0] == '+');
    std::string_view digits = bare.substr(sign ? 1 : 0);
    if (digits.empty() || !std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; })) return json_string(text);
    while (digits.size() > 1 && digits[0] == '0') digits.remove_prefix(1);
    return (bare[0] == '-' && digits != "0" ? "-" : "") + std::string(digits);
  }
  if (starts({"num", "float"})) {
    const std::string number(bare);
    char* end = nullptr;
    const double value = std::strtod(number.c_str(), &end);
    if (number.empty() || *end != '\0' || !std::isfinite(value) || number.find_first_of("xX") != std::string::npos)
      return json_string(text);
    if (number.find_first_of(".eE") == std::string::npos && std::fabs(value) < 0x1p120)
      return jinja::int_text(static_cast<jinja::Int>(value));
    return jinja::repr_real(value);
  }
  if (starts({"bool"})) return lowered(bare) == "true" ? "true" : "false";
  if (starts({"object", "array", "dict", "list"})) {
    const Json value = Json::parse(bare, nullptr, false);
    return value.is_discarded() ? python_literal(bare) : dump(value);
  }
  return python_literal(text);
}

namespace {

class CoderGrammar final : public ToolCallGrammar {
 public:
  CoderGrammar(ToolOptions options, std::map<std::string, ParameterTypes, std::less<>> functions)
      : ToolCallGrammar(std::move(options)), functions_(std::move(functions)) {}

 protected:
  void open() override { phase_ = Phase::kName; }
  bool call_open() const override { return phase_ == Phase::kBetween || phase_ == Phase::kKey || phase_ == Phase::kValue; }
  bool takes_tags_as_text() const override { return phase_ == Phase::kValue; }

  Step step(AnswerDelta& out) override {
    switch (phase_) {
      case Phase::kName: return name(out);
      case Phase::kBetween: return between(out);
      case Phase::kKey: return key(out);
      case Phase::kValue: return value(out);
      case Phase::kAfter: return after();
    }
    return Step::kNotACall;
  }

  Step closed(AnswerDelta& out) override {
    if (phase_ == Phase::kAfter) {
      buffer_ = std::string(skip_space(buffer_));
      return Step::kEnd;
    }
    if (phase_ == Phase::kName) {  // a call without parameters whose </function> is missing
      std::string name_text;
      std::string_view rest;
      if (!heading(name_text, rest) || !rest.empty()) return Step::kNotACall;
      begin(std::move(name_text), out);
      buffer_.clear();
    }
    finish(out);
    buffer_ = std::string(skip_space(buffer_));
    return Step::kEnd;
  }

 private:
  enum class Phase { kName, kBetween, kKey, kValue, kAfter };

  // "<function=NAME>" at the buffer's head; `rest`: what follows, white space skipped.
  bool heading(std::string& name_text, std::string_view& rest) const {
    const std::string_view text = skip_space(buffer_);
    if (!text.starts_with(kFunction)) return false;
    const size_t end = text.find_first_of("><\n", kFunction.size());
    if (end == std::string_view::npos || text[end] != '>' || end == kFunction.size()) return false;
    name_text = text.substr(kFunction.size(), end - kFunction.size());
    rest = skip_space(text.substr(end + 1));
    return true;
  }

  Step name(AnswerDelta& out) {
    const std::string_view text = skip_space(buffer_);
    if (text.size() < kFunction.size()) return kFunction.starts_with(text) ? Step::kWait : Step::kNotACall;
    if (!text.starts_with(kFunction)) return Step::kNotACall;
    std::string name_text;
    std::string_view rest;
    if (!heading(name_text, rest)) {
      const bool open_end = text.find_first_of("><\n", kFunction.size()) == std::string_view::npos;
      return open_end && text.size() - kFunction.size() <= kMaxName ? Step::kWait : Step::kNotACall;
    }
    if (name_text.size() > kMaxName) return Step::kNotACall;
    const auto begins = [&](std::string_view tag) { return rest.starts_with(tag); };
    if (begins(kParameter) || begins(kEndFunction) || (close_by_text() && begins(kEndCall))) {
      std::string tail(rest);
      begin(std::move(name_text), out);
      buffer_ = std::move(tail);
      return Step::kAgain;
    }
    if (kParameter.starts_with(rest) || kEndFunction.starts_with(rest) || (close_by_text() && kEndCall.starts_with(rest)))
      return Step::kWait;
    return Step::kNotACall;
  }

  void begin(std::string name_text, AnswerDelta& out) {
    const auto at = functions_.find(name_text);
    types_ = at == functions_.end() ? nullptr : &at->second;
    begin_call(std::move(name_text), out);
    phase_ = Phase::kBetween;
    first_ = true;
  }
  void finish(AnswerDelta& out) {
    fragment(first_ ? "{}" : "}", out);
    phase_ = Phase::kAfter;
  }

  Step between(AnswerDelta& out) {
    const std::string_view text = skip_space(buffer_);
    const auto take = [&](std::string_view tag) { buffer_ = std::string(text.substr(tag.size())); };
    if (text.starts_with(kParameter)) {
      take(kParameter);
      phase_ = Phase::kKey;
      return Step::kAgain;
    }
    if (text.starts_with(kEndFunction)) {
      take(kEndFunction);
      finish(out);
      return Step::kAgain;
    }
    if (close_by_text() && text.starts_with(kEndCall)) {
      finish(out);
      return Step::kAgain;  // after() takes the tag
    }
    if (text.starts_with(kFunction)) {  // the next function, without an end of this one
      finish(out);
      return Step::kAgain;
    }
    if (kParameter.starts_with(text) || kEndFunction.starts_with(text) || kFunction.starts_with(text) ||
        (close_by_text() && kEndCall.starts_with(text)))
      return Step::kWait;
    finish(out);  // prose: the model considers the call done
    return Step::kEnd;
  }

  Step key(AnswerDelta& out) {
    const size_t end = buffer_.find_first_of(">\n");
    if (end == std::string::npos && buffer_.size() <= kMaxName) return Step::kWait;
    if (end == std::string::npos || buffer_[end] != '>' || end == 0) {
      buffer_.insert(0, kParameter);
      finish(out);
      return Step::kEnd;
    }
    key_ = buffer_.substr(0, end);
    buffer_.erase(0, end + 1);
    phase_ = Phase::kValue;
    value_started_ = false;
    streaming_ = false;
    return Step::kAgain;
  }

  std::string label() {
    std::string out = (first_ ? "{" : ", ") + json_string(key_) + ": ";
    first_ = false;
    return out;
  }

  void stream(std::string_view text, AnswerDelta& out) {
    if (!streaming_) fragment(label() + "\"", out);
    streaming_ = true;
    const std::string escaped = json_string(text);
    fragment(escaped.substr(1, escaped.size() - 2), out);
  }

  Step value(AnswerDelta& out) {
    if (!value_started_) {  // exactly one newline at either end belongs to the tags
      if (buffer_.empty()) return Step::kWait;
      if (buffer_[0] == '\n') buffer_.erase(0, 1);
      value_started_ = true;
    }
    const size_t end = std::min({buffer_.find(kEndParameter), buffer_.find(kParameter), buffer_.find(kEndFunction)});
    if (end == std::string::npos) {
      if (!is_text_type(types_, key_)) return Step::kWait;
      size_t keep = std::max({tag_overlap(buffer_, kEndParameter), tag_overlap(buffer_, kParameter), tag_overlap(buffer_, kEndFunction)});
      if (keep < buffer_.size() && buffer_[buffer_.size() - keep - 1] == '\n') ++keep;
      const std::string_view sure = std::string_view(buffer_).substr(0, buffer_.size() - keep);
      // "null" alone is null, whatever the type.
      if (sure.empty() || (!streaming_ && std::string_view("null").starts_with(lowered(sure)))) return Step::kWait;
      stream(sure, out);
      buffer_.erase(0, sure.size());
      return Step::kWait;
    }
    std::string_view text = std::string_view(buffer_).substr(0, end);
    if (text.ends_with('\n')) text.remove_suffix(1);
    if (streaming_) {
      stream(text, out);
      fragment("\"", out);
    } else {
      fragment(label() + convert_value(text, types_, key_), out);
    }
    buffer_.erase(0, end);
    if (buffer_.starts_with(kEndParameter)) buffer_.erase(0, kEndParameter.size());
    phase_ = Phase::kBetween;
    return Step::kAgain;
  }

  Step after() {
    const std::string_view text = skip_space(buffer_);
    if (close_by_text() && text.starts_with(kEndCall)) {
      buffer_ = std::string(text.substr(kEndCall.size()));
      return Step::kEnd;
    }
    if (text.starts_with(kFunction)) {
      buffer_ = std::string(text);
      phase_ = Phase::kName;
      return Step::kAgain;
    }
    if (kFunction.starts_with(text) || (close_by_text() && kEndCall.starts_with(text))) return Step::kWait;
    return Step::kEnd;
  }

  std::map<std::string, ParameterTypes, std::less<>> functions_;
  const ParameterTypes* types_ = nullptr;
  Phase phase_ = Phase::kName;
  std::string key_;
  bool first_ = true;           // no parameter was written yet
  bool value_started_ = false;  // its leading newline is judged
  bool streaming_ = false;      // its opening quote was sent
};

}  // namespace

std::unique_ptr<ToolCallGrammar> coder_grammar(ToolOptions options, std::map<std::string, ParameterTypes, std::less<>> functions) {
  return std::make_unique<CoderGrammar>(std::move(options), std::move(functions));
}

}  // namespace ddtree
