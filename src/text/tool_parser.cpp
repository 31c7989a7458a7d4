#include "text/tool_parser.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "text/tool_grammar.h"

namespace ddtree {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kOpen = "<tool_call>";

std::string random_id() {
  static thread_local std::mt19937_64 generator(std::random_device{}());
  return fmt::format("call_{:016x}{:08x}", generator(), static_cast<uint32_t>(generator()));
}

ParameterTypes types_of(const Json& function) {
  ParameterTypes out;
  const auto parameters = function.find("parameters");
  if (parameters == function.end() || !parameters->is_object()) return out;
  const auto properties = parameters->find("properties");
  if (properties == parameters->end() || !properties->is_object()) return out;
  for (const auto& [key, schema] : properties->items()) {
    std::string type = "string";  // also for anyOf and the like
    if (schema.is_object() && schema.contains("type")) {
      const Json& given = schema["type"];
      type = given.is_string() ? given.get<std::string>() : given.dump();
      std::transform(type.begin(), type.end(), type.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    }
    out[key] = type;
  }
  return out;
}

}  // namespace

Result<ToolFormat> tool_format(std::string_view name) {
  if (name == "qwen3_coder" || name == "qwen3_xml") return ToolFormat::kQwen3Coder;
  if (name == "hermes" || name == "qwen" || name == "qwen25") return ToolFormat::kHermes;
  if (name.empty() || name == "none") return ToolFormat::kNone;
  return Status(Code::kUsage,
                fmt::format("no tool-call parser '{}'; known: qwen3_coder (also qwen3_xml), hermes (also qwen, qwen25), none", name));
}

std::string_view call_start(ToolFormat format) {
  switch (format) {
    case ToolFormat::kQwen3Coder: return "<function=";
    case ToolFormat::kHermes: return "{";
    default: return "";
  }
}

size_t tag_overlap(std::string_view text, std::string_view tag) {
  for (size_t n = std::min(text.size(), tag.size() - 1); n > 0; --n)
    if (text.ends_with(tag.substr(0, n))) return n;
  return 0;
}

std::string_view skip_space(std::string_view text) {
  const size_t at = text.find_first_not_of(" \t\r\n");
  return at == std::string_view::npos ? std::string_view() : text.substr(at);
}

// --- the region behind the tag ------------------------------------------------------------------------------------------------------

void ToolCallGrammar::content(std::string_view text, AnswerDelta& out) {
  if (text.empty()) return;
  const size_t last = text.find_last_not_of(" \t\r\n");
  if (at_edge_) {
    if (last == std::string_view::npos) {
      space_ += text;
      return;
    }
    at_edge_ = false;
  }
  // The last two newlines may belong to a call that follows.
  std::string all = std::exchange(space_, "") + std::string(text);
  size_t keep = 0;
  while (keep < 2 && keep < all.size() && all[all.size() - 1 - keep] == '\n') ++keep;
  space_ = all.substr(all.size() - keep);
  out.content.append(all, 0, all.size() - keep);
}

void ToolCallGrammar::enter(std::string tag) {
  in_region_ = true;
  begun_ = false;
  raw_ = std::move(tag);
  raw_call_ = 0;
  buffer_.clear();
  open();
}

void ToolCallGrammar::leave() {
  in_region_ = false;
  at_edge_ = true;
  space_.clear();
  raw_.clear();
  pending_ = std::exchange(buffer_, "");
}

void ToolCallGrammar::begin_call(std::string name, AnswerDelta& out) {
  if (!begun_) space_.clear();
  begun_ = true;
  out.calls.push_back({calls_++, options_.new_id ? options_.new_id() : random_id(), std::move(name), ""});
}

void ToolCallGrammar::fragment(std::string text, AnswerDelta& out) {
  if (text.empty()) return;
  if (!out.calls.empty() && out.calls.back().index == calls_ - 1 && out.calls.back().id.empty()) out.calls.back().arguments += text;
  else out.calls.push_back({calls_ - 1, "", "", std::move(text)});
}

// The tag is prose; what follows it may hold another one.
void ToolCallGrammar::release(AnswerDelta& out) {
  in_region_ = false;
  const size_t tag = std::min(raw_.size(), kOpen.size());
  content(std::string_view(raw_).substr(0, tag), out);
  pending_ = raw_.substr(tag);
  raw_.clear();
  buffer_.clear();
}

void ToolCallGrammar::outside(bool end, AnswerDelta& out) {
  if (options_.tags.call_open < 0) {
    const size_t at = pending_.find(kOpen);
    if (at != std::string::npos) {
      content(std::string_view(pending_).substr(0, at), out);
      std::string after = pending_.substr(at + kOpen.size());
      pending_.clear();
      enter(std::string(kOpen));
      buffer_ = after;
      raw_ += after;
      return;
    }
    if (!end) {
      const size_t keep = tag_overlap(pending_, kOpen);
      content(std::string_view(pending_).substr(0, pending_.size() - keep), out);
      pending_.erase(0, pending_.size() - keep);
      return;
    }
  }
  content(pending_, out);
  pending_.clear();
}

void ToolCallGrammar::inside(AnswerDelta& out) {
  while (in_region_) {
    const bool was_open = call_open();
    switch (step(out)) {
      case Step::kWait: return;
      case Step::kAgain:
        if (was_open && !call_open()) raw_call_ = raw_.size() - buffer_.size();
        break;
      case Step::kNotACall:
        if (begun_) leave();  // prose behind a complete call of the same region
        else release(out);
        break;
      case Step::kEnd: leave(); break;
    }
  }
}

void ToolCallGrammar::feed(const TextPiece& piece, AnswerDelta& out) {
  if (piece.token >= 0 && piece.token == options_.tags.call_open && !(in_region_ && takes_tags_as_text())) {
    if (in_region_) {  // a new region: the old one is over
      if (!begun_) release(out);
      else if (closed(out) == Step::kEnd) leave();
      if (in_region_) leave();
    }
    outside(true, out);
    enter(piece.text);
    return;
  }
  if (piece.token >= 0 && piece.token == options_.tags.call_close && in_region_ && !takes_tags_as_text()) {
    if (closed(out) == Step::kEnd) {
      leave();
    } else {
      raw_ += piece.text;
      if (begun_) leave();
      else release(out);
    }
  } else if (in_region_) {
    buffer_ += piece.text;
    raw_ += piece.text;
  } else {
    pending_ += piece.text;
  }
  // A region may end in the middle of the text, and another begin.
  for (;;) {
    inside(out);
    if (in_region_ || pending_.empty()) return;
    outside(false, out);
    if (!in_region_) return;
  }
}

void ToolCallGrammar::flush(AnswerDelta& out) {
  while (in_region_) {
    if (begun_) {
      if (call_open()) out.unfinished = UnfinishedCall{calls_ - 1, raw_.substr(std::min(raw_call_, raw_.size()))};
      else if (!skip_space(buffer_).empty()) content(buffer_, out);
      in_region_ = false;
    } else {
      release(out);
      for (;;) {  // what was held may hold further mentions
        outside(true, out);
        if (!in_region_) break;
        inside(out);
        if (in_region_) break;
      }
    }
  }
  outside(true, out);
  if (calls_ == 0 || !at_edge_) out.content += space_;
  space_.clear();
}

// --- the public classes -----------------------------------------------------------------------------------------------------------

ToolParser::ToolParser(ToolOptions options, const Json& tools) {
  if (options.format == ToolFormat::kHermes) {
    grammar_ = hermes_grammar(std::move(options));
  } else if (options.format == ToolFormat::kQwen3Coder) {
    std::map<std::string, ParameterTypes, std::less<>> functions;
    if (tools.is_array())
      for (const Json& tool : tools) {
        if (!tool.is_object()) continue;
        const Json& function = tool.contains("function") ? tool["function"] : tool;
        if (function.is_object() && function.contains("name") && function["name"].is_string())
          functions[function["name"].get<std::string>()] = types_of(function);
      }
    grammar_ = coder_grammar(std::move(options), std::move(functions));
  }
}
ToolParser::~ToolParser() = default;
ToolParser::ToolParser(ToolParser&&) noexcept = default;
ToolParser& ToolParser::operator=(ToolParser&&) noexcept = default;

void ToolParser::feed(const std::vector<TextPiece>& pieces, AnswerDelta& out) {
  for (const TextPiece& piece : pieces) {
    if (grammar_) grammar_->feed(piece, out);
    else out.content += piece.text;
  }
}
void ToolParser::flush(AnswerDelta& out) {
  if (grammar_) grammar_->flush(out);
}
int ToolParser::calls() const { return grammar_ ? grammar_->calls() : 0; }

namespace {

AnswerOptions settled(AnswerOptions options, const Json& tools) {
  if (!tools.is_array() || tools.empty()) options.tools.format = ToolFormat::kNone;  // tags mean nothing without tools
  options.reasoning.tags = options.tools.tags;
  options.reasoning.call_start = std::string(call_start(options.tools.format));
  return options;
}

}  // namespace

AnswerParser::AnswerParser(AnswerOptions options, const Json& tools)
    : keep_special_(options.keep_special), reasoning_(settled(options, tools).reasoning), tools_(settled(options, tools).tools, tools) {}

AnswerDelta AnswerParser::feed(const std::vector<TextPiece>& pieces) {
  AnswerDelta out;
  std::vector<TextPiece> shown, rest;
  for (const TextPiece& piece : pieces)
    if (!piece.special || keep_special_) shown.push_back(piece);
  reasoning_.feed(shown, out.reasoning, rest);
  tools_.feed(rest, out);
  return out;
}

AnswerDelta AnswerParser::flush() {
  AnswerDelta out;
  std::vector<TextPiece> rest;
  reasoning_.flush(out.reasoning, rest);
  tools_.feed(rest, out);
  tools_.flush(out);
  return out;
}

}  // namespace ddtree
