// /tokenize and /detokenize, in the shape that vLLM's and llama.cpp's clients send.
#include <fmt/core.h>

#include "server/fields.h"
#include "server/routes.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace ddtree {

namespace {

void tokenize(Service& service, const HttpRequest& request, HttpResponse& response) {
  ApiError error;
  const auto serving = serving_or_error(service, &error);
  if (!serving) return send_error(response, error);
  std::string trouble;
  const Json body = parse_json_object(request.body, &trouble);
  if (!trouble.empty()) {
    error.code = "invalid_json";
    error.message = trouble;
    return send_error(response, error);
  }
  Fields f(body);
  const auto model = f.text("model");
  const char* name = body.contains("content") && !body.contains("prompt") ? "content" : "prompt";  // llama.cpp's and vLLM's name
  const auto text = f.text(name);
  const Json* messages = f.array("messages");
  f.boolean("add_special_tokens");  // there are none to add in this family
  const bool pieces = f.boolean("return_token_strs").value_or(false) || f.boolean("with_pieces").value_or(false);
  const bool literal = !f.boolean("parse_special").value_or(true);
  f.harmless({"add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"});
  if (f.failed()) return send_error(response, f.error());
  if (auto e = check_model(*serving, model.value_or(""))) return send_error(response, *e);
  if (!text && !messages)
    return send_error(response, invalid_value("prompt", "prompt is missing: a string, or messages (a chat) in its place"));
  std::vector<int32_t> ids;
  if (messages) {
    if (!serving->chat_template)
      return send_error(response, unsupported("messages", "this checkpoint has no chat template; send a prompt"));
    auto rendered = serving->chat_template->render_chat(body);
    if (!rendered) {
      ApiError e = from_status(rendered.status());
      e.param = "messages";
      return send_error(response, e);
    }
    ids = serving->tokenizer->encode(rendered->prompt);
  } else {
    ids = serving->tokenizer->encode(*text, !literal);
  }
  Json out{{"count", ids.size()}, {"max_model_len", serving->info.context_length}, {"tokens", ids}};
  if (pieces) {
    Json strings = Json::array();
    for (const int32_t id : ids) strings.push_back(std::string(serving->tokenizer->token_bytes(id)));
    out["token_strs"] = std::move(strings);  // parts of characters come out as U+FFFD
  }
  response.body = dump_json(out);
}

void detokenize(Service& service, const HttpRequest& request, HttpResponse& response) {
  ApiError error;
  const auto serving = serving_or_error(service, &error);
  if (!serving) return send_error(response, error);
  std::string trouble;
  const Json body = parse_json_object(request.body, &trouble);
  if (!trouble.empty()) {
    error.code = "invalid_json";
    error.message = trouble;
    return send_error(response, error);
  }
  Fields f(body);
  const auto model = f.text("model");
  const auto ids = f.ids("tokens", serving->tokenizer->id_count(), 10'000'000);
  const bool skip = f.boolean("skip_special_tokens").value_or(false);
  if (f.failed()) return send_error(response, f.error());
  if (auto e = check_model(*serving, model.value_or(""))) return send_error(response, *e);
  if (!ids) return send_error(response, invalid_value("tokens", "tokens is missing: a list of token ids"));
  const std::string text = serving->tokenizer->decode(*ids, skip);
  response.body = dump_json(Json{{"prompt", text}, {"content", text}});
}

}  // namespace

void register_tokenize_routes(HttpServer& server, Service& service) {
  server.route("POST", "/tokenize", Access::kKey, [&service](const HttpRequest& q, HttpResponse& r) { tokenize(service, q, r); });
  server.route("POST", "/detokenize", Access::kKey, [&service](const HttpRequest& q, HttpResponse& r) { detokenize(service, q, r); });
}

}  // namespace ddtree
