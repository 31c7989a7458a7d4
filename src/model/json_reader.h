// JSON of files that may be broken or hostile: bounded depth, duplicate keys refused where asked, every value read with its type, range
// and path, the first error kept. Used inside model/ only.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace ddtree {

enum class DuplicateKeys { kLastWins, kRefuse };

// kBadModel with the file, the line and column, and what is wrong there. Nesting beyond 64 levels is refused while reading.
Result<nlohmann::json> parse_json(std::string_view text, std::string_view file, DuplicateKeys duplicates = DuplicateKeys::kLastWins);

std::string json_text(const nlohmann::json& value);  // for messages: compact, at most about 60 bytes, valid UTF-8

// Reads the keys of one object. A reader that has failed returns defaults from then on, so that a parser reads straight through and
// asks status() once.
class JsonReader {
 public:
  // `object` must outlive the reader. `prefix` ("text_config.") is for messages.
  JsonReader(const nlohmann::json& object, std::string_view file, std::string prefix = "");

  bool has(const char* key) const;                    // present and not null
  const nlohmann::json* find(const char* key) const;  // null: absent or null
  int64_t integer(const char* key, int64_t low, int64_t high, std::optional<int64_t> absent = std::nullopt);
  double number(const char* key, double low, double high, std::optional<double> absent = std::nullopt);
  bool boolean(const char* key, bool absent);
  std::string string(const char* key, std::string absent);
  std::vector<int32_t> ids(const char* key, int64_t low, int64_t high);  // an integer or a list of integers; absent: empty

  // Records "FILE: PREFIXkey is FOUND; EXPECTED" unless something failed before.
  void fail(const std::string& key, const std::string& found, const std::string& expected);
  void merge(const JsonReader& other);  // takes over its failure
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

 private:
  const nlohmann::json& object_;
  std::string file_, prefix_;
  Status status_;
};

}  // namespace ddtree
