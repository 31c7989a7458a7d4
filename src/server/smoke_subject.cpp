#include "server/smoke_subject.h"

#include <utility>

#include "server/json.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace ddtree {

SmokeSubject smoke_subject(std::shared_ptr<const Serving> serving) {
  SmokeSubject subject;
  subject.engine = serving->engine;
  subject.modes = smoke_modes(serving->info.has_drafter, serving->info.has_mtp);
  subject.inputs = serving->info.path.rfind("embedded:", 0) == 0 ? embedded_smoke_inputs() : generic_smoke_inputs();
  subject.feature_width = serving->feature_width;
  subject.fc_input_width = serving->fc_input_width;
  subject.encode = [serving = std::move(serving)](const std::string& user) -> Result<std::vector<int32_t>> {
    if (serving->chat_template == nullptr) return serving->tokenizer->encode(user);
    const Json request{{"messages", Json::array({Json{{"role", "user"}, {"content", user}}})},
                       {"chat_template_kwargs", Json{{"enable_thinking", false}}}};
    auto rendered = serving->chat_template->render_chat(request);
    if (!rendered) return rendered.status();
    return serving->tokenizer->encode(rendered->prompt);
  };
  return subject;
}

SmokeRun smoke_row(const SmokeReport& report, const Serving& serving) {
  SmokeRun row = smoke_record(report);
  row.model = serving.info.name;
  row.drafter = serving.info.has_drafter ? serving.info.drafter : "";
  return row;
}

}  // namespace ddtree
