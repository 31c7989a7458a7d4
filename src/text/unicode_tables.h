// Facts about single code points; see unicode.h for what they are for.
#pragma once

namespace ddtree {

// Normalisation must pass over c as over a character without any relation to its neighbours.
bool is_unknown_to_nfc(char32_t c);

// c itself, or a character of the class that c should have, with as many bytes in UTF-8 (c ≥ U+0800 then).
char32_t regex_stand_in(char32_t c);

}  // namespace ddtree
