#include "server/fields.h"

#include <fmt/core.h>

#include <cmath>

namespace ddtree {

std::string shown(const Json& value) {
  std::string text = dump_json(value);
  if (text.size() > 80) {
    size_t cut = 77;
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;  // not within a character
    text = text.substr(0, cut) + "…";
  }
  return text;
}

const Json* Fields::find(const char* name) {
  known_.insert(name);
  const auto it = object_.find(name);
  if (failed() || it == object_.end() || it->is_null()) return nullptr;
  return &*it;
}

void Fields::fail(ApiError error) {
  if (!error_) error_ = std::move(error);
}

void Fields::wrong_type(const char* name, const char* right, const Json& found) {
  fail(invalid_value(name, fmt::format("{} must be {}, found {}", name, right, shown(found))));
}

std::optional<double> Fields::number(const char* name, double low, double high) {
  const Json* v = find(name);
  if (!v) return {};
  if (!v->is_number()) {
    wrong_type(name, fmt::format("a number from {} to {}", low, high).c_str(), *v);
    return {};
  }
  const double d = v->get<double>();
  if (!std::isfinite(d) || d < low || d > high) {
    wrong_type(name, fmt::format("a number from {} to {}", low, high).c_str(), *v);
    return {};
  }
  return d;
}

std::optional<int64_t> Fields::integer(const char* name, int64_t low, int64_t high) {
  const Json* v = find(name);
  if (!v) return {};
  // The technical upper end is only worth a word to who went past it.
  const bool huge = v->is_number() && v->get<double>() > static_cast<double>(high);
  const auto right = (high == INT64_MAX || high == INT32_MAX) && !huge ? fmt::format("an integer of at least {}", low)
                                                                       : fmt::format("an integer from {} to {}", low, high);
  int64_t n = 0;
  if (v->is_number_unsigned()) {
    const uint64_t u = v->get<uint64_t>();
    if (u > static_cast<uint64_t>(INT64_MAX)) return wrong_type(name, right.c_str(), *v), std::nullopt;
    n = static_cast<int64_t>(u);
  } else if (v->is_number_integer()) {
    n = v->get<int64_t>();
  } else if (v->is_number_float() && std::nearbyint(v->get<double>()) == v->get<double>() && std::fabs(v->get<double>()) < 9e15) {
    n = static_cast<int64_t>(v->get<double>());  // 64.0: some clients write integers so
  } else {
    return wrong_type(name, right.c_str(), *v), std::nullopt;
  }
  if (n < low || n > high) return wrong_type(name, right.c_str(), *v), std::nullopt;
  return n;
}

std::optional<bool> Fields::boolean(const char* name) {
  const Json* v = find(name);
  if (!v) return {};
  if (!v->is_boolean()) return wrong_type(name, "true or false", *v), std::nullopt;
  return v->get<bool>();
}

std::optional<std::string> Fields::text(const char* name) {
  const Json* v = find(name);
  if (!v) return {};
  if (!v->is_string()) return wrong_type(name, "a string", *v), std::nullopt;
  return v->get<std::string>();
}

const Json* Fields::object(const char* name) {
  const Json* v = find(name);
  if (v && !v->is_object()) return wrong_type(name, "an object", *v), nullptr;
  return v;
}

const Json* Fields::array(const char* name) {
  const Json* v = find(name);
  if (v && !v->is_array()) return wrong_type(name, "a list", *v), nullptr;
  return v;
}

const Json* Fields::any(const char* name) { return find(name); }

std::optional<std::vector<int32_t>> Fields::ids(const char* name, int64_t id_count, size_t most) {
  const Json* v = array(name);
  if (!v) return {};
  if (v->size() > most)
    return fail(invalid_value(name, fmt::format("{} may hold at most {} ids, found {}", name, most, v->size()))), std::nullopt;
  std::vector<int32_t> out;
  out.reserve(v->size());
  for (size_t i = 0; i < v->size(); ++i) {
    const Json& e = (*v)[i];
    const bool fits = e.is_number_integer() && (e.is_number_unsigned() ? e.get<uint64_t>() < static_cast<uint64_t>(id_count)
                                                                       : e.get<int64_t>() >= 0 && e.get<int64_t>() < id_count);
    if (!fits)
      return fail(invalid_value(name, fmt::format("{}[{}] must be a token id from 0 to {}, found {}", name, i, id_count - 1, shown(e)))),
             std::nullopt;
    out.push_back(e.get<int32_t>());
  }
  return out;
}

void Fields::unsupported(const char* name, std::initializer_list<Json> neutral, const char* instead) {
  const Json* v = find(name);
  if (!v) return;
  for (const Json& n : neutral)
    if (*v == n) return;
  fail(ddtree::unsupported(name, fmt::format("{} = {} is not built in this server; {}", name, shown(*v), instead)));
}

void Fields::harmless(std::initializer_list<const char*> names) {
  for (const char* n : names) known_.insert(n);
}

std::vector<std::string> Fields::ignored() const {
  std::vector<std::string> out;
  for (const auto& [name, value] : object_.items())
    if (!known_.count(name)) out.push_back(name);
  return out;
}

}  // namespace ddtree
