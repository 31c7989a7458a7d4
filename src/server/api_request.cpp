#include "server/api_request.h"

#include <fmt/core.h>

#include <algorithm>
#include <random>

#include "server/fields.h"

namespace ddtree {

namespace {

constexpr size_t kMaxStops = 16;
constexpr size_t kMaxStopBytes = 1024;

void parse_stops(Fields& f, Request* r) {
  const Json* stop = f.any("stop");
  if (!stop) return;
  if (!stop->is_string() && !stop->is_array())
    return f.fail(invalid_value("stop", "stop must be a string or a list of strings, found " + shown(*stop)));
  const Json list = stop->is_string() ? Json::array({*stop}) : *stop;
  if (list.size() > kMaxStops)
    return f.fail(invalid_value("stop", fmt::format("stop may hold at most {} strings, found {}", kMaxStops, list.size())));
  for (size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_string() || list[i].get_ref<const std::string&>().empty())
      return f.fail(invalid_value("stop", fmt::format("stop[{}] must be a string that is not empty, found {}", i, shown(list[i]))));
    const auto& text = list[i].get_ref<const std::string&>();
    if (text.size() > kMaxStopBytes)
      return f.fail(invalid_value("stop", fmt::format("stop[{}] may be at most {} bytes long, found {}", i, kMaxStopBytes, text.size())));
    r->stop_strings.push_back(text);
  }
}

void parse_stream(Fields& f, GenerationFields* out) {
  out->stream = f.boolean("stream").value_or(false);
  const Json* options = f.object("stream_options");
  if (!options) return;
  Fields o(*options);
  out->include_usage = o.boolean("include_usage").value_or(false);
  out->continuous_usage = o.boolean("continuous_usage_stats").value_or(false) && out->include_usage;
  if (o.failed()) {
    ApiError e = o.error();
    e.message = "stream_options." + e.message;
    e.param = "stream_options." + e.param;
    f.fail(std::move(e));
  }
}

void parse_speculation(Fields& f, Request* r) {
  if (const auto name = f.text("speculative_algorithm")) {
    std::string upper = *name;
    std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    for (const SpeculationMode mode : {SpeculationMode::kNone, SpeculationMode::kDflash, SpeculationMode::kDdtree, SpeculationMode::kNextn})
      if (upper == mode_name(mode)) r->mode = mode;
    if (!r->mode)
      f.fail(invalid_value("speculative_algorithm",
                           "speculative_algorithm must be DDTREE, DFLASH, NEXTN or NONE, found " + shown(Json(*name))));
  }
  if (const Json* budget = f.any("speculative_budget")) {
    if (budget->is_string() && *budget == "auto") r->budget = 0;
    else if (budget->is_number_integer() && !(budget->is_number_unsigned() && budget->get<uint64_t>() > 256) &&
             budget->get<int64_t>() >= 1 && budget->get<int64_t>() <= 256)
      r->budget = budget->get<int32_t>();
    else
      f.fail(
          invalid_value("speculative_budget", "speculative_budget must be \"auto\" or an integer from 1 to 256, found " + shown(*budget)));
  }
}

// Known fields that are not built, with the values that ask for nothing.
void refuse_unbuilt(Fields& f) {
  f.unsupported("n", {1}, "send one request a choice");
  f.unsupported("best_of", {1}, "send one request a choice");
  f.unsupported("logit_bias", {Json::object()}, "leave it out");
  f.unsupported("structured_outputs", {Json::object()}, "ask for the format in the prompt");
  for (const char* name : {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "json_schema", "grammar"})
    f.unsupported(name, {""}, "ask for the format in the prompt");
  f.unsupported("bad_words", {Json::array()}, "leave it out");
  f.unsupported("allowed_token_ids", {Json::array()}, "leave it out");
  f.unsupported("prompt_logprobs", {0, false}, "leave it out");
  f.unsupported("use_beam_search", {false}, "leave it out");
  f.unsupported("length_penalty", {1}, "leave it out");
  f.unsupported("truncate_prompt_tokens", {}, "shorten the prompt");
  f.unsupported("return_tokens_as_token_ids", {false}, "use return_token_ids");
  f.unsupported("logits_processors", {Json::array()}, "leave it out");
  f.unsupported("repetition_detection", {Json::object(), false}, "leave it out");
  f.harmless({"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"});
  const Json* format = f.object("response_format");
  if (format && format->value("type", Json()) != "text")
    f.fail(unsupported(
        "response_format",
        fmt::format("response_format = {} is not built in this server; only {{\"type\": \"text\"}} is, so ask for the format in the prompt",
                    shown(*format))));
}

void parse_common(Fields& f, const FieldLimits& limits, GenerationFields* out) {
  Request& r = out->engine;
  SamplingParams& s = r.sampling;
  const GenerationDefaults& d = limits.defaults;
  out->model = f.text("model").value_or("");
  parse_stream(f, out);
  // A checkpoint whose generation_config.json says do_sample: false is greedy unless the request says otherwise.
  s.temperature = static_cast<float>(f.number("temperature", 0, 2).value_or(d.do_sample ? d.temperature : 0.0f));
  s.top_p = static_cast<float>(f.number("top_p", 0, 1).value_or(d.top_p));
  if (s.top_p == 0)
    f.fail(invalid_value("top_p", "top_p must be above 0 and at most 1, found 0; for greedy decoding set temperature to 0"));
  s.min_p = static_cast<float>(f.number("min_p", 0, 1).value_or(d.min_p));
  s.top_k = static_cast<int32_t>(f.integer("top_k", -1, INT32_MAX).value_or(d.top_k));
  if (s.top_k < 0) s.top_k = 0;  // vLLM's spelling of "off"
  s.presence_penalty = static_cast<float>(f.number("presence_penalty", -2, 2).value_or(0));
  s.frequency_penalty = static_cast<float>(f.number("frequency_penalty", -2, 2).value_or(0));
  s.repetition_penalty = static_cast<float>(f.number("repetition_penalty", 1e-3, 10).value_or(d.repetition_penalty));
  const Json* seed = f.any("seed");
  if (seed && seed->is_number_unsigned()) s.seed = seed->get<uint64_t>();
  else if (seed && seed->is_number_integer()) s.seed = static_cast<uint64_t>(seed->get<int64_t>());
  else if (seed) f.fail(invalid_value("seed", "seed must be an integer of at most 64 bits, found " + shown(*seed)));
  else s.seed = std::random_device{}() | (static_cast<uint64_t>(std::random_device{}()) << 32);
  s.seed_given = true;  // 0 is a seed like any other

  const auto old_name = f.integer("max_tokens", 1, INT32_MAX);
  const auto new_name = f.integer("max_completion_tokens", 1, INT32_MAX);
  if (new_name || old_name) out->max_tokens = static_cast<int32_t>(new_name.value_or(old_name.value_or(0)));
  r.min_tokens = static_cast<int32_t>(f.integer("min_tokens", 0, INT32_MAX).value_or(0));
  if (out->max_tokens && r.min_tokens > out->max_tokens)
    f.fail(invalid_value("min_tokens", fmt::format("min_tokens ({}) must not be above max_tokens ({})", r.min_tokens, out->max_tokens)));
  r.ignore_eos = f.boolean("ignore_eos").value_or(false);
  parse_stops(f, &r);
  r.stop_ids = f.ids("stop_token_ids", limits.id_count, 64).value_or(std::vector<int32_t>());
  r.include_stop_string = f.boolean("include_stop_str_in_output").value_or(false);
  r.skip_special_tokens = f.boolean("skip_special_tokens").value_or(true);
  f.boolean("spaces_between_special_tokens");  // no meaning with byte-level BPE
  out->return_token_ids = f.boolean("return_token_ids").value_or(false);
  parse_speculation(f, &r);
  refuse_unbuilt(f);
}

std::optional<ApiError> finish(Fields& f, GenerationFields* out) {
  if (f.failed()) return f.error();
  out->ignored = f.ignored();
  return {};
}

// One message's types; what the template makes of it is the template's business.
std::optional<ApiError> check_message(const Json& m, const std::string& at) {
  if (!m.is_object()) return invalid_value(at, at + " must be an object with a role, found " + shown(m));
  const auto role = m.find("role");
  if (role == m.end() || !role->is_string())
    return invalid_value(at + ".role", at + ".role must be \"system\", \"user\", \"assistant\" or \"tool\", found " +
                                           (role == m.end() ? "nothing" : shown(*role)));
  if (const auto content = m.find("content"); content != m.end() && !content->is_null() && !content->is_string()) {
    if (!content->is_array())
      return invalid_value(at + ".content", at + ".content must be a string or a list of parts, found " + shown(*content));
    for (size_t i = 0; i < content->size(); ++i) {
      const Json& part = (*content)[i];
      const std::string where = fmt::format("{}.content[{}]", at, i);
      if (!part.is_object() || !part.contains("type") || !part["type"].is_string())
        return invalid_value(where, where + " must be an object with a type, found " + shown(part));
      const auto& type = part["type"].get_ref<const std::string&>();
      if (type != "text" && type != "refusal")
        return unsupported(where + ".type", fmt::format("{}.type = \"{}\": this server takes text only; send parts of type \"text\"", where,
                                                        type.substr(0, 40)));
      if (type == "text" && (!part.contains("text") || !part["text"].is_string()))
        return invalid_value(where + ".text", where + ".text must be a string");
    }
  }
  for (const char* name : {"reasoning_content", "reasoning", "name", "tool_call_id"})
    if (const auto v = m.find(name); v != m.end() && !v->is_null() && !v->is_string())
      return invalid_value(at + "." + name, fmt::format("{}.{} must be a string, found {}", at, name, shown(*v)));
  if (const auto calls = m.find("tool_calls"); calls != m.end() && !calls->is_null()) {
    if (!calls->is_array()) return invalid_value(at + ".tool_calls", at + ".tool_calls must be a list, found " + shown(*calls));
    for (size_t i = 0; i < calls->size(); ++i) {
      const std::string where = fmt::format("{}.tool_calls[{}]", at, i);
      const Json& call = (*calls)[i];
      if (!call.is_object() || !call.contains("function") || !call["function"].is_object() || !call["function"].contains("name") ||
          !call["function"]["name"].is_string())
        return invalid_value(where, where + " must be an object with function.name, found " + shown(call));
      const Json& function = call["function"];
      if (const auto a = function.find("arguments"); a != function.end() && !a->is_null() && !a->is_string() && !a->is_object())
        return invalid_value(where + ".function.arguments",
                             where + ".function.arguments must be a JSON text or an object, found " + shown(*a));
    }
  }
  return {};
}

std::optional<ApiError> check_tools(Fields& f, ChatFields* out) {
  const Json* tools = f.array("tools");
  const Json* choice = f.any("tool_choice");
  if (f.failed()) return f.error();
  if (choice && *choice != "auto" && *choice != "none") {
    const bool known = choice->is_object() || *choice == "required";
    const auto text = fmt::format("tool_choice = {} is not built in this server; \"auto\" and \"none\" are", shown(*choice));
    return known ? unsupported("tool_choice", text)
                 : invalid_value("tool_choice", fmt::format("tool_choice must be \"auto\" or \"none\", found {}", shown(*choice)));
  }
  if (!tools || tools->empty()) return {};
  for (size_t i = 0; i < tools->size(); ++i) {
    const Json& t = (*tools)[i];
    const std::string at = fmt::format("tools[{}]", i);
    if (!t.is_object()) return invalid_value(at, at + " must be an object, found " + shown(t));
    if (const auto type = t.find("type"); type == t.end() || *type != "function")
      return invalid_value(at + ".type",
                           fmt::format("{}.type must be \"function\", found {}", at, type == t.end() ? "nothing" : shown(*type)));
    const auto function = t.find("function");
    if (function == t.end() || !function->is_object())
      return invalid_value(at + ".function", at + ".function must be an object with a name");
    if (const auto name = function->find("name");
        name == function->end() || !name->is_string() || name->get_ref<const std::string&>().empty())
      return invalid_value(at + ".function.name", at + ".function.name must be a string that is not empty");
    if (const auto p = function->find("parameters"); p != function->end() && !p->is_null() && !p->is_object())
      return invalid_value(at + ".function.parameters", at + ".function.parameters must be a JSON schema (an object), found " + shown(*p));
  }
  if (choice && *choice == "none") return {};  // the model is not shown what it may not call
  out->tools = *tools;
  return {};
}

}  // namespace

std::optional<ApiError> parse_chat(Json body, const FieldLimits& limits, ChatFields* out) {
  Fields f(body);
  const Json* messages = f.array("messages");
  if (f.failed()) return f.error();
  if (!messages) return invalid_value("messages", "messages is missing: a list of {\"role\", \"content\"} objects");
  if (messages->empty()) return invalid_value("messages", "messages is empty: at least one message is needed");
  for (size_t i = 0; i < messages->size(); ++i)
    if (auto e = check_message((*messages)[i], fmt::format("messages[{}]", i))) return e;
  parse_common(f, limits, out);
  f.unsupported("logprobs", {false}, "leave it out");
  f.unsupported("top_logprobs", {0}, "leave it out");
  f.unsupported("functions", {Json::array()}, "use tools");
  f.unsupported("function_call", {"none", "auto"}, "use tools and tool_choice");
  f.unsupported("audio", {}, "this server writes text only");
  f.unsupported("modalities", {Json::array({"text"}), Json::array()}, "this server writes text only");
  f.unsupported("prediction", {}, "leave it out");
  f.unsupported("web_search_options", {Json::object()}, "leave it out");
  f.unsupported("thinking_token_budget", {}, "set chat_template_kwargs.enable_thinking to false, or max_tokens");
  f.unsupported("chat_template", {}, "the server renders the checkpoint's own template (--chat-template replaces it)");
  f.unsupported("stream_reasoning", {true}, "leave it out");
  f.array("documents");
  const auto effort = f.text("reasoning_effort");
  const Json* kwargs = f.object("chat_template_kwargs");
  out->separate_reasoning = f.boolean("separate_reasoning").value_or(true);
  out->include_reasoning = f.boolean("include_reasoning").value_or(true);
  out->parallel_tool_calls = f.boolean("parallel_tool_calls").value_or(true);
  const bool go_on = f.boolean("continue_final_message").value_or(false);
  const auto generation_prompt = f.boolean("add_generation_prompt");
  if (go_on && generation_prompt.value_or(false))
    f.fail(invalid_value("continue_final_message",
                         "continue_final_message and add_generation_prompt exclude each other; set one of them to false"));
  if (go_on && !f.failed() && (*messages).back()["role"] != "assistant")
    f.fail(invalid_value("continue_final_message",
                         "continue_final_message needs a last message of role \"assistant\", found " + shown((*messages).back()["role"])));
  if (auto e = check_tools(f, out)) return e;
  if (auto e = finish(f, out)) return e;

  const bool no_thinking = effort && *effort == "none" && !(kwargs && kwargs->contains("enable_thinking"));
  if (out->tools.is_null()) body.erase("tools");
  if (no_thinking) {
    if (!body.contains("chat_template_kwargs") || body["chat_template_kwargs"].is_null()) body["chat_template_kwargs"] = Json::object();
    body["chat_template_kwargs"]["enable_thinking"] = false;  // OpenAI's spelling of "do not think"
  }
  out->body = std::move(body);
  return {};
}

std::optional<ApiError> parse_completion(const Json& body, const FieldLimits& limits, CompletionFields* out) {
  Fields f(body);
  const Json* prompt = f.any("prompt");
  if (!prompt) return invalid_value("prompt", "prompt is missing: a string, a list of token ids, or a list of either");
  const auto wrong = [&](const std::string& at, const Json& found) {
    return invalid_value("prompt", at + " must be a string or a list of token ids, found " + shown(found));
  };
  const auto as_ids = [&](const Json& list, const std::string& at, std::vector<int32_t>* ids) -> std::optional<ApiError> {
    for (size_t i = 0; i < list.size(); ++i) {
      const Json& e = list[i];
      const bool fits = e.is_number_integer() && (e.is_number_unsigned() ? e.get<uint64_t>() < static_cast<uint64_t>(limits.id_count)
                                                                         : e.get<int64_t>() >= 0 && e.get<int64_t>() < limits.id_count);
      if (!fits)
        return invalid_value("prompt",
                             fmt::format("{}[{}] must be a token id from 0 to {}, found {}", at, i, limits.id_count - 1, shown(e)));
      ids->push_back(e.get<int32_t>());
    }
    return {};
  };
  if (prompt->is_string()) {
    out->prompts.emplace_back(prompt->get<std::string>());
  } else if (prompt->is_array() && !prompt->empty() && (*prompt)[0].is_number()) {
    std::vector<int32_t> ids;
    if (auto e = as_ids(*prompt, "prompt", &ids)) return e;
    out->prompts.emplace_back(std::move(ids));
  } else if (prompt->is_array() && !prompt->empty()) {
    if (prompt->size() > static_cast<size_t>(limits.max_prompts))
      return invalid_value("prompt", fmt::format("prompt may hold at most {} prompts, found {}", limits.max_prompts, prompt->size()));
    for (size_t i = 0; i < prompt->size(); ++i) {
      const Json& p = (*prompt)[i];
      const std::string at = fmt::format("prompt[{}]", i);
      if (p.is_string()) {
        out->prompts.emplace_back(p.get<std::string>());
      } else if (p.is_array()) {
        std::vector<int32_t> ids;
        if (auto e = as_ids(p, at, &ids)) return e;
        out->prompts.emplace_back(std::move(ids));
      } else {
        return wrong(at, p);
      }
    }
  } else {
    return wrong("prompt", *prompt);
  }
  for (size_t i = 0; i < out->prompts.size(); ++i)
    if (std::visit([](const auto& p) { return p.empty(); }, out->prompts[i]))
      return invalid_value("prompt", out->prompts.size() > 1 ? fmt::format("prompt[{}] is empty: at least one token is needed", i)
                                                             : "prompt is empty: at least one token is needed");
  parse_common(f, limits, out);
  f.unsupported("logprobs", {false}, "leave it out");
  f.unsupported("echo", {false}, "leave it out; the prompt is known to the client");
  f.unsupported("suffix", {""}, "write the prompt with the model's own fill-in tokens");
  return finish(f, out);
}

}  // namespace ddtree
