// Seeded damage to JSON text and binary files: what a broken disk, a bad export or an attacker does to a model.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

namespace ddtree::test {

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t n) { return n == 0 ? 0 : random_() % n; }
  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(random_) < p; }

  // Damages the text of a JSON document: by structure where it parses, by bytes otherwise. Appends what was done to `log`.
  std::string json_text(const std::string& text, std::string* log) {
    std::string out = text;
    for (size_t n = 1 + below(3); n > 0; --n) out = chance(0.65) ? structural(out, log) : bytes(out, log);
    return out;
  }

  // Flips, cuts, doubles and inserts bytes.
  std::string bytes(std::string s, std::string* log) {
    const size_t at = below(s.size() + 1);
    switch (below(7)) {
      case 0:
        for (size_t n = 1 + below(8); n > 0 && !s.empty(); --n) s[below(s.size())] ^= static_cast<char>(1u << below(8));
        return note(log, "flip bits"), s;
      case 1: return note(log, "cut at " + std::to_string(at)), s.substr(0, at);
      case 2: return note(log, "erase at " + std::to_string(at)), s.erase(at, 1 + below(40));
      case 3: return note(log, "double at " + std::to_string(at)), s.insert(at, s.substr(at, 1 + below(200)));
      case 4: {
        std::string noise(1 + below(20), '\0');
        for (char& c : noise) c = static_cast<char>(random_());
        return note(log, "noise at " + std::to_string(at)), s.insert(at, noise);
      }
      case 5: {
        static const char* const kOpen[] = {"[", "{\"a\":", "[[{\"\":"};
        std::string deep;
        const char* open = kOpen[below(3)];
        for (size_t n = 1u << below(17); n > 0; --n) deep += open;
        return note(log, "nest at " + std::to_string(at)), s.insert(at, deep);
      }
      default: return number(s, log);
    }
  }

  nlohmann::json hostile_value() {
    using nlohmann::json;
    switch (below(22)) {
      case 0: return nullptr;
      case 1: return true;
      case 2: return 0;
      case 3: return -1;
      case 4: return 1;
      case 5: return 1000000000000000;
      case 6: return INT64_MAX;
      case 7: return INT64_MIN;
      case 8: return UINT64_MAX;
      case 9: return 4294967296;
      case 10: return 2147483648;
      case 11: return 0.5;
      case 12: return -1e308;
      case 13: return 1e15;
      case 14: return "";
      case 15: return std::string(1 + below(5000), 'x');
      case 16: return "\xf0\x9f\x99\x82 \u0000 ../../x";
      case 17: return json::array();
      case 18: return json::object();
      case 19: return json::array({-1, 1e15, "a", nullptr});
      case 20: return static_cast<int64_t>(below(5000));
      default: {
        json deep = 1;
        for (size_t n = below(200); n > 0; --n) deep = chance(0.5) ? json::array({std::move(deep)}) : json{{"k", std::move(deep)}};
        return deep;
      }
    }
  }

 private:
  static void note(std::string* log, const std::string& what) { *log += (log->empty() ? "" : "; ") + what; }

  // Another number where one stands, as text, so that spellings no JSON library writes are tried too.
  std::string number(std::string s, std::string* log) {
    static const char* const kNumbers[] = {"0",
                                           "-0",
                                           "-1",
                                           "1e15",
                                           "1e999",
                                           "-1e999",
                                           "18446744073709551615",
                                           "18446744073709551616",
                                           "9223372036854775808",
                                           "1e-999",
                                           "0.1",
                                           "00",
                                           "1.",
                                           "NaN",
                                           "Infinity",
                                           "0x10",
                                           "123456789012345678901234567890",
                                           "4294967295",
                                           "2147483647",
                                           "1E3"};
    std::vector<size_t> starts;
    for (size_t i = 0; i < s.size(); ++i)
      if (isdigit(static_cast<unsigned char>(s[i])) && (i == 0 || !isalnum(static_cast<unsigned char>(s[i - 1])))) starts.push_back(i);
    if (starts.empty()) return note(log, "no number"), s;
    const size_t at = starts[below(starts.size())];
    size_t end = at;
    while (end < s.size() && (isdigit(static_cast<unsigned char>(s[end])) || s[end] == '.')) ++end;
    const char* with = kNumbers[below(std::size(kNumbers))];
    return note(log, "number at " + std::to_string(at) + " -> " + with), s.replace(at, end - at, with);
  }

  std::string structural(const std::string& text, std::string* log) {
    using nlohmann::json;
    json document = json::parse(text, nullptr, false);
    if (document.is_discarded() || !document.is_structured() || document.empty()) return bytes(text, log);
    // Walk down to a random container; small documents are walked often enough to meet every key.
    json* at = &document;
    std::string path;
    while (true) {
      std::vector<json*> inner;
      std::vector<std::string> names;
      for (auto it = at->begin(); it != at->end() && inner.size() < 64; ++it)
        if (it->is_structured() && !it->empty()) {
          inner.push_back(&*it);
          names.push_back(at->is_object() ? it.key() : std::to_string(it - at->begin()));
        }
      if (inner.empty() || chance(0.35)) break;
      const size_t i = below(inner.size());
      at = inner[i];
      path += "/" + names[i];
    }
    auto it = at->begin();
    std::advance(it, static_cast<std::ptrdiff_t>(below(at->size())));
    const std::string name = path + "/" + (at->is_object() ? it.key() : "#");
    switch (below(6)) {
      case 0:
        at->erase(it);
        note(log, "remove " + name);
        break;
      case 1:
      case 2:
        *it = hostile_value();
        note(log, "replace " + name);
        break;
      case 3: {
        auto other = at->begin();
        std::advance(other, static_cast<std::ptrdiff_t>(below(at->size())));
        std::swap(*it, *other);
        note(log, "swap " + name);
        break;
      }
      case 4:
        if (at->is_array()) {
          const json value = *it;
          for (size_t n = 1u << below(12); n > 0; --n) at->push_back(value);
          note(log, "repeat " + name);
        } else {
          const std::string key = it.key();
          const json value = *it;
          at->erase(it);
          (*at)[key + "x"] = value;
          note(log, "rename " + name);
        }
        break;
      default:
        if (at->is_object()) {  // the same key a second time, with another value: only text can say that
          const std::string key = json(it.key()).dump(-1, ' ', true, json::error_handler_t::replace);
          std::string out = document.dump(-1, ' ', true, json::error_handler_t::replace);
          const size_t where = out.find(key + ":");
          note(log, "double key " + name);
          return where == std::string::npos
                     ? out
                     : out.insert(where, key + ":" + hostile_value().dump(-1, ' ', true, json::error_handler_t::replace) + ",");
        }
        at->push_back(hostile_value());
        note(log, "append to " + path);
    }
    return document.dump(-1, ' ', true, json::error_handler_t::replace);
  }

  std::mt19937_64 random_;
};

}  // namespace ddtree::test
