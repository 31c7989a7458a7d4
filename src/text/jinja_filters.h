// The two halves of the filters: over sequences and numbers, and over text.
#pragma once

#include <string_view>
#include <unordered_map>

#include "text/jinja_builtins.h"
#include "text/jinja_render.h"

namespace ddtree::jinja {

using Filter = Value (*)(Interpreter&, const Value&, Args&);
using FilterTable = std::unordered_map<std::string_view, Filter>;

const FilterTable& sequence_filters();  // jinja_filters.cpp
const FilterTable& text_filters();      // jinja_text_filters.cpp

}  // namespace ddtree::jinja
