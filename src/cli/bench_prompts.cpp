#include "cli/bench_prompts.h"

#include <nlohmann/json.hpp>

namespace ddtree::cli {

const std::vector<BenchPrompt>& bench_prompts() {
  static const std::vector<BenchPrompt> all = {
      {"code", "Write a Python function gcd(a, b). Return only code.", false},
      {"code", "Please implement binary_search(items, target) in Python.", false},
      {"code", "I need a Python function called median that returns the median of items. Only the code, please.", false},
      {"code", "Give me Python code for word_count(text), returning a dictionary from each word to how often it occurs.", false},
      {"sequence", "List the numbers from 12 to 40.", false},
      {"sequence", "Show me the 7 times table up to 12.", false},
      {"sequence", "List the first 16 even numbers.", false},
      {"sequence", "List the first 12 multiples of 5.", false},
      {"small talk", "Hello! How are you?", false},
      {"small talk", "What is the capital of Peru?", false},
      {"small talk", "Tell me about Norway.", false},
      {"small talk", "Thank you very much!", false},
      {"story", "Tell me a short story about a fox.", false},
      {"story", "Tell me a short story about a bear.", false},
      {"story", "Tell me a short story about a mouse.", false},
      {"story", "Tell me a short story about a horse.", false},
      {"json", "Extract name, age, city as JSON: Kira, 24, lives in Mexico City.", false},
      {"json", "What time is it in Wellington?", true},
      {"json", "Make a table with the capital and currency of Spain, Ireland, Sweden, Indonesia.", false},
      {"json", "How is the weather in Oslo today?", true},
  };
  return all;
}

nlohmann::ordered_json bench_request(const BenchPrompt& prompt) {
  nlohmann::ordered_json request;
  request["messages"] = {{{"role", "user"}, {"content", prompt.user}}};
  request["chat_template_kwargs"] = {{"enable_thinking", false}};
  if (prompt.tools) {
    const auto tool = [](const char* name, const char* what, const char* of) {
      return nlohmann::ordered_json{
          {"type", "function"},
          {"function",
           {{"name", name},
            {"description", what},
            {"parameters",
             {{"type", "object"}, {"properties", {{"city", {{"type", "string"}, {"description", of}}}}}, {"required", {"city"}}}}}}};
    };
    request["tools"] = {tool("get_time", "Get the local time of a city", "The name of the city"),
                        tool("get_weather", "Get the current weather of a city", "The name of the city")};
  }
  return request;
}

}  // namespace ddtree::cli
