// Status and Result<T>: how a floor reports an error to the one above. No exceptions cross a floor's public headers.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace ddtree {

// What went wrong, by who can mend it. The process's exit code for each is exit_code().
enum class Code {
  kOk,
  kInvalidArgument,  // the caller's (client's, user's) input; the message names the field and what would be right
  kUsage,            // command line: exit 64
  kBadModel,         // model files missing, truncated, wrongly shaped: exit 65
  kUnavailable,      // device, library or address missing: exit 69
  kEngineFault,      // our own failure: exit 70
  kDoesNotFit,       // memory plan refused: exit 71
  kTemporary,        // would work later (queue full, driver mismatch): exit 75
  kStorage,          // a disk that is full or read-only, or fails: the same call may work later: exit 75
  kCancelled,
};

int exit_code(Code code);
const char* code_name(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A value or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)
  Result(Code code, std::string message) : status_(code, std::move(message)) {}
  bool ok() const { return value_.has_value(); }
  explicit operator bool() const { return ok(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

// if (Status s = f(); !s.ok()) return s;
#define DDTREE_RETURN_IF_ERROR(expression)           \
  do {                                               \
    ::ddtree::Status ddtree_status_ = (expression);  \
    if (!ddtree_status_.ok()) return ddtree_status_; \
  } while (0)

}  // namespace ddtree
