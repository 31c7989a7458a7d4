// An engine of this process as what the smoke suite asks. Tools and streaming belong to the API: see server/openai_subject.h.
#pragma once

#include <functional>

#include "base/status.h"
#include "engine/engine.h"
#include "health/subject.h"

namespace ddtree {

class EngineSubject final : public SmokeSubject {
 public:
  // The prompt's ids: messages through the chat template, or plain text.
  using Encode = std::function<Result<std::vector<int32_t>>(const SmokeQuestion&)>;
  // The engine outlives the subject. `modes`: smoke_modes() of the loaded pair. `chat`: encode() takes messages.
  EngineSubject(Engine& engine, Encode encode, std::vector<SpeculationMode> modes, bool chat = true);

  const SmokeAbilities& abilities() const override { return abilities_; }
  // While the queue is full it waits like everybody else; no room within the limit is kNoRoom.
  SmokeAnswer ask(const SmokeQuestion& question, const SmokeLimit& limit) override;
  int64_t count_tokens(const SmokeQuestion& question) override;
  int others() const override;

 private:
  Engine& engine_;
  Encode encode_;
  SmokeAbilities abilities_;
};

// DFLASH and DDTREE with a drafter, NEXTN with an MTP head.
std::vector<SpeculationMode> smoke_modes(bool has_drafter, bool has_mtp);

}  // namespace ddtree
