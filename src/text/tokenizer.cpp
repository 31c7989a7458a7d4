#include "text/tokenizer.h"

#include <utility>

#include "text/tokenizer_impl.h"
#include "text/unicode.h"

namespace ddtree {
namespace {

constexpr size_t kIdleScratch = 8;

}  // namespace

class Tokenizer::Impl::Lease {
 public:
  explicit Lease(const Impl& impl) : impl_(impl) {
    {
      const std::lock_guard lock(impl.mutex);
      if (!impl.idle.empty()) {
        scratch_ = std::move(impl.idle.back());
        impl.idle.pop_back();
      }
    }
    if (scratch_ == nullptr) scratch_ = std::make_unique<Scratch>(impl);
  }
  ~Lease() {
    const std::lock_guard lock(impl_.mutex);
    if (impl_.idle.size() < kIdleScratch) impl_.idle.push_back(std::move(scratch_));
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Scratch* get() const { return scratch_.get(); }

 private:
  const Impl& impl_;
  std::unique_ptr<Scratch> scratch_;
};

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool parse_added_tokens) const {
  std::vector<int32_t> ids;
  std::string valid;
  if (!is_valid_utf8(text)) {
    append_lossy_utf8(text, true, &valid);
    text = valid;
  }
  const Impl& impl = *impl_;
  const Impl::Lease lease(impl);
  Impl::Scratch* const scratch = lease.get();
  ids.reserve(text.size() / 4 + 8);

  auto& raw = scratch->raw_spans;
  raw.clear();
  if (parse_added_tokens && !impl.raw_matcher.empty()) impl.raw_matcher.split(text, &raw);
  else if (!text.empty()) raw.push_back({0, text.size(), -1});

  std::string normalized, next;
  for (const auto& span : raw) {
    if (span.token >= 0) {
      ids.push_back(span.token);
      continue;
    }
    std::string_view piece = text.substr(span.begin, span.end - span.begin);
    for (NormalForm form : impl.normalizers)
      if (normalize_utf8(piece, form, &next)) {
        normalized.swap(next);
        piece = normalized;
      }
    if (!parse_added_tokens || impl.normal_matcher.empty()) {
      impl.encode_text(piece, scratch, &ids);
      continue;
    }
    auto& spans = scratch->normal_spans;
    spans.clear();
    impl.normal_matcher.split(piece, &spans);
    for (const auto& s : spans) {
      if (s.token >= 0) ids.push_back(s.token);
      else impl.encode_text(piece.substr(s.begin, s.end - s.begin), scratch, &ids);
    }
  }
  return ids;
}

void Tokenizer::Impl::encode_text(std::string_view text, Scratch* scratch, std::vector<int32_t>* out) const {
  std::string replaced;
  const bool differs = replace_misclassified(text, &replaced);
  encode_step(0, text, differs ? std::string_view(replaced) : text, scratch, out);
}

void Tokenizer::Impl::encode_step(size_t index, std::string_view text, std::string_view classes, Scratch* scratch,
                                  std::vector<int32_t>* out) const {
  if (index == steps.size()) {
    if (ignore_merges)
      if (const auto it = words.find(text); it != words.end()) return out->push_back(it->second);
    return scratch->encoder.encode(text, out);
  }
  const SplitStep& step = steps[index];
  std::string prefixed, prefixed_classes;
  if (step.add_prefix_space && !text.starts_with(' ')) {
    prefixed.append(1, ' ').append(text);
    prefixed_classes.append(1, ' ').append(classes);
    text = prefixed;
    classes = prefixed_classes;
  }
  if (!step.pattern.has_value()) return encode_step(index + 1, text, classes, scratch, out);
  auto& ranges = scratch->ranges[index];
  ranges.clear();
  step.pattern->split(classes, step.behavior, step.invert, &scratch->pattern, &ranges);
  for (const SplitRange& r : ranges)
    encode_step(index + 1, text.substr(r.begin, r.end - r.begin), classes.substr(r.begin, r.end - r.begin), scratch, out);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string raw;
  for (int32_t id : ids) {
    if (skip_special)
      if (const AddedToken* token = added(id); token != nullptr && token->special) continue;
    raw.append(token_bytes(id));
  }
  if (is_valid_utf8(raw)) return raw;
  std::string text;
  append_lossy_utf8(raw, true, &text);
  return text;
}

int32_t Tokenizer::id_count() const { return static_cast<int32_t>(impl_->present.size()); }

const AddedToken* Tokenizer::added(int32_t id) const {
  if (id < 0 || id >= id_count()) return nullptr;
  const int32_t index = impl_->added_index[static_cast<size_t>(id)];
  return index < 0 ? nullptr : &impl_->added[static_cast<size_t>(index)];
}

std::span<const AddedToken> Tokenizer::added_tokens() const { return impl_->added; }

std::optional<int32_t> Tokenizer::id_of(std::string_view token) const {
  for (const AddedToken& t : impl_->added)
    if (t.content == token) return t.id;
  if (const auto it = impl_->vocabulary.find(token); it != impl_->vocabulary.end()) return it->second;
  return std::nullopt;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id < 0 || id >= id_count()) return {};
  const auto i = static_cast<size_t>(id);
  return std::string_view(impl_->bytes).substr(impl_->byte_offsets[i], impl_->byte_offsets[i + 1] - impl_->byte_offsets[i]);
}

bool Tokenizer::has_token(int32_t id) const { return id >= 0 && id < id_count() && impl_->present[static_cast<size_t>(id)]; }

}  // namespace ddtree
