#include "server/units/migrate_unit.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "server/serve_flags.h"
#include "server/serve_flags_compat.h"
#include "server/units/unit_swap.h"

namespace ddtree {

namespace {

using Kind = UnitDifference::Kind;

// --- variables ---------------------------------------------------------------------------------------------------------------------

struct VariableRule {
  const char* prefix;
  const char* reason;
};
// Variables that mean nothing to ddtree. Whatever is not listed stays: it may be for the driver, the loader or the user's own ends.
constexpr const char* kPython = "no Python environment is needed";
constexpr VariableRule kDroppedVariables[] = {
    {"PYTHON", kPython},
    {"VIRTUAL_ENV", kPython},
    {"CONDA_", kPython},
    {"TORCH", "there is no PyTorch here"},
    {"PYTORCH_", "there is no PyTorch here"},
    {"TRITON_", "there is no PyTorch here"},
    {"FLASHINFER_", "kernels are compiled in"},
    {"SGL_", "a switch of SGLang's"},
    {"SGLANG_", "a switch of SGLang's"},
    {"VLLM_", "a switch of vLLM's"},
    {"TOKENIZERS_", "the tokenizer is built in"},
    {"TRANSFORMERS_", "no Python library is used"},
    {"HF_TOKEN", "nothing is downloaded"},
    {"HUGGING_FACE_HUB_TOKEN", "nothing is downloaded"},
    {"HF_HUB_OFFLINE", "nothing is downloaded"},
    {"HF_HUB_ENABLE_HF_TRANSFER", "nothing is downloaded"},
    {"CUDA_HOME", "CUDA's runtime is inside the executable"},
    {"CUDA_PATH", "CUDA's runtime is inside the executable"},
    {"LD_LIBRARY_PATH", "CUDA's runtime is inside the executable; the driver's library is where the system's loader finds it"},
    {"LD_PRELOAD", "nothing is to be replaced"},
    {"PATH", "no other program is started"},
    {"OMP_", "--threads says how many threads"},
    {"MKL_", "--threads says how many threads"},
    {"OPENBLAS_", "--threads says how many threads"},
    {"NCCL_", "one device: there are no collectives"},
    {"XDG_STATE_HOME", "the history is in the unit's StateDirectory="},
};
const char* variable_reason(const std::string& name) {
  for (const VariableRule& rule : kDroppedVariables) {
    const std::string prefix = rule.prefix;
    if (name == "PATH" ? prefix == "PATH" : prefix != "PATH" && name.starts_with(prefix)) return rule.reason;
  }
  return nullptr;
}

bool has_specifier(const std::string& s) {
  for (size_t i = 0; i < s.size(); ++i)
    if (s[i] == '%') {
      if (i + 1 >= s.size() || s[i + 1] != '%') return true;
      ++i;
    }
  return false;
}

std::set<std::string> variables_in(const std::string& word) {
  std::set<std::string> out;
  for (size_t i = 0; i + 1 < word.size(); ++i) {
    if (word[i] != '$') continue;
    if (word[i + 1] == '$') {
      ++i;
      continue;
    }
    size_t n = i + 1;
    if (word[n] == '{') ++n;
    const size_t begin = n;
    while (n < word.size() && (std::isalnum(static_cast<unsigned char>(word[n])) || word[n] == '_')) ++n;
    if (n > begin) out.insert(word.substr(begin, n - begin));
  }
  return out;
}

// --- settings ----------------------------------------------------------------------------------------------------------------------

// Settings of the old unit that ddtree's own decide, with why; by name.
const std::map<std::string, const char*>& decided_settings() {
  static const std::map<std::string, const char*> table = {
      {"Type", "active means that the smoke test passed; an unready server is never active"},
      {"Restart", "by exit code: a start that would end the same way again is not repeated"},
      {"RestartSec", "growing, so that a card or a driver has time to come back"},
      {"TimeoutStartSec", "loading asks for more time while it makes progress"},
      {"TimeoutSec", "loading asks for more time while it makes progress"},
      {"TimeoutStopSec", "SIGTERM drains for --drain-timeout (30 s)"},
      {"ExecStop", "SIGTERM drains: running requests finish"},
      {"ExecReload", "there is nothing to reload; restart"},
      {"KillSignal", "SIGTERM drains: running requests finish"},
      {"KillMode", "only the server hears SIGTERM; what is left is killed"},
      {"SendSIGINT", "SIGTERM drains: running requests finish"},
      {"PIDFile", "the server is the unit's own process"},
      {"GuessMainPID", "the server is the unit's own process"},
      {"RemainAfterExit", "a server that has gone is not active"},
      {"SuccessExitStatus", "exit 0 is the only good end"},
      {"RestartForceExitStatus", "by exit code: a start that would end the same way again is not repeated"},
      {"StartLimitInterval", "ten bad starts in an hour are for a person"},
      {"StartLimitIntervalSec", "ten bad starts in an hour are for a person"},
      {"StartLimitBurst", "ten bad starts in an hour are for a person"},
      {"StateDirectory", "the history has a folder of its own; what is in the old one stays there"},
      {"CacheDirectory", "the driver's compiled code has a folder of its own; what is in the old one stays there"},
      {"PrivateDevices", "it would hide the card; DeviceAllow= lists what is needed"},
      {"ProcSubset", "the driver's library reads /proc/driver/nvidia"},
      {"MemoryDenyWriteExecute", "the driver's just-in-time compiler may need it"},
      {"RootDirectory", "ddtree needs no root of its own"},
      {"RootImage", "ddtree needs no root of its own"},
  };
  return table;
}

// What the packaged unit has, line by line: comments stay with the setting that they explain.
struct PackagedLine {
  std::string section, name, value, raw;  // name empty: a comment, an empty line or a section's header
};
std::vector<PackagedLine> packaged_lines(const std::string& text) {
  std::vector<PackagedLine> out;
  std::string section;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    PackagedLine p{section, "", "", line};
    if (!line.empty() && line[0] == '[') {
      p.section = section = line.substr(1, line.size() - 2);
    } else if (!line.empty() && line[0] != '#') {
      const size_t equal = line.find('=');
      p.name = line.substr(0, equal);
      p.value = line.substr(equal + 1);
    }
    out.push_back(std::move(p));
  }
  return out;
}

class Migrator {
 public:
  Migrator(const UnitFile& unit, const std::vector<UnitFile>& drop_ins, const MigrationOptions& options)
      : o_(options),
        in_place_(options.source == options.target),
        effective_(unit),
        base_(unit),
        packaged_(packaged_lines(options.packaged_unit)) {
    for (const UnitFile& d : drop_ins) effective_.add(d);
    if (!in_place_) base_ = effective_;
    drop_ins_ = &drop_ins;
  }

  Result<UnitMigration> run() {
    const auto starts = effective_.values("Service", "ExecStart");
    if (starts.empty()) return Status(Code::kUsage, o_.source + ": no ExecStart= in [Service]; that is no server's unit");
    if (starts.size() > 1)
      return Status(Code::kUsage, fmt::format("{}:{}: a second ExecStart=; a server's unit has one", starts[1].path, starts[1].line));
    read_variables();
    auto found = find_launch_command(
        starts[0].value, fmt::format("{}:{}", starts[0].path, starts[0].line),
        [this](const std::string& name) { return find_variable(variables_, name); }, o_.read_file);
    if (!found) return found.status();
    launch_ = std::move(*found);
    out_.around = launch_.around;
    variables_.insert(variables_.end(), launch_.environment.begin(), launch_.environment.end());
    flags();
    environment();
    settings();
    notes();
    compose();
    return std::move(out_);
  }

 private:
  void read_variables() {
    for (const UnitSetting& s : effective_.values("Service", "Environment")) {
      auto parsed = parse_environment(s.value);
      if (parsed) variables_.insert(variables_.end(), parsed->begin(), parsed->end());
      else out_.blockers.push_back(fmt::format("{}:{}: Environment=: {}", s.path, s.line, parsed.status().message()));
    }
    for (const UnitSetting& s : effective_.values("Service", "EnvironmentFile")) {
      const std::string path = s.value.substr(s.value.starts_with('-') ? 1 : 0);
      const auto text = has_specifier(path) ? std::nullopt : o_.read_file(path);
      if (!text) {
        unread_ += (unread_.empty() ? "" : ", ") + path;
        continue;
      }
      // A percent sign of a file is no specifier; where its words are written out, the unit would read it as one.
      for (auto& [name, value] : parse_environment_file(*text)) variables_.emplace_back(name, without_specifiers(value));
    }
  }

  // A word as the server would see it; the variables that nobody knows are added to `unknown`.
  std::string expanded(const std::string& word, std::set<std::string>* unknown) const {
    std::string out;
    for (size_t i = 0; i < word.size(); ++i) {
      if (word[i] != '$' || i + 1 == word.size()) {
        out += word[i];
        continue;
      }
      if (word[i + 1] == '$') {
        out += '$';
        ++i;
        continue;
      }
      const bool braces = word[i + 1] == '{';
      size_t n = i + 1 + (braces ? 1 : 0);
      const size_t begin = n;
      while (n < word.size() && (std::isalnum(static_cast<unsigned char>(word[n])) || word[n] == '_')) ++n;
      const std::string name = word.substr(begin, n - begin);
      if (name.empty()) {
        out += word[i];
        continue;
      }
      const auto value = find_variable(variables_, name);
      if (value) out += *value;
      else unknown->insert(name);
      i = braces ? n : n - 1;
    }
    return out;
  }

  void flags() {
    // $NAME alone is split into words by systemd: those are flags to be judged one by one, so they are written out.
    std::vector<std::string> written, seen;
    std::set<std::string> unknown;
    for (const std::string& word : launch_.flags) {
      const auto names = variables_in(word);
      const bool alone = names.size() == 1 && word == "$" + *names.begin();
      const auto value = alone ? find_variable(variables_, *names.begin()) : std::nullopt;
      if (value) {
        auto words = split_unit_words(*value);
        if (!words) {
          out_.blockers.push_back(fmt::format("{}: {}", word, words.status().message()));
          continue;
        }
        for (const std::string& w : *words) {
          seen.push_back(w);
          std::string safe;
          for (const char c : w) safe += c == '$' ? "$$" : std::string(1, c);
          written.push_back(safe);
        }
        out_.around.push_back({Kind::kChanged, word, "written out: its words are flags that ddtree must know"});
        written_out_.insert(*names.begin());
        continue;
      }
      written.push_back(word);
      seen.push_back(expanded(word, &unknown));
    }
    for (const std::string& name : unknown)
      out_.blockers.push_back(fmt::format("the value of ${{{}}} is not known{}; put it into Environment= of the old unit", name,
                                          unread_.empty() ? "" : fmt::format(" ({} cannot be read)", unread_)));
    const FlagJudgement judged = judge_serve_flags(seen);
    size_t at = 0;
    std::vector<std::string> kept, kept_seen;
    std::set<std::string> asked(o_.leave_out.begin(), o_.leave_out.end());
    bool device = false;
    std::string card;
    for (const FlagVerdict& v : judged.flags) device = device || v.name == "--device";
    for (const FlagVerdict& v : judged.flags) {
      std::string what;
      std::vector<std::string> mine(written.begin() + static_cast<std::ptrdiff_t>(at),
                                    written.begin() + static_cast<std::ptrdiff_t>(at + v.words.size()));
      for (const std::string& w : mine) what += (what.empty() ? "" : " ") + quote_unit_word(w);
      at += v.words.size();
      std::string plain;
      for (const std::string& w : v.words) plain += (plain.empty() ? "" : " ") + w;
      // The list names the flag already.
      std::string reason = v.reason;
      for (const std::string& lead : {plain + ": ", plain + " is ", v.name + " is ", v.name + ": "})
        if (!v.name.empty() && reason.starts_with(lead)) reason.erase(0, lead.size());
      const bool late = v.kind == FlagVerdict::kRefused && v.own && has_specifier(plain);
      const bool lenient = asked.contains(v.name);
      if (lenient) asked.erase(v.name);
      if (v.name == "--base-gpu-id" && !device && o_.cuda && v.words.size() == 2) {
        card = mine.back();
        out_.flags.push_back({Kind::kChanged, what, "--device cuda:" + card + " does it"});
      } else if (v.kind == FlagVerdict::kKept || v.kind == FlagVerdict::kChanged || late) {
        kept.insert(kept.end(), mine.begin(), mine.end());
        kept_seen.insert(kept_seen.end(), v.words.begin(), v.words.end());
        checkable_ = checkable_ && !late && !has_specifier(plain);
        out_.flags.push_back({v.kind == FlagVerdict::kChanged ? Kind::kChanged : Kind::kKept, what,
                              late ? "holds a specifier: the server checks it when it starts" : reason});
        if (v.name == "--api-key") secret_ = true;
      } else if (v.kind == FlagVerdict::kDropped) {
        out_.flags.push_back({Kind::kDropped, what, reason});
      } else {
        out_.flags.push_back({lenient ? Kind::kDropped : Kind::kRefused, what, (lenient ? "left out, as asked: " : "") + reason});
        if (!lenient)
          out_.blockers.push_back(
              fmt::format("{}: {}{}", what, reason, v.name.empty() ? "" : fmt::format("; --leave-out {} does without it", v.name)));
      }
    }
    for (const std::string& name : asked)
      out_.blockers.push_back(fmt::format("--leave-out {}: the old command has no such flag that is refused", name));
    if (!judged.together.empty()) out_.blockers.push_back(judged.together);
    if (!device && o_.cuda) {
      const std::string value = card.empty() || card == "0" ? "cuda" : "cuda:" + card;
      kept.insert(kept.end(), {"--device", value});
      kept_seen.insert(kept_seen.end(), {"--device", value});
      out_.flags.push_back({Kind::kAdded, "--device " + value, "SGLang's default; ddtree's is the CPU"});
    } else if (!o_.cuda) {
      out_.notes.push_back("this executable has no CUDA engine (nvcc was not found when it was made): the model would run on the CPU");
    }
    // The same parser as the server's has the last word.
    if (out_.blockers.empty() && checkable_)
      if (auto parsed = parse_serve_flags(kept_seen); !parsed) out_.blockers.push_back(parsed.status().message());
    out_.command = {o_.executable, "serve"};
    out_.command.insert(out_.command.end(), kept.begin(), kept.end());
    command_seen_ = kept_seen;
  }

  void environment() {
    std::set<std::string> used;
    for (const std::string& w : out_.command)
      for (const std::string& name : variables_in(w)) used.insert(name);
    Variables all;
    for (const UnitSetting& s : base_.values("Service", "Environment"))
      if (auto parsed = parse_environment(s.value)) all.insert(all.end(), parsed->begin(), parsed->end());
    all.insert(all.end(), launch_.environment.begin(), launch_.environment.end());
    for (size_t i = 0; i < all.size(); ++i) {
      const auto& [name, value] = all[i];
      const bool again =
          std::any_of(all.begin() + static_cast<std::ptrdiff_t>(i) + 1, all.end(), [&](const auto& v) { return v.first == name; });
      if (again) continue;  // the last one is in force
      const std::string what = name + "=" + value;
      const char* reason = used.contains(name)           ? nullptr
                           : written_out_.contains(name) ? "its words are in ExecStart= now"
                                                         : variable_reason(name);
      if (reason) {
        // Tokens and keys are nobody's business on a terminal.
        out_.environment.push_back({Kind::kDropped, name.find("TOKEN") != std::string::npos ? name + "=…" : what, reason});
      } else {
        out_.environment.push_back({Kind::kKept, what, ""});
        kept_variables_.emplace_back(name, value);
      }
    }
  }

  std::string variable(const char* name) const { return find_variable(variables_, name).value_or(""); }

  // Paths that the server reads, as far as they are known.
  std::vector<std::string> paths() const {
    std::vector<std::string> out{o_.executable, effective_.value("Service", "WorkingDirectory")};
    for (const auto& [name, value] : launch_.settings)
      if (name == "WorkingDirectory") out.push_back(value);
    for (size_t i = 0; i < command_seen_.size(); ++i) {
      const std::string& w = command_seen_[i];
      if (!w.empty() && w[0] == '/') out.push_back(w);
      if (const size_t equal = w.find("=/"); equal != std::string::npos && w.starts_with("--")) out.push_back(w.substr(equal + 1));
    }
    for (const char* name : {"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HOME"})
      if (!variable(name).empty()) out.push_back(variable(name));
    return out;
  }
  bool below(std::initializer_list<const char*> folders) const {
    for (const std::string& p : paths())
      for (const char* f : folders)
        if (p == f || p.starts_with(std::string(f) + "/") || p.starts_with(std::string("-") + f)) return true;
    return false;
  }

  // The model is named as ORG/NAME: it comes from the cache in somebody's home.
  bool uses_cache() const {
    for (size_t i = 0; i < command_seen_.size(); ++i) {
      const std::string& w = command_seen_[i];
      const bool flag = w.starts_with("--model-path") || w.starts_with("--model") || w.starts_with("--speculative-draft-model");
      if (!flag) continue;
      const std::string value = w.find('=') != std::string::npos ? w.substr(w.find('=') + 1)
                                : i + 1 < command_seen_.size()   ? command_seen_[i + 1]
                                                                 : "";
      if (value.find('/') != std::string::npos && value[0] != '/' && value[0] != '.') return true;
    }
    return false;
  }

  void change(const std::string& what, const std::string& reason) { out_.settings.push_back({Kind::kChanged, what, reason}); }

  void settings() {
    std::map<std::string, std::string> ours;
    for (const PackagedLine& p : packaged_)
      if (p.section == "Service" && !p.name.empty()) ours[p.name] = p.value;
    static const std::set<std::string> yours = {"User", "Group", "UMask", "ExecStartPre"};
    user_ = effective_.value("Service", "User");
    const bool dynamic = effective_.value("Service", "DynamicUser") == "yes" || effective_.value("Service", "DynamicUser") == "true";
    std::set<std::string> told;
    for (const UnitSetting& s : base_.settings()) {
      if (s.section != "Service" || s.name == "ExecStart" || s.name == "Environment") continue;
      const std::string what = s.name + "=" + s.value;
      const auto own = ours.find(s.name);
      const auto why = decided_settings().find(s.name);
      const bool limit = s.name.starts_with("Limit");
      if ((own == ours.end() && why == decided_settings().end()) || yours.contains(s.name) || limit || s.name == "EnvironmentFile") {
        if (limit || s.name == "User" || s.name == "Group" || s.name == "UMask") replaced_[s.name] = s.value;
        else kept_lines_.push_back(what);
        out_.settings.push_back(
            {Kind::kKept, what,
             s.name.starts_with("Exec") ? "runs inside the new unit's sandbox; a + before the path gives it full rights" : ""});
      } else if (own != ours.end() && own->second == s.value) {
        out_.settings.push_back({Kind::kKept, what, ""});
      } else if (own != ours.end()) {
        change(what, fmt::format("{}={}{}", s.name, own->second, why == decided_settings().end() ? "" : fmt::format(": {}", why->second)));
      } else {
        out_.settings.push_back({Kind::kDropped, what, why->second});
      }
      told.insert(s.name);
    }
    for (const auto& [name, value] : launch_.settings) {
      if (name.starts_with("Limit")) replaced_[name] = value;
      else kept_lines_.push_back(name + "=" + value);
    }
    if (!user_.empty() && !replaced_.contains("Group")) replaced_["Group"] = "";  // the user's own
    if (user_.empty() && !dynamic) {
      replaced_["User"] = replaced_["Group"] = "";
      out_.notes.push_back(
          "the server runs as root, as before, but without any capability: files that root does not own must be readable for all");
    }
    if (dynamic) replaced_["User"] = replaced_["Group"] = "";
    // A history of its own for each unit: two servers cannot write one.
    replaced_["StateDirectory"] = replaced_["CacheDirectory"] = "ddtree-%N";
    const auto home = o_.home_of(user_.empty() ? "root" : user_);
    const bool cached = uses_cache() && variable("HF_HOME").empty() && variable("HF_HUB_CACHE").empty() &&
                        variable("HUGGINGFACE_HUB_CACHE").empty() && variable("XDG_CACHE_HOME").empty();
    if (cached && variable("HOME").empty() && home && !dynamic) {
      const std::string folder = *home + "/.cache/huggingface";
      variables_.emplace_back("HF_HOME", folder);
      // systemd gives a unit without User= no $HOME; Python looks it up.
      if (user_.empty()) {
        kept_variables_.emplace_back("HF_HOME", folder);
        out_.environment.push_back({Kind::kAdded, "HF_HOME=" + folder, "where models named ORG/NAME are looked for"});
      }
    }
    if (cached && variable("HOME").empty() && !home && !dynamic) {
      replaced_["ProtectHome"] = "read-only";
      out_.settings.push_back({Kind::kAdded, "ProtectHome=read-only",
                               fmt::format("a model named ORG/NAME is looked for in the home of {}, whom this machine does not know",
                                           user_.empty() ? "root" : user_)});
    } else if (below({"/home", "/root", "/run/user"})) {
      replaced_["ProtectHome"] = "read-only";
      out_.settings.push_back({Kind::kAdded, "ProtectHome=read-only", "files that the server reads are there"});
    }
    if (below({"/tmp", "/var/tmp"})) {
      replaced_["PrivateTmp"] = "no";
      out_.settings.push_back({Kind::kAdded, "PrivateTmp=no", "files that the server reads are there"});
    }
    for (const UnitFile& d : *drop_ins_) {
      if (!in_place_) continue;
      for (const UnitSetting& s : d.settings()) {
        if (s.section != "Service") continue;
        const std::string what = fmt::format("{}:{}: {}={}", s.path, s.line, s.name, s.value);
        if (s.name == "ExecStart" || s.name == "Type" || s.name == "NotifyAccess" || s.name == "PrivateDevices" ||
            s.name == "RootDirectory")
          out_.blockers.push_back(what +
                                  " would override the new unit; move it into the unit itself first, or write a unit beside it with --to");
        else out_.settings.push_back({Kind::kKept, what, "a drop-in: it stays in force"});
      }
    }
  }

  void notes() {
    const auto given = [&](std::initializer_list<const char*> names) {
      for (const std::string& w : command_seen_)
        for (const char* n : names)
          if (w == n || w.starts_with(std::string(n) + "=")) return true;
      return false;
    };
    if (!given({"--max-running-requests", "--max-num-seqs"}))
      out_.notes.push_back("at most 8 requests run at once, more wait; SGLang chooses by free memory (--max-running-requests)");
    if (const CompatFlag* cache = find_compat("--enable-prefix-caching"); cache && !given({"--disable-radix-cache"}))
      out_.notes.push_back(cache->instead);
    if (secret_) out_.notes.push_back("--api-key is on the command line, as before: every user of the machine can read it there");
    if (!unread_.empty()) out_.notes.push_back(unread_ + " is not there, or cannot be read by this user: variables in it were not judged");
  }

  // The words of a list in the packaged unit that the old unit's settings of that name do not have.
  std::string new_words(const PackagedLine& p) const {
    std::set<std::string> have;
    for (const UnitSetting& s : base_.settings()) {
      if (s.section != p.section || s.name != p.name) continue;
      std::istringstream words(s.value);
      for (std::string w; words >> w;) have.insert(w);
      if (s.value.empty()) have.clear();  // an empty value takes back those before it
    }
    std::string out;
    std::istringstream words(p.value);
    for (std::string w; words >> w;)
      if (!have.contains(w)) out += (out.empty() ? "" : " ") + w;
    return out;
  }

  // `systemctl edit ddtree` in a comment of the packaged unit, as it is for this one.
  static std::string with_own_name(std::string comment, const std::string& target_name) {
    const std::string packaged = "systemctl edit ddtree";
    const size_t at = comment.find(packaged);
    if (at != std::string::npos) comment.replace(at, packaged.size(), "systemctl edit " + target_name.substr(0, target_name.rfind('.')));
    return comment;
  }

  std::string exec_start() const {
    std::string out = "ExecStart=" + quote_unit_word(out_.command[0]) + " " + out_.command[1];
    for (size_t i = 2; i < out_.command.size(); ++i) {
      const std::string& w = out_.command[i];
      out += (w.starts_with("--") ? " \\\n  " : " ") + quote_unit_word(w);
    }
    return out;
  }

  void compose() {
    std::string& t = out_.text;
    const std::string source_name = o_.source.substr(o_.source.find_last_of('/') + 1),
                      target_name = o_.target.substr(o_.target.find_last_of('/') + 1);
    t = fmt::format("{} {} from {}, which starts SGLang.\n", kInstalledUnitMark, DDTREE_VERSION, o_.source);
    if (in_place_)
      t += fmt::format("# That unit is kept as {}: `ddtree rollback {}` brings it back.\n", unit_backup_path(source_name), o_.source);
    const auto lines = packaged_;
    const auto section = [&](const char* name) { t += fmt::format("\n[{}]\n", name); };
    section("Unit");
    for (const UnitSetting& s : base_.settings()) {
      if (s.section != "Unit") continue;
      const auto why = decided_settings().find(s.name);
      if (why != decided_settings().end()) {
        change(s.name + "=" + s.value, why->second);
        continue;
      }
      t += s.name + "=" + s.value + "\n";
    }
    if (!in_place_ && source_name != target_name)
      t += fmt::format("# Both want the same address and the same memory.\nConflicts={}\n", source_name);
    std::string comments;
    bool after_setting = false;  // a comment that comes now begins anew
    for (const char* wanted : {"Unit", "Service"}) {
      if (std::string(wanted) == "Service") section("Service");
      comments.clear();
      for (const PackagedLine& p : lines) {
        if (p.section != wanted || p.raw.starts_with("[")) continue;
        if (p.name.empty()) {
          // An empty line ends a comment that belongs to no setting.
          comments = p.raw.empty() ? "" : (after_setting ? "" : comments) + with_own_name(p.raw, target_name) + "\n";
          after_setting = false;
          if (p.raw.empty() && std::string(wanted) == "Service" && !t.ends_with("\n\n")) t += "\n";
          continue;
        }
        after_setting = true;
        std::string value = p.value;
        if (p.section == "Unit" && (p.name == "After" || p.name == "Wants")) {
          // What the old unit orders already. The comment above stays for the next setting that it is about.
          value = new_words(p);
          if (value.empty()) continue;
        }
        const std::string lead = std::exchange(comments, "");
        if (p.name == "Description" || p.name == "Documentation" || p.name == "EnvironmentFile") continue;
        const auto other = replaced_.find(p.name);
        if (other != replaced_.end() && other->second.empty()) continue;
        t += lead;
        if (p.name == "ExecStart") t += exec_start() + "\n";
        else if (p.name == "Environment" && p.value.starts_with("CUDA_CACHE_PATH=")) t += "Environment=CUDA_CACHE_PATH=%C/ddtree-%N\n";
        else t += p.name + "=" + (other == replaced_.end() ? value : other->second) + "\n";
        if (other != replaced_.end()) written_.insert(p.name);
      }
    }
    while (t.ends_with("\n\n")) t.pop_back();
    std::string rest;
    for (const auto& [name, value] : replaced_)
      if (!written_.contains(name) && !value.empty()) rest += name + "=" + value + "\n";
    for (const auto& [name, value] : kept_variables_) rest += "Environment=" + quote_unit_word(name + "=" + value) + "\n";
    for (const std::string& line : kept_lines_) rest += line + "\n";
    if (!rest.empty())
      t += "\n# --- as the old unit had it "
           "---------------------------------------------------------------------------------------------------\n" +
           rest;
    std::string last;
    for (const UnitSetting& s : base_.settings()) {
      if (s.section == "Unit" || s.section == "Service") continue;
      if (s.section != last) t += fmt::format("\n[{}]\n", s.section);
      last = s.section;
      t += s.name + "=" + s.value + "\n";
    }
  }

  const MigrationOptions& o_;
  const bool in_place_;
  UnitFile effective_;  // with drop-ins
  UnitFile base_;       // whose settings go into the new unit
  const std::vector<UnitFile>* drop_ins_;
  std::vector<PackagedLine> packaged_;
  UnitMigration out_;
  LaunchCommand launch_;
  Variables variables_, kept_variables_;
  std::string unread_, user_;
  std::vector<std::string> command_seen_, kept_lines_;
  std::map<std::string, std::string> replaced_;  // by name, in the packaged unit; empty: left out
  std::set<std::string> written_;
  std::set<std::string> written_out_;  // variables whose words are in the command now
  bool checkable_ = true, secret_ = false;
};

}  // namespace

Result<UnitMigration> migrate_unit(const UnitFile& unit, const std::vector<UnitFile>& drop_ins, const MigrationOptions& options) {
  return Migrator(unit, drop_ins, options).run();
}

}  // namespace ddtree
