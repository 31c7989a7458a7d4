// tokenizer.json and tokenizer_config.json -> Tokenizer.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <system_error>
#include <utility>

#include "base/json_error.h"
#include "base/log.h"
#include "text/tokenizer.h"
#include "text/tokenizer_impl.h"

namespace ddtree {
namespace {

using Json = nlohmann::json;

// Larger than any vocabulary there is; keeps a corrupted id from asking for gigabytes.
constexpr int64_t kMaxId = (1 << 22) - 1;
constexpr size_t kMaxTokenBytes = 1 << 16;

constexpr std::string_view kGpt2Pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

Status bad(std::string_view where, std::string_view what) { return Status(Code::kBadModel, fmt::format("{}: {}", where, what)); }

// A value as it may stand in a message. Nested ones are only counted: dump() recurses, and a broken file may be nested without end.
std::string shown(const Json& value) {
  const bool flat = std::none_of(value.begin(), value.end(), [](const Json& v) { return v.is_structured(); });
  if (value.is_structured() && (!flat || value.size() > 4))
    return fmt::format("{} of {}", value.is_array() ? "a list" : "an object", value.size());
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 80) {
    text.resize(77);
    while (!text.empty() && !is_valid_utf8(text)) text.pop_back();
    text += "...";
  }
  return text;
}

const Json* member(const Json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(name);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

// An optional boolean; absent or null leaves *out as it is.
Status read_bool(const Json& object, const char* name, std::string_view where, bool* out) {
  const Json* value = member(object, name);
  if (value == nullptr) return {};
  if (!value->is_boolean()) return bad(fmt::format("{}.{}", where, name), fmt::format("found {}, expected true or false", shown(*value)));
  *out = value->get<bool>();
  return {};
}

Status read_string(const Json& object, const char* name, std::string_view where, std::string* out) {
  const Json* value = member(object, name);
  if (value == nullptr || !value->is_string())
    return bad(fmt::format("{}.{}", where, name),
               value == nullptr ? "missing; expected a string" : fmt::format("found {}, expected a string", shown(*value)));
  *out = value->get<std::string>();
  return {};
}

Status read_id(const Json& value, std::string_view where, int32_t* out) {
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(kMaxId)) ||
      value.get<int64_t>() < 0 || value.get<int64_t>() > kMaxId)
    return bad(where, fmt::format("found {}, expected an id from 0 to {}", shown(value), kMaxId));
  *out = static_cast<int32_t>(value.get<int64_t>());
  return {};
}

// The GPT-2 alphabet: every byte has one printable letter. code point -> byte, or -1.
const std::array<int16_t, 0x200>& byte_of_letter() {
  static const auto table = [] {
    std::array<int16_t, 0x200> t;
    t.fill(-1);
    int16_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool itself = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      t[static_cast<size_t>(itself ? b : next++)] = static_cast<int16_t>(b);
    }
    return t;
  }();
  return table;
}

// Appends the bytes that a token's string stands for; false, nothing appended, if it has letters outside that alphabet.
bool append_bytes_of(std::string_view token, std::string* out) {
  const size_t before = out->size();
  int length = 0;
  for (const char *p = token.data(), *end = p + token.size(); p < end; p += length) {
    const char32_t c = decode_utf8(p, &length);
    const int byte = c < 0x200 ? byte_of_letter()[c] : -1;
    if (byte < 0) return out->resize(before), false;
    out->push_back(static_cast<char>(byte));
  }
  return true;
}

class Loader {
 public:
  Loader(std::string_view file, Tokenizer::Impl* impl) : file_(file), impl_(*impl) {}

  Status load(const Json& root, const Json& config);

 private:
  std::string at(std::string_view field) const { return fmt::format("{}: {}", file_, field); }
  Status read_normalizer(const Json& node, const std::string& where, int depth);
  Status read_pre_tokenizer(const Json& node, const std::string& where, int depth);
  Status read_split(const Json& node, const std::string& where);
  Status read_decoder(const Json& node, const std::string& where, int depth);
  Status read_model(const Json& model);
  Status read_vocabulary(const Json& vocabulary);
  Status read_merges(const Json& merges);
  Status read_added_token(const Json& node, const std::string& where, AddedToken* token);
  Status read_added_tokens(const Json& root, const Json& config);
  void finish();

  std::string file_;
  Tokenizer::Impl& impl_;
  bool byte_level_ = false;     // the pre-tokenizer has reached ByteLevel
  bool decodes_bytes_ = false;  // the decoder has one
  std::map<int32_t, AddedToken> added_;
  std::vector<std::pair<int32_t, std::string_view>> by_id_;  // the model's vocabulary, by rising id
};

Status Loader::load(const Json& root, const Json& config) {
  if (!root.is_object()) return bad(file_, fmt::format("found {}, expected a JSON object", shown(root)));
  const Json* model = member(root, "model");
  if (model == nullptr) return bad(at("model"), "missing; expected a BPE model");
  DDTREE_RETURN_IF_ERROR(read_model(*model));
  if (const Json* node = member(root, "normalizer")) DDTREE_RETURN_IF_ERROR(read_normalizer(*node, at("normalizer"), 0));
  if (const Json* node = member(root, "pre_tokenizer")) DDTREE_RETURN_IF_ERROR(read_pre_tokenizer(*node, at("pre_tokenizer"), 0));
  if (!byte_level_) return bad(at("pre_tokenizer"), "no ByteLevel step; only byte-level BPE is supported");
  if (const Json* node = member(root, "decoder")) DDTREE_RETURN_IF_ERROR(read_decoder(*node, at("decoder"), 0));
  if (!decodes_bytes_) return bad(at("decoder"), "no ByteLevel decoder; only byte-level BPE is supported");
  DDTREE_RETURN_IF_ERROR(read_added_tokens(root, config));
  finish();
  return {};
}

Status Loader::read_normalizer(const Json& node, const std::string& where, int depth) {
  std::string type;
  DDTREE_RETURN_IF_ERROR(read_string(node, "type", where, &type));
  if (type == "Sequence") {
    const Json* list = member(node, "normalizers");
    if (list == nullptr || !list->is_array() || depth > 4) return bad(where + ".normalizers", "expected a list of normalizers");
    for (size_t i = 0; i < list->size(); ++i)
      DDTREE_RETURN_IF_ERROR(read_normalizer((*list)[i], fmt::format("{}.normalizers[{}]", where, i), depth + 1));
    return {};
  }
  // The compatibility forms would need Unicode 9's tables too (unicode.h), and no byte-level model asks for them.
  if (type != "NFC" && type != "NFD") return bad(where + ".type", fmt::format("\"{}\" is not supported; NFC, NFD and Sequence are", type));
  impl_.normalizers.push_back(type == "NFC" ? NormalForm::kNfc : NormalForm::kNfd);
  return {};
}

Status Loader::read_pre_tokenizer(const Json& node, const std::string& where, int depth) {
  std::string type;
  DDTREE_RETURN_IF_ERROR(read_string(node, "type", where, &type));
  if (type == "Sequence") {
    const Json* list = member(node, "pretokenizers");
    if (list == nullptr || !list->is_array() || depth > 4) return bad(where + ".pretokenizers", "expected a list of pre-tokenizers");
    for (size_t i = 0; i < list->size(); ++i)
      DDTREE_RETURN_IF_ERROR(read_pre_tokenizer((*list)[i], fmt::format("{}.pretokenizers[{}]", where, i), depth + 1));
    return {};
  }
  // What follows ByteLevel would see its letters instead of the text.
  if (byte_level_) return bad(where, fmt::format("{} after ByteLevel is not supported", type));
  if (impl_.steps.size() >= 64) return bad(where, "more than 64 steps");
  if (type == "Split") return read_split(node, where);
  if (type == "Digits") {
    bool individual = false;
    DDTREE_RETURN_IF_ERROR(read_bool(node, "individual_digits", where, &individual));
    SplitStep step;
    Result<SplitPattern> pattern = SplitPattern::compile("\\p{N}");
    if (!pattern.ok()) return pattern.status();
    step.pattern = std::move(*pattern);
    step.behavior = individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous;
    impl_.steps.push_back(std::move(step));
    return {};
  }
  if (type == "ByteLevel") {
    SplitStep step;
    bool use_regex = true;
    step.add_prefix_space = true;  // tokenizer.json's own defaults
    DDTREE_RETURN_IF_ERROR(read_bool(node, "add_prefix_space", where, &step.add_prefix_space));
    DDTREE_RETURN_IF_ERROR(read_bool(node, "use_regex", where, &use_regex));
    if (use_regex) {
      Result<SplitPattern> pattern = SplitPattern::compile(kGpt2Pattern);
      if (!pattern.ok()) return pattern.status();
      step.pattern = std::move(*pattern);
    }
    if (step.add_prefix_space || use_regex) impl_.steps.push_back(std::move(step));
    byte_level_ = true;
    return {};
  }
  return bad(where + ".type", fmt::format("\"{}\" is not supported; Split, Digits, ByteLevel and Sequence are", type));
}

Status Loader::read_split(const Json& node, const std::string& where) {
  SplitStep step;
  std::string behavior = "Isolated", text;
  if (member(node, "behavior") != nullptr) DDTREE_RETURN_IF_ERROR(read_string(node, "behavior", where, &behavior));
  constexpr std::pair<std::string_view, SplitBehavior> kBehaviors[] = {{"Isolated", SplitBehavior::kIsolated},
                                                                       {"Removed", SplitBehavior::kRemoved},
                                                                       {"Contiguous", SplitBehavior::kContiguous},
                                                                       {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
                                                                       {"MergedWithNext", SplitBehavior::kMergedWithNext}};
  const auto* found = std::find_if(std::begin(kBehaviors), std::end(kBehaviors), [&](const auto& b) { return b.first == behavior; });
  if (found == std::end(kBehaviors))
    return bad(where + ".behavior",
               fmt::format("found \"{}\", expected Isolated, Removed, Contiguous, MergedWithPrevious or MergedWithNext", behavior));
  step.behavior = found->second;
  DDTREE_RETURN_IF_ERROR(read_bool(node, "invert", where, &step.invert));
  const Json* pattern = member(node, "pattern");
  if (pattern == nullptr || !pattern->is_object() || pattern->size() != 1)
    return bad(where + ".pattern", R"(expected {"Regex": "..."} or {"String": "..."})");
  const bool regex = pattern->contains("Regex");
  DDTREE_RETURN_IF_ERROR(read_string(*pattern, regex ? "Regex" : "String", where + ".pattern", &text));
  Result<SplitPattern> compiled = regex ? SplitPattern::compile(text) : SplitPattern::literal(text);
  if (!compiled.ok()) return bad(where + ".pattern", compiled.status().message());
  step.pattern = std::move(*compiled);
  impl_.steps.push_back(std::move(step));
  return {};
}

Status Loader::read_decoder(const Json& node, const std::string& where, int depth) {
  std::string type;
  DDTREE_RETURN_IF_ERROR(read_string(node, "type", where, &type));
  if (type == "ByteLevel") return decodes_bytes_ = true, Status();
  if (type == "Fuse" && decodes_bytes_) return {};  // joins what ByteLevel has joined already
  if (type == "Sequence") {
    const Json* list = member(node, "decoders");
    if (list == nullptr || !list->is_array() || depth > 4) return bad(where + ".decoders", "expected a list of decoders");
    for (size_t i = 0; i < list->size(); ++i)
      DDTREE_RETURN_IF_ERROR(read_decoder((*list)[i], fmt::format("{}.decoders[{}]", where, i), depth + 1));
    return {};
  }
  return bad(where + ".type", fmt::format("\"{}\" is not supported; ByteLevel is", type));
}

Status Loader::read_model(const Json& model) {
  const std::string where = at("model");
  if (!model.is_object()) return bad(where, fmt::format("found {}, expected an object", shown(model)));
  if (member(model, "type") != nullptr) {  // old files leave it out
    std::string type;
    DDTREE_RETURN_IF_ERROR(read_string(model, "type", where, &type));
    if (type != "BPE") return bad(where + ".type", fmt::format("\"{}\" is not supported; BPE is", type));
  }
  bool byte_fallback = false;
  DDTREE_RETURN_IF_ERROR(read_bool(model, "byte_fallback", where, &byte_fallback));
  if (byte_fallback) return bad(where + ".byte_fallback", "true is not supported (byte-level BPE has no need of it)");
  DDTREE_RETURN_IF_ERROR(read_bool(model, "fuse_unk", where, &impl_.merges.fuse_unknown));
  DDTREE_RETURN_IF_ERROR(read_bool(model, "ignore_merges", where, &impl_.ignore_merges));
  if (const Json* dropout = member(model, "dropout"); dropout != nullptr && !(dropout->is_number() && dropout->get<double>() == 0.0))
    return bad(where + ".dropout", fmt::format("found {}, expected null: dropout is for training", shown(*dropout)));
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (const Json* affix = member(model, name); affix != nullptr && !(affix->is_string() && affix->get_ref<const std::string&>().empty()))
      return bad(where + "." + name, fmt::format("found {}; only null or \"\" is supported", shown(*affix)));

  const Json* vocabulary = member(model, "vocab");
  if (vocabulary == nullptr || !vocabulary->is_object() || vocabulary->empty())
    return bad(where + ".vocab", "expected an object from token to id, with at least one");
  DDTREE_RETURN_IF_ERROR(read_vocabulary(*vocabulary));
  if (const Json* unknown = member(model, "unk_token")) {
    if (!unknown->is_string()) return bad(where + ".unk_token", fmt::format("found {}, expected a string or null", shown(*unknown)));
    const auto& name = unknown->get_ref<const std::string&>();
    const auto it = impl_.vocabulary.find(name);
    if (it != impl_.vocabulary.end()) impl_.merges.unknown_id = it->second;
    else if (!name.empty()) return bad(where + ".unk_token", fmt::format("\"{}\" is not in vocab", name));
  }
  const Json* merges = member(model, "merges");
  if (merges == nullptr || !merges->is_array()) return bad(where + ".merges", "missing; expected a list of pairs");
  return read_merges(*merges);
}

Status Loader::read_vocabulary(const Json& vocabulary) {
  size_t total = 0;
  for (const auto& [token, id] : vocabulary.items()) total += token.size();
  if (total > UINT32_MAX / 2) return bad(at("model.vocab"), "larger than 2 GiB");
  impl_.spelling.reserve(total);  // the keys below point into it
  impl_.vocabulary.reserve(vocabulary.size());
  by_id_.reserve(vocabulary.size());
  for (const auto& [token, value] : vocabulary.items()) {
    if (token.size() > kMaxTokenBytes)
      return bad(at("model.vocab"), fmt::format("a token of {} bytes; at most {} are read", token.size(), kMaxTokenBytes));
    int32_t id = -1;
    DDTREE_RETURN_IF_ERROR(read_id(value, at(fmt::format("model.vocab[{}]", shown(token))), &id));
    const size_t begin = impl_.spelling.size();
    impl_.spelling += token;
    const std::string_view kept = std::string_view(impl_.spelling).substr(begin);
    impl_.vocabulary.emplace(kept, id);
    by_id_.emplace_back(id, kept);
  }
  std::sort(by_id_.begin(), by_id_.end());
  for (size_t i = 1; i < by_id_.size(); ++i)
    if (by_id_[i].first == by_id_[i - 1].first)
      return bad(at("model.vocab"), fmt::format("id {} belongs to both {} and {}", by_id_[i].first,
                                                shown(std::string(by_id_[i - 1].second)), shown(std::string(by_id_[i].second))));
  for (int letter = 0; letter < 0x200; ++letter)
    if (const int byte = byte_of_letter()[static_cast<size_t>(letter)]; byte >= 0) {
      std::string token;
      append_utf8(static_cast<char32_t>(letter), &token);
      const auto it = impl_.vocabulary.find(token);
      if (it != impl_.vocabulary.end()) impl_.merges.byte_id[static_cast<size_t>(byte)] = it->second;
    }
  return {};
}

Status Loader::read_merges(const Json& merges) {
  impl_.merges.reserve(merges.size());
  std::string joined;
  for (size_t i = 0; i < merges.size(); ++i) {
    const Json& merge = merges[i];
    std::string_view left, right;
    if (merge.is_string()) {
      const std::string_view line = merge.get_ref<const std::string&>();
      // merges.txt's first line, carried along by old conversions. Only the order of the ranks matters, so nothing shifts.
      if (line.starts_with("#version")) continue;
      const size_t space = line.find(' ');
      if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos)
        return bad(at(fmt::format("model.merges[{}]", i)),
                   fmt::format("found {}, expected two tokens with one space between", shown(merge)));
      left = line.substr(0, space);
      right = line.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get_ref<const std::string&>();
      right = merge[1].get_ref<const std::string&>();
    } else {
      return bad(at(fmt::format("model.merges[{}]", i)), fmt::format("found {}, expected \"a b\" or [\"a\", \"b\"]", shown(merge)));
    }
    joined.assign(left).append(right);
    const std::string_view parts[] = {left, right, joined};
    int32_t ids[3];
    for (int k = 0; k < 3; ++k) {
      const auto it = impl_.vocabulary.find(parts[k]);
      if (it == impl_.vocabulary.end())
        return bad(at(fmt::format("model.merges[{}]", i)),
                   fmt::format("{}: {} is not in model.vocab", shown(merge), shown(std::string(parts[k]))));
      ids[k] = it->second;
    }
    impl_.merges.add(ids[0], ids[1], static_cast<uint32_t>(i), ids[2]);
  }
  return {};
}

Status Loader::read_added_token(const Json& node, const std::string& where, AddedToken* token) {
  if (!node.is_object()) return bad(where, fmt::format("found {}, expected an object", shown(node)));
  DDTREE_RETURN_IF_ERROR(read_string(node, "content", where, &token->content));
  if (token->content.size() > kMaxTokenBytes)
    return bad(where + ".content", fmt::format("{} bytes; at most {} are read", token->content.size(), kMaxTokenBytes));
  DDTREE_RETURN_IF_ERROR(read_bool(node, "special", where, &token->special));
  DDTREE_RETURN_IF_ERROR(read_bool(node, "lstrip", where, &token->lstrip));
  DDTREE_RETURN_IF_ERROR(read_bool(node, "rstrip", where, &token->rstrip));
  DDTREE_RETURN_IF_ERROR(read_bool(node, "single_word", where, &token->single_word));
  return read_bool(node, "normalized", where, &token->normalized);
}

Status Loader::read_added_tokens(const Json& root, const Json& config) {
  std::map<std::string, int32_t> by_content;
  if (const Json* list = member(root, "added_tokens")) {
    if (!list->is_array()) return bad(at("added_tokens"), fmt::format("found {}, expected a list", shown(*list)));
    for (size_t i = 0; i < list->size(); ++i) {
      const std::string where = at(fmt::format("added_tokens[{}]", i));
      const Json& node = (*list)[i];
      AddedToken token;
      DDTREE_RETURN_IF_ERROR(read_added_token(node, where, &token));
      const Json* id = member(node, "id");
      if (id == nullptr) return bad(where + ".id", "missing");
      DDTREE_RETURN_IF_ERROR(read_id(*id, where + ".id", &token.id));
      if (token.content.empty()) continue;  // Hugging Face passes over them
      if (const auto it = impl_.vocabulary.find(token.content); it != impl_.vocabulary.end() && it->second != token.id)
        return bad(where + ".id", fmt::format("found {}, but {} is {} in model.vocab", token.id, shown(token.content), it->second));
      if (const auto it = added_.find(token.id); it != added_.end() && it->second.content != token.content)
        return bad(where + ".id",
                   fmt::format("id {} belongs to both {} and {}", token.id, shown(it->second.content), shown(token.content)));
      const auto [it, fresh] = by_content.emplace(token.content, token.id);
      if (!fresh && it->second != token.id)
        return bad(where + ".id", fmt::format("{} has both id {} and id {}", shown(token.content), it->second, token.id));
      added_[token.id] = std::move(token);
    }
  }
  const Json* more = member(config, "added_tokens_decoder");
  if (more == nullptr) return {};
  const std::string field = "tokenizer_config.json: added_tokens_decoder";
  if (!more->is_object()) return bad(field, fmt::format("found {}, expected an object from id to token", shown(*more)));
  for (const auto& [key, node] : more->items()) {
    const std::string where = fmt::format("{}[{}]", field, shown(key));
    AddedToken token;
    if (key.empty() || key.size() > 8 || key.find_first_not_of("0123456789") != std::string::npos || std::stol(key) > kMaxId)
      return bad(where, fmt::format("expected an id from 0 to {}", kMaxId));
    token.id = static_cast<int32_t>(std::stol(key));
    DDTREE_RETURN_IF_ERROR(read_added_token(node, where, &token));
    if (token.content.empty()) continue;
    // A token of tokenizer.json keeps its id; the flags here win, as they do in transformers.
    if (const auto same = by_content.find(token.content); same != by_content.end()) {
      if (same->second != token.id) log::warn("{}: {} has id {} in {}; that is taken", where, shown(token.content), same->second, file_);
      token.id = same->second;
      added_[token.id] = std::move(token);
      continue;
    }
    if (const auto other = added_.find(token.id); other != added_.end()) {
      log::warn("{}: {} has the id of {} in {}; it is left out", where, shown(token.content), shown(other->second.content), file_);
      continue;
    }
    by_content.emplace(token.content, token.id);
    added_[token.id] = std::move(token);
  }
  return {};
}

void Loader::finish() {
  int32_t last = by_id_.back().first;
  if (!added_.empty()) last = std::max(last, added_.rbegin()->first);
  const size_t count = static_cast<size_t>(last) + 1;
  impl_.added_index.assign(count, -1);
  impl_.present.assign(count, false);
  impl_.added.reserve(added_.size());     // matchers point into it
  std::map<int32_t, std::string> normal;  // added tokens whose normalised spelling differs
  for (auto& [id, token] : added_) {
    impl_.added_index[static_cast<size_t>(id)] = static_cast<int32_t>(impl_.added.size());
    impl_.added.push_back(std::move(token));
    const AddedToken& kept = impl_.added.back();
    if (!kept.normalized) {
      impl_.raw_matcher.add(kept.content, &kept);
      continue;
    }
    std::string spelling = kept.content, next;
    for (NormalForm form : impl_.normalizers)
      if (normalize_utf8(spelling, form, &next)) spelling.swap(next);
    impl_.normal_matcher.add(spelling, &kept);
    normal.emplace(id, std::move(spelling));
  }
  impl_.byte_offsets.reserve(count + 1);
  auto entry = by_id_.begin();
  for (size_t id = 0; id < count; ++id) {
    impl_.byte_offsets.push_back(static_cast<uint32_t>(impl_.bytes.size()));
    std::string_view spelled;
    const bool in_model = entry != by_id_.end() && static_cast<size_t>(entry->first) == id;
    if (in_model) spelled = (entry++)->second;
    const int32_t index = impl_.added_index[id];
    if (index >= 0) {
      const auto it = normal.find(static_cast<int32_t>(id));
      spelled = it != normal.end() ? std::string_view(it->second) : std::string_view(impl_.added[static_cast<size_t>(index)].content);
    }
    impl_.present[id] = in_model || index >= 0;
    if (!append_bytes_of(spelled, &impl_.bytes)) impl_.bytes += spelled;  // as Hugging Face's decoder: such a string stands for itself
  }
  impl_.byte_offsets.push_back(static_cast<uint32_t>(impl_.bytes.size()));
  if (!impl_.ignore_merges) return;
  impl_.word_bytes.reserve(impl_.spelling.size());  // bytes are never more than letters; the keys point into it
  impl_.words.reserve(by_id_.size());
  for (const auto& [id, spelled] : by_id_) {
    const size_t begin = impl_.word_bytes.size();
    if (append_bytes_of(spelled, &impl_.word_bytes)) impl_.words.emplace(std::string_view(impl_.word_bytes).substr(begin), id);
  }
}

Result<Json> parse(std::string_view text, std::string_view file) {
  try {
    return Json::parse(text.begin(), text.end());
  } catch (const Json::exception& e) {
    return Status(Code::kBadModel, fmt::format("{}: not valid JSON: {}", file, json_error_text(e.what())));
  }
}

Result<std::string> read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream content;
  if (in) content << in.rdbuf();
  if (!in) return Status(Code::kBadModel, fmt::format("{}: cannot be read: {}", path.string(), std::strerror(errno)));
  return std::move(content).str();
}

}  // namespace

Result<Tokenizer> Tokenizer::from_json(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                                       std::string_view file_name) {
  Result<Json> root = parse(tokenizer_json, file_name);
  if (!root.ok()) return root.status();
  Json config;
  if (!tokenizer_config_json.empty()) {
    Result<Json> parsed = parse(tokenizer_config_json, "tokenizer_config.json");
    if (!parsed.ok()) return parsed.status();
    config = std::move(*parsed);
    if (!config.is_object()) return bad("tokenizer_config.json", fmt::format("found {}, expected a JSON object", shown(config)));
  }
  auto impl = std::make_unique<Impl>();
  Loader loader(file_name, impl.get());
  DDTREE_RETURN_IF_ERROR(loader.load(*root, config));
  return Tokenizer(std::move(impl));
}

Result<Tokenizer> Tokenizer::load(const std::string& path) {
  std::error_code error;
  std::filesystem::path file(path);
  if (std::filesystem::is_directory(file, error)) file /= "tokenizer.json";
  Result<std::string> json = read_file(file);
  if (!json.ok()) return json.status();
  const std::filesystem::path config_file = file.parent_path() / "tokenizer_config.json";
  std::string config;
  if (std::filesystem::exists(config_file, error)) {
    Result<std::string> read = read_file(config_file);
    if (!read.ok()) return read.status();
    config = std::move(*read);
  }
  return from_json(*json, config, file.string());
}

}  // namespace ddtree
