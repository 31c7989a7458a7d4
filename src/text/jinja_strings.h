// Python's str operations on UTF-8 text, by code points.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ddtree::jinja {

using CodePoints = std::u32string;

CodePoints decode(std::string_view text);  // invalid bytes become U+FFFD
std::string encode(const CodePoints& points);
std::string encode(std::u32string_view points);
void append_utf8(std::string& out, char32_t c);
size_t count_points(std::string_view text);
bool is_ascii(std::string_view text);

bool is_space(char32_t c);
bool is_alpha(char32_t c);
bool is_decimal(char32_t c);
bool is_digit(char32_t c);
bool is_numeric(char32_t c);
bool is_alnum(char32_t c);
bool is_word(char32_t c);  // \w
bool is_lower(char32_t c);
bool is_upper(char32_t c);
bool is_title(char32_t c);
bool is_cased(char32_t c);
bool is_printable(char32_t c);
bool is_line_break(char32_t c);
int decimal_value(char32_t c);  // -1 if none

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string title(std::string_view text);
std::string capitalize(std::string_view text);
std::string swapcase(std::string_view text);
std::string casefold(std::string_view text);

// chars == nullptr: white space. `sides`: 1 left, 2 right, 3 both.
std::string_view strip(std::string_view text, const std::string* chars = nullptr, int sides = 3);
std::vector<std::string> split_lines(std::string_view text, bool keep_ends = false);
// max < 0: no bound. separator == nullptr: runs of white space.
std::vector<std::string> split(std::string_view text, const std::string* separator, int64_t max);
std::vector<std::string> rsplit(std::string_view text, const std::string* separator, int64_t max);
std::string replace(std::string_view text, std::string_view from, std::string_view to, int64_t max);
std::string escape_html(std::string_view text);

}  // namespace ddtree::jinja
