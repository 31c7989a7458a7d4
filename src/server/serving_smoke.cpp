#include "server/serving_smoke.h"

#include <utility>

#include "engine/validate.h"
#include "server/json.h"
#include "store/store.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace ddtree {

EngineSubject::Encode smoke_encode(std::shared_ptr<const Serving> serving) {
  return [serving = std::move(serving)](const SmokeQuestion& q) -> Result<std::vector<int32_t>> {
    if (q.messages.empty() || serving->chat_template == nullptr)
      return serving->tokenizer->encode(q.messages.empty() ? q.text : q.messages.back().content);
    Json messages = Json::array();
    for (const SmokeMessage& m : q.messages) messages.push_back(Json{{"role", m.role}, {"content", m.content}});
    const Json request{{"messages", std::move(messages)}, {"chat_template_kwargs", Json{{"enable_thinking", false}}}};
    auto rendered = serving->chat_template->render_chat(request);
    if (!rendered) return rendered.status();
    return serving->tokenizer->encode(rendered->prompt);
  };
}

SmokeInputs smoke_inputs(const Serving& serving) {
  return serving.info.path.starts_with("embedded:") ? embedded_smoke_inputs() : generic_smoke_inputs();
}

ServingSmoke serving_smoke(Service& service, std::shared_ptr<const Serving> serving) {
  ServingSmoke out;
  const Serving& s = *serving;
  const bool chat = s.chat_template != nullptr;
  const SpeculationMode most = s.engine->snapshot().most;
  std::vector<SpeculationMode> modes = smoke_modes(s.info.has_drafter, s.info.has_mtp);
  std::erase_if(modes, [&](SpeculationMode mode) { return limited_mode(mode, most) != mode; });
  out.engine = std::make_unique<EngineSubject>(*s.engine, smoke_encode(serving), std::move(modes), chat);
  if (chat) out.api = std::make_unique<OpenAiSubject>(local_transport(service), OpenAiOptions{s.info.name, s.info.context_length});

  SmokeSetup& setup = out.setup;
  setup.subject = out.engine.get();
  setup.api = out.api.get();
  setup.inputs = smoke_inputs(s);
  if (!chat) setup.no_tools = "without a chat template no tool can be offered";
  else if (s.tool_parser == "none")
    setup.no_tools = "no tool-call parser: this model's template knows no tools, or --tool-call-parser none";
  setup.configured = limited_mode(s.engine->options().mode, most);
  setup.budget = s.engine->options().budget;
  setup.feature_width = s.feature_width, setup.fc_input_width = s.fc_input_width;
  if (s.engine->options().measure_costs) setup.costs = s.engine->snapshot();
  out.serving = std::move(serving);
  return out;
}

SmokePast smoke_past(Store* store, const Serving& serving, const std::string& trigger, const SmokeThresholds& thresholds) {
  SmokePast past{trigger, {}};
  if (store == nullptr) return past;
  const auto page = store->smoke_runs({.limit = 100});
  if (!page) return past;  // a history that cannot be read is no reason to be unready
  const std::string previous = trigger == "start" ? version_before(page->rows, DDTREE_VERSION) : std::string();
  if (!previous.empty()) past.trigger = "upgrade";
  const SmokeKey key{"", serving.info.name, serving.info.has_drafter ? serving.info.drafter : "",
                     mode_name(limited_mode(serving.engine->options().mode, serving.engine->snapshot().most)), DDTREE_VERSION};
  past.before = smoke_baseline(page->rows, key, previous, thresholds);
  return past;
}

SmokeRun smoke_row(const SmokeReport& report, const Serving& serving) {
  SmokeRun row = smoke_record(report);
  row.model = serving.info.name;
  row.drafter = serving.info.has_drafter ? serving.info.drafter : "";
  return row;
}

}  // namespace ddtree
