#include "model/json_reader.h"

#include <fmt/core.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/json_error.h"

namespace ddtree {
namespace {

using nlohmann::json;
constexpr size_t kMaxDepth = 64;

// Builds the value as nlohmann's own reader does, but stops at a depth no model file has (millions of '[' would cost gigabytes) and
// can refuse a key that comes twice in one object.
class Builder : public nlohmann::json_sax<json> {
 public:
  explicit Builder(DuplicateKeys duplicates) : duplicates_(duplicates) {}

  bool null() override { return place(nullptr); }
  bool boolean(bool v) override { return place(v); }
  bool number_integer(number_integer_t v) override { return place(v); }
  bool number_unsigned(number_unsigned_t v) override { return place(v); }
  bool number_float(number_float_t v, const string_t&) override { return place(v); }
  bool string(string_t& v) override { return place(std::move(v)); }
  bool binary(binary_t&) override { return stop("binary data"); }
  bool start_object(size_t) override { return open(json::object()); }
  bool start_array(size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& v) override {
    if (duplicates_ == DuplicateKeys::kRefuse && stack_.back()->contains(v))
      return stop(fmt::format("the key \"{}\" comes twice", json_text(v)));
    key_ = std::move(v);
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& e) override { return stop(json_error_text(e.what())); }

  json root;
  std::string error;

 private:
  bool stop(std::string why) {
    if (error.empty()) error = std::move(why);
    return false;
  }
  json* put(json value) {
    if (stack_.empty()) return &(root = std::move(value));
    json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    return &(parent[key_] = std::move(value));
  }
  bool place(json value) {
    put(std::move(value));
    return true;
  }
  bool open(json value) {
    if (stack_.size() == kMaxDepth) return stop(fmt::format("nested deeper than {} levels", kMaxDepth));
    stack_.push_back(put(std::move(value)));
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }

  DuplicateKeys duplicates_;
  std::vector<json*> stack_;  // open containers; a parent does not grow while its child is open, so the pointers hold
  std::string key_;
};

}  // namespace

Result<json> parse_json(std::string_view text, std::string_view file, DuplicateKeys duplicates) {
  Builder builder(duplicates);
  try {
    if (json::sax_parse(text.begin(), text.end(), &builder) && builder.error.empty()) return std::move(builder.root);
  } catch (const std::exception& e) {
    if (builder.error.empty()) builder.error = json_error_text(e.what());
  }
  return Status(Code::kBadModel, fmt::format("{}: not valid JSON: {}", file, builder.error.empty() ? "unknown error" : builder.error));
}

std::string json_text(const json& value) {
  std::string text = value.is_structured() && value.size() > 40
                         ? (value.is_array() ? "a list" : "an object") + fmt::format(" of {} entries", value.size())
                         : value.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "…";  // ASCII until here, so no character is cut
  return text;
}

JsonReader::JsonReader(const json& object, std::string_view file, std::string prefix)
    : object_(object), file_(file), prefix_(std::move(prefix)) {}

void JsonReader::fail(const std::string& key, const std::string& found, const std::string& expected) {
  if (status_.ok()) status_ = Status(Code::kBadModel, fmt::format("{}: {}{} is {}; {}", file_, prefix_, key, found, expected));
}

void JsonReader::merge(const JsonReader& other) {
  if (status_.ok()) status_ = other.status_;
}

const json* JsonReader::find(const char* key) const {
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool JsonReader::has(const char* key) const { return find(key) != nullptr; }

namespace {

// Integers may be written 4096 or 4096.0; anything that int64 cannot hold is "no integer".
std::optional<int64_t> as_integer(const json& v) {
  if (v.is_number_unsigned()) {
    const uint64_t u = v.get<uint64_t>();
    return u <= static_cast<uint64_t>(INT64_MAX) ? std::optional<int64_t>(static_cast<int64_t>(u)) : std::nullopt;
  }
  if (v.is_number_integer()) return v.get<int64_t>();
  if (v.is_number_float()) {
    const double d = v.get<double>();
    if (std::abs(d) <= 0x1p53 && d == std::floor(d)) return static_cast<int64_t>(d);
  }
  return std::nullopt;
}

}  // namespace

int64_t JsonReader::integer(const char* key, int64_t low, int64_t high, std::optional<int64_t> absent) {
  const json* v = find(key);
  const std::string expected = fmt::format("it must be an integer from {} to {}", low, high);
  if (v == nullptr) {
    if (!absent) fail(key, "missing", expected);
    return absent.value_or(low);
  }
  const std::optional<int64_t> n = as_integer(*v);
  if (n && *n >= low && *n <= high) return *n;
  fail(key, json_text(*v), expected);
  return low;
}

double JsonReader::number(const char* key, double low, double high, std::optional<double> absent) {
  const json* v = find(key);
  const std::string expected = fmt::format("it must be a number from {} to {}", low, high);
  if (v == nullptr) {
    if (!absent) fail(key, "missing", expected);
    return absent.value_or(low);
  }
  if (v->is_number()) {
    const double d = v->get<double>();
    if (d >= low && d <= high) return d;  // false for NaN
  }
  fail(key, json_text(*v), expected);
  return low;
}

bool JsonReader::boolean(const char* key, bool absent) {
  const json* v = find(key);
  if (v == nullptr) return absent;
  if (v->is_boolean()) return v->get<bool>();
  fail(key, json_text(*v), "it must be true or false");
  return absent;
}

std::string JsonReader::string(const char* key, std::string absent) {
  const json* v = find(key);
  if (v == nullptr) return absent;
  if (v->is_string()) return v->get<std::string>();
  fail(key, json_text(*v), "it must be a string");
  return absent;
}

std::vector<int32_t> JsonReader::ids(const char* key, int64_t low, int64_t high) {
  std::vector<int32_t> out;
  const json* v = find(key);
  if (v == nullptr) return out;
  const std::string expected = fmt::format("it must be an integer from {} to {}, or a list of such", low, high);
  const auto take = [&](const json& e) {
    const std::optional<int64_t> n = as_integer(e);
    if (!n || *n < low || *n > high) return fail(key, v->is_array() ? json_text(*v) + " with " + json_text(e) : json_text(e), expected);
    out.push_back(static_cast<int32_t>(*n));
  };
  if (v->is_array()) {
    if (v->size() > 4096) fail(key, json_text(*v), expected);
    else
      for (const json& e : *v) take(e);
  } else {
    take(*v);
  }
  return out;
}

}  // namespace ddtree
