#include "health/smoke_inputs.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>

namespace ddtree {

SmokeInputs generic_smoke_inputs() {
  SmokeInputs in;
  in.coherent = {{"capital-of-france", "What is the capital of France? Answer in one short sentence.", "", 32},
                 {"why-is-the-sky-blue", "Why is the sky blue? Answer in two sentences.", "", 64}};
  in.counting = {"count-1-20", "Count from 1 to 20, separated by commas.", "", 112};
  in.counting_text = "1, 2, 3, 4, 5, 6, 7, 8,";
  in.tool = {"get_weather", "Get the current weather of a city", {{"city", "string", "The name of the city"}}};
  in.tool_user = "What is the weather in Paris?", in.tool_argument = "city", in.tool_value = "Paris";
  in.long_depths = {0.1, 0.5, 0.9};
  return in;
}

SmokeInputs embedded_smoke_inputs() {
  SmokeInputs in = generic_smoke_inputs();
  in.known = true;
  in.coherent = {{"numbers-35-61", "List the numbers from 35 to 61.", "57, 58, 59, 60, 61", 160},
                 {"capital-of-morocco", "What is the capital of Morocco?", "Rabat", 48},
                 {"reverse-string", "I need a Python function called reverse_string that returns text with its characters reversed.",
                  "text[::-1]", 96}};
  in.counting = {"count-1-20", "Count from 1 to 20.", "", 112};
  in.needle_tokens = 1107;
  in.long_depths = {1};
  return in;
}

namespace {

const std::array<const char*, 8> kShips = {"Alder", "Birch", "Cedar", "Hazel", "Larch", "Maple", "Rowan", "Willow"};
const std::array<const char*, 7> kGoods = {"apples", "copper", "glass", "lamps", "paper", "salt", "tea"};
const std::array<const char*, 9> kPorts = {"Bergen", "Cork", "Genoa", "Kiel", "Lisbon", "Oslo", "Porto", "Riga", "Turku"};

}  // namespace

NeedleQuestion generic_needle(int64_t units, double depth) {
  NeedleQuestion needle;
  const auto at = static_cast<int64_t>(depth * static_cast<double>(units));
  // Another code at every depth: an answer kept from the one before is wrong.
  const int code = 7391 - static_cast<int>(depth * 1000);
  std::string text = "Here is the log of a harbour.\n\n";
  for (int64_t i = 0; i <= units; ++i) {
    if (i == at) text += fmt::format("Note: the code of the north gate is {}.\n", code);
    if (i == units) break;
    // Five digits throughout: every line has the same number of tokens, or nearly.
    const auto u = static_cast<size_t>(i);
    text += fmt::format("Record {}: the {} unloaded {} crates of {} at {}.\n", 10000 + i, kShips[u % kShips.size()], 11 + (i * 37) % 89,
                        kGoods[u % kGoods.size()], kPorts[u % kPorts.size()]);
  }
  text += "\nWhat is the code of the north gate? Answer with the number only.";
  needle.question.id = "needle-harbour";
  needle.question.messages = {{"user", std::move(text)}};
  needle.question.max_tokens = 24;
  needle.expect = std::to_string(code);
  return needle;
}

NeedleQuestion embedded_needle(int64_t units, double depth) {
  NeedleQuestion needle;
  auto& messages = needle.question.messages;
  const auto at = static_cast<int64_t>(depth * static_cast<double>(units));
  for (int64_t i = 0; i <= units; ++i) {
    if (i == at) {
      messages.push_back({"user", "My name is Iris."});
      messages.push_back({"assistant", "Nice to meet you, Iris! How can I help you today?"});
    }
    if (i == units) break;
    const int64_t k = 2 + i % 11;
    std::string table;
    for (int64_t n = 1; n <= 12; ++n) table += fmt::format("{}{} x {} = {}", n == 1 ? "" : "\n", n, k, n * k);
    messages.push_back({"user", fmt::format("Show me the {} times table up to 12.", k)});
    messages.push_back({"assistant", std::move(table)});
  }
  messages.push_back({"user", "Say hello to me."});
  needle.question.id = "needle-name";
  needle.question.max_tokens = 16;
  needle.expect = "Iris";
  return needle;
}

std::vector<int64_t> numbers_in(std::string_view text) {
  std::vector<int64_t> numbers;
  for (size_t i = 0; i < text.size();) {
    if (!std::isdigit(static_cast<unsigned char>(text[i]))) {
      ++i;
      continue;
    }
    size_t end = i;
    int64_t value = 0;
    while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end]))) {
      if (end - i < 9) value = value * 10 + (text[end] - '0');
      ++end;
    }
    if (end - i <= 9) numbers.push_back(value);
    i = end;
  }
  return numbers;
}

std::string counting_fault(std::string_view text, int64_t from, int64_t to) {
  const std::vector<int64_t> numbers = numbers_in(text);
  // Models repeat the question first ("from 1 to 20: 1, 2, …"), so every occurrence of the first number may be the beginning.
  size_t best = 0;
  int64_t instead = -1;
  for (size_t i = 0; i < numbers.size(); ++i) {
    size_t n = 0;
    while (i + n < numbers.size() && numbers[i + n] == from + static_cast<int64_t>(n) && numbers[i + n] <= to) ++n;
    if (n > best) best = n, instead = i + n < numbers.size() ? numbers[i + n] : -1;
  }
  if (static_cast<int64_t>(best) == to - from + 1) return {};
  if (best == 0) return fmt::format("no {} in the answer: it does not count", from);
  return fmt::format("counts from {} to {}, then {}; should go on to {}", from, from + static_cast<int64_t>(best) - 1,
                     instead < 0 ? "ends" : fmt::format("says {}", instead), to);
}

}  // namespace ddtree
