#include "base/status.h"

namespace ddtree {

int exit_code(Code code) {
  switch (code) {
    case Code::kOk:
    case Code::kCancelled: return 0;
    case Code::kInvalidArgument:
    case Code::kUsage: return 64;
    case Code::kBadModel: return 65;
    case Code::kUnavailable: return 69;
    case Code::kEngineFault: return 70;
    case Code::kDoesNotFit: return 71;
    case Code::kTemporary:
    case Code::kStorage: return 75;
  }
  return 70;
}

const char* code_name(Code code) {
  switch (code) {
    case Code::kOk: return "ok";
    case Code::kInvalidArgument: return "invalid argument";
    case Code::kUsage: return "usage";
    case Code::kBadModel: return "bad model files";
    case Code::kUnavailable: return "unavailable";
    case Code::kEngineFault: return "engine fault";
    case Code::kDoesNotFit: return "does not fit";
    case Code::kTemporary: return "temporary";
    case Code::kStorage: return "storage";
    case Code::kCancelled: return "cancelled";
  }
  return "unknown";
}

}  // namespace ddtree
