// Reads the members of a JSON request one by one: types and ranges are checked, the first fault is kept, and what nobody asked for is
// known at the end. .cpp files only (json).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/errors.h"
#include "server/json.h"

namespace ddtree {

// A member that is null counts as absent everywhere, as OpenAI's clients expect.
class Fields {
 public:
  explicit Fields(const Json& object) : object_(object) {}

  // Absent, or faulty (then error() is set): nothing. Bounds are inclusive.
  std::optional<double> number(const char* name, double low, double high);
  std::optional<int64_t> integer(const char* name, int64_t low, int64_t high);
  std::optional<bool> boolean(const char* name);
  std::optional<std::string> text(const char* name);
  const Json* object(const char* name);  // null: absent or faulty
  const Json* array(const char* name);
  const Json* any(const char* name);                                                         // any type
  std::optional<std::vector<int32_t>> ids(const char* name, int64_t id_count, size_t most);  // list of token ids

  // A known field that this build does not do: fine while it says nothing (absent, null, or one of the neutral values).
  void unsupported(const char* name, std::initializer_list<Json> neutral, const char* instead);
  // Accepted without meaning for the answer.
  void harmless(std::initializer_list<const char*> names);

  void fail(ApiError error);
  bool failed() const { return error_.has_value(); }
  const ApiError& error() const { return *error_; }

  std::vector<std::string> ignored() const;  // members that nobody asked for, in the client's order

 private:
  const Json* find(const char* name);
  void wrong_type(const char* name, const char* right, const Json& found);
  const Json& object_;
  std::set<std::string> known_;
  std::optional<ApiError> error_;
};

// A value as an error message shows it: short.
std::string shown(const Json& value);

}  // namespace ddtree
