// UTF-8 and the few Unicode properties that the tokenizer needs.
//
// Two Unicode versions matter, because ids must be those that a model was trained with, i.e. Hugging Face's: its NFC knows
// Unicode 9, its regular expressions (Oniguruma) know Unicode 16. Our libraries know others (utf8proc 15, PCRE2 14 on Debian 12);
// unicode_tables.cpp lists where they differ, and the functions below even it out.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ddtree {

// The code point at p (valid UTF-8, p < end); *length gets its bytes (1 … 4).
char32_t decode_utf8(const char* p, int* length);

// The code point that ends just before `end` in valid UTF-8 that begins at `begin` < end.
char32_t decode_utf8_before(const char* begin, const char* end);

void append_utf8(char32_t code_point, std::string* out);

bool is_valid_utf8(std::string_view bytes);

// Appends bytes to *out with each maximal broken sequence replaced by one U+FFFD (the Unicode standard's recommendation, what
// browsers and Rust's from_utf8_lossy do). Unless `final`, a tail that may still become a valid character is left alone.
// Returns the number of bytes consumed (bytes.size() if final; at least bytes.size() - 3 otherwise).
size_t append_lossy_utf8(std::string_view bytes, bool final, std::string* out);

enum class NormalForm { kNfc, kNfd };

// Normalises valid UTF-8. Returns true and fills *out if text is not normalised already; otherwise false, *out untouched.
// Time is O(n log n), also for endless runs of combining marks.
bool normalize_utf8(std::string_view text, NormalForm form, std::string* out);

// Unicode's White_Space.
bool is_white_space(char32_t c);

// \w of Unicode's regular expressions (UTS #18): Alphabetic, marks, decimal digits, connectors, joiners.
bool is_word_character(char32_t c);

// Copies text into *out with every character whose class PCRE2 and Oniguruma see differently replaced by another of the right
// class and the same number of bytes, so that offsets stay. Returns false, *out untouched, where there is none: the usual case.
bool replace_misclassified(std::string_view text, std::string* out);

}  // namespace ddtree
