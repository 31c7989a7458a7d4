#include "engine/request.h"

namespace ddtree {

const char* mode_name(SpeculationMode mode) {
  switch (mode) {
    case SpeculationMode::kNone: return "NONE";
    case SpeculationMode::kDflash: return "DFLASH";
    case SpeculationMode::kDdtree: return "DDTREE";
    case SpeculationMode::kNextn: return "NEXTN";
  }
  return "?";
}

const char* finish_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone: return "";
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kCancelled: return "cancelled";
    case FinishReason::kError: return "error";
  }
  return "?";
}

}  // namespace ddtree
