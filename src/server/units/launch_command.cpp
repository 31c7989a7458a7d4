#include "server/units/launch_command.h"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>

#include "server/units/shell_script.h"

namespace ddtree {

namespace {

using Words = std::vector<std::string>;
using Kind = UnitDifference::Kind;

std::string base_name(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

std::string joined(const Words& words, size_t begin, size_t end) {
  std::string out;
  for (size_t i = begin; i < end && i < words.size(); ++i) out += (out.empty() ? "" : " ") + quote_unit_word(words[i]);
  return out;
}

bool is_python(const std::string& word) { return base_name(word).starts_with("python") || base_name(word).starts_with("pypy"); }
bool is_shell(const std::string& name) { return name == "bash" || name == "sh" || name == "dash" || name == "zsh"; }
bool is_assignment(const std::string& word) {
  const size_t equal = word.find('=');
  return equal != std::string::npos && equal > 0 &&
         word.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_") == equal;
}

// Where a server's own name stands in these words, and whose it is. npos: nowhere.
struct Sighting {
  size_t flags = std::string::npos;  // the first word after it
  const char* other = nullptr;       // not SGLang's
};
Sighting sight(const Words& words) {
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string name = base_name(words[i]);
    if (words[i] == "sglang.launch_server" || name == "launch_server.py") return {i + 1, nullptr};
    if (name == "sglang" && i + 1 < words.size() && words[i + 1] == "serve") return {i + 2, nullptr};
    if (words[i].starts_with("sglang_router") || name == "sglang-router") return {i, "SGLang's router"};
    if (words[i].starts_with("vllm.")) return {i, "vLLM"};
    if (i > 0 && words[i - 1] != "exec") continue;  // the last part of some path
    if (name == "vllm") return {i, "vLLM"};
    if (name == "llama-server") return {i, "llama.cpp"};
    if (name == "ddtree") return {i, "ddtree"};
  }
  return {};
}

class Finder {
 public:
  Finder(std::string where, const std::function<std::optional<std::string>(const std::string&)>& lookup,
         const std::function<std::optional<std::string>(const std::string&)>& read_file)
      : where_(std::move(where)), lookup_(lookup), read_file_(read_file) {}

  // What is left when all wrappers are taken off; they go to out.
  Status command(Words words, int depth) {
    if (depth > 4) return wrong("too many scripts call each other");
    for (;;) {
      if (words.empty()) return wrong("no command is left behind its wrappers");
      const std::string name = base_name(words[0]);
      if (const Sighting seen = sight(words); seen.other && seen.flags <= 2)
        return wrong(fmt::format("{} is started here; only SGLang's units are understood", seen.other));
      if (name == "docker" || name == "podman" || name == "nerdctl" || name == "apptainer" || name == "singularity")
        return wrong(fmt::format(
            "'{} …' starts a container, whose paths are not this machine's; only SGLang started on the machine itself is understood",
            name));
      if (name == "sudo" || name == "runuser" || name == "su" || name == "setpriv")
        return wrong(fmt::format("'{} …' changes the user; put that user into User= first", name));
      if (is_python(words[0])) return python(words);
      if (name == "sglang" && words.size() > 1 && words[1] == "serve") return found(words, 2);
      if (name == "env") {
        DDTREE_RETURN_IF_ERROR(env(&words));
      } else if (is_shell(name)) {
        return shell(words, depth);
      } else if (name == "exec" || name == "nohup" || name == "command" || name == "time") {
        drop(words, 1, "systemd starts, watches and times the process itself");
        words.erase(words.begin());
      } else if (name == "nice" || name == "taskset" || name == "numactl" || name == "stdbuf" || name == "ionice" || name == "chrt") {
        DDTREE_RETURN_IF_ERROR(scheduling(name, &words));
      } else if (name == "conda" || name == "mamba" || name == "micromamba" || name == "uv" || name == "poetry" || name == "pixi" ||
                 name == "tini" || name == "dumb-init" || name == "timeout") {
        const auto inner = std::find_if(words.begin() + 1, words.end(), [](const std::string& w) {
          return is_python(w) || base_name(w) == "sglang" || is_shell(base_name(w)) || base_name(w) == "env";
        });
        if (inner == words.end()) return wrong(fmt::format("'{} …' starts something that is not Python", name));
        drop(words, static_cast<size_t>(inner - words.begin()),
             name == "timeout"                       ? "RuntimeMaxSec= limits a service's time"
             : name == "tini" || name == "dumb-init" ? "systemd reaps processes itself"
                                                     : "no Python environment is needed");
        words.erase(words.begin(), inner);
      } else if (words[0].find('/') != std::string::npos) {
        return script(words[0], depth);
      } else {
        return wrong(fmt::format("'{}' is started here; only SGLang's units are understood (python -m sglang.launch_server, sglang serve)",
                                 words[0]));
      }
    }
  }

  LaunchCommand out;

 private:
  Status wrong(const std::string& what) const { return {Code::kUsage, fmt::format("{}: {}", where_, what)}; }
  // A word where no variables are expanded: in settings, not in a command line.
  Result<std::string> settled(const std::string& word) const {
    std::string text;
    for (size_t i = 0; i < word.size(); ++i) {
      if (word[i] != '$') {
        text += word[i];
      } else if (i + 1 < word.size() && word[i + 1] == '{') {
        const size_t close = word.find('}', i);
        const std::string name = word.substr(i + 2, close - i - 2);
        const auto value = lookup_(name);
        if (!value) return wrong(fmt::format("the value of ${{{}}} in '{}' is not known; write it there", name, word));
        text += *value;
        i = close;
      } else {
        text += '$';
        i += i + 1 < word.size() && word[i + 1] == '$' ? 1 : 0;
      }
    }
    return text;
  }
  Status set_variable(const std::string& name, const std::string& word) {
    if (word.find("$(") != std::string::npos || word.find('`') != std::string::npos) {
      out.around.push_back({Kind::kDropped, name + "=" + word, "needs a shell to know; write its value into Environment= if it is wanted"});
      return {};
    }
    auto value = settled(word);
    if (!value) return value.status();
    out.environment.emplace_back(name, *value);
    return {};
  }
  Status set(std::string what, const std::string& setting, const std::string& prefix, const std::string& word) {
    auto value = settled(word);
    if (!value) return value.status();
    change(std::move(what), setting, prefix + *value);
    return {};
  }
  void drop(const Words& words, size_t end, std::string reason) {
    out.around.push_back({Kind::kDropped, joined(words, 0, end), std::move(reason)});
  }
  void change(std::string what, const std::string& name, const std::string& value) {
    out.settings.emplace_back(name, value);
    out.around.push_back({Kind::kChanged, std::move(what), fmt::format("{}={} does it", name, value)});
  }

  Status found(const Words& words, size_t flags) {
    for (size_t i = flags; i < words.size(); ++i) {
      if (words[i].find("$(") != std::string::npos || words[i].find('`') != std::string::npos)
        return wrong(fmt::format("'{}' needs a shell to know; write its value", words[i]));
    }
    drop(words, flags, "ddtree takes its place");
    out.flags.assign(words.begin() + static_cast<std::ptrdiff_t>(flags), words.end());
    return {};
  }

  Status python(const Words& words) {
    const Sighting seen = sight(words);
    if (seen.other) return wrong(fmt::format("{} is started here; only SGLang's units are understood", seen.other));
    if (seen.flags == std::string::npos)
      return wrong(fmt::format("'{}' is no SGLang server; looked for -m sglang.launch_server", joined(words, 0, 4)));
    return found(words, seen.flags);
  }

  Status env(Words* words) {
    size_t i = 1;
    for (; i < words->size(); ++i) {
      const std::string& w = (*words)[i];
      if (is_assignment(w)) out.environment.emplace_back(w.substr(0, w.find('=')), w.substr(w.find('=') + 1));
      else if (w == "-u" || w == "--unset" || w == "-C" || w == "--chdir") ++i;
      else if (w == "-S" || w.starts_with("--split-string")) return wrong("env -S is too deep to be read; write the words themselves");
      else if (w.empty() || w[0] != '-') break;
    }
    words->erase(words->begin(), words->begin() + static_cast<std::ptrdiff_t>(std::min(i, words->size())));
    return {};
  }

  Status scheduling(const std::string& name, Words* words) {
    size_t i = 1;
    std::vector<std::pair<std::string, std::string>> options;  // "-n" → "5"
    for (; i < words->size(); ++i) {
      const std::string& w = (*words)[i];
      if (w.size() < 2 || w[0] != '-') break;
      const size_t equal = w.find('=');
      const bool number = std::isdigit(static_cast<unsigned char>(w[1])) != 0;
      if (equal != std::string::npos) options.emplace_back(w.substr(0, equal), w.substr(equal + 1));
      else if (number) options.emplace_back("-n", w.substr(1));
      else if (name == "stdbuf" || w == "-l" || w == "--localalloc" || w == "-a" || w == "-c" || w == "--cpu-list")
        options.emplace_back(w, "");
      else if (i + 1 < words->size()) options.emplace_back(w, (*words)[i + 1]), ++i;
    }
    std::string list;
    if (name == "taskset" && i < words->size()) list = (*words)[i++];
    const std::string text = joined(*words, 0, i);
    const auto option = [&](std::initializer_list<const char*> names) {
      for (const auto& [n, v] : options)
        for (const char* wanted : names)
          if (n == wanted) return std::optional<std::string>(v);
      return std::optional<std::string>();
    };
    const size_t before = out.settings.size();
    if (name == "nice") {
      change(text, "Nice", option({"-n", "--adjustment"}).value_or("10"));
    } else if (name == "taskset" && option({"-c", "--cpu-list"})) {
      change(text, "CPUAffinity", list);
    } else if (name == "numactl") {
      const auto nodes = option({"-m", "--membind"}), preferred = option({"-p", "--preferred"}),
                 interleave = option({"-i", "--interleave"});
      const auto cpus = option({"-C", "--physcpubind"}), cpu_nodes = option({"-N", "--cpunodebind"});
      if (nodes) change(text, "NUMAPolicy", "bind"), out.settings.emplace_back("NUMAMask", *nodes);
      else if (preferred) change(text, "NUMAPolicy", "preferred"), out.settings.emplace_back("NUMAMask", *preferred);
      else if (interleave) change(text, "NUMAPolicy", "interleave"), out.settings.emplace_back("NUMAMask", *interleave);
      if (cpus) change(text, "CPUAffinity", *cpus);
      // systemd takes the processors of NUMAMask='s nodes; without one there is nothing to take them from.
      else if (cpu_nodes && out.settings.size() > before) out.settings.emplace_back("CPUAffinity", "numa");
    }
    if (out.settings.size() == before)
      drop(*words, i, fmt::format("not carried over; systemd.exec(5) has settings for what {} does", name));
    words->erase(words->begin(), words->begin() + static_cast<std::ptrdiff_t>(i));
    return {};
  }

  Status shell(const Words& words, int depth) {
    size_t i = 1;
    bool text = false;
    for (; i < words.size() && words[i].size() > 1 && (words[i][0] == '-' || words[i][0] == '+'); ++i) {
      if (words[i][1] != '-') text = text || words[i].find('c') != std::string::npos;
      if (words[i].find('o') != std::string::npos && words[i][1] != '-') ++i;  // -o pipefail
    }
    if (i >= words.size()) return wrong(fmt::format("'{}' starts a shell that reads nothing", joined(words, 0, words.size())));
    if (!text) return script(words[i], depth);
    // systemd made $$ of a dollar that is the shell's.
    std::string inner;
    for (size_t n = 0; n < words[i].size(); ++n) {
      inner += words[i][n];
      if (words[i][n] == '$' && n + 1 < words[i].size() && words[i][n + 1] == '$') ++n;
    }
    drop(words, i, "no shell is needed");
    return commands(inner, where_ + " (script)", depth, false);
  }

  Status script(const std::string& path, int depth) {
    const auto text = read_file_(path);
    if (!text) return wrong(fmt::format("{} is started here, and cannot be read", path));
    const std::string first = text->substr(0, text->find('\n'));
    if (!first.starts_with("#!") || (first.find("sh") == std::string::npos))
      return wrong(fmt::format("{} is started here, which is no SGLang server and no shell script", path));
    out.around.push_back({Kind::kDropped, path, "the command that it starts is in the unit itself"});
    return commands(*text, path, depth, true);
  }

  Status commands(const std::string& text, const std::string& where, int depth, bool from_file) {
    auto parsed = parse_shell_script(text, where, lookup_);
    if (!parsed) return parsed.status();
    if (from_file) {  // a percent sign of a file is no specifier
      for (ShellCommand& c : *parsed) {
        for (std::string& w : c.words) w = without_specifiers(w);
        for (auto& [name, value] : c.assignments) value = without_specifiers(value);
      }
    }
    const ShellCommand* server = nullptr;
    for (const ShellCommand& c : *parsed) {
      const Sighting seen = sight(c.words);
      const bool only = parsed->size() == 1;  // exec /opt/other.sh
      if (seen.flags == std::string::npos && !only) continue;
      if (server) return {Code::kUsage, fmt::format("{}:{}: a second server is started here; a unit has one", where, c.line)};
      server = &c;
    }
    if (!server)
      return {Code::kUsage, fmt::format("{}: no command of it starts SGLang (python -m sglang.launch_server, sglang serve)", where)};
    bool after = false;
    for (const ShellCommand& c : *parsed) {
      if (&c == server) {
        after = true;
        for (const auto& [name, value] : c.assignments) DDTREE_RETURN_IF_ERROR(set_variable(name, value));
        DDTREE_RETURN_IF_ERROR(redirections(c));
        const std::string outer = std::exchange(where_, fmt::format("{}:{}", where, c.line));
        DDTREE_RETURN_IF_ERROR(command(c.words, depth + 1));
        where_ = outer;
      } else if (after || c.fallback) {
        out.around.push_back(
            {Kind::kDropped, c.text, after ? "it ran after the server; ExecStopPost= does" : "it ran where the command before it failed"});
      } else {
        DDTREE_RETURN_IF_ERROR(other(c));
      }
    }
    return {};
  }

  // A command before the server's.
  Status other(const ShellCommand& c) {
    const auto dropped = [&](std::string reason) {
      out.around.push_back({Kind::kDropped, c.text, std::move(reason)});
      return Status();
    };
    if (c.words.empty()) return redirections(c);  // an assignment: its value stands where it was used
    const std::string& name = c.words[0];
    if (name == "export") {
      for (size_t i = 1; i < c.words.size(); ++i)
        if (const size_t equal = c.words[i].find('='); is_assignment(c.words[i]))
          DDTREE_RETURN_IF_ERROR(set_variable(c.words[i].substr(0, equal), c.words[i].substr(equal + 1)));
      return {};
    }
    if (name == "cd" && c.words.size() == 2) return set(c.text, "WorkingDirectory", "", c.words[1]);
    if (name == "ulimit" && c.words.size() == 3 && (c.words[1] == "-n" || c.words[1] == "-l"))
      return set(c.text, c.words[1] == "-n" ? "LimitNOFILE" : "LimitMEMLOCK", "", c.words[2] == "unlimited" ? "infinity" : c.words[2]);
    if (name == "source" || name == ".")
      return dropped("no Python environment is needed; variables that it sets for other ends belong into Environment=");
    for (const char* n : {"conda", "mamba", "micromamba", "eval", "module", "pyenv"})
      if (name == n) return dropped("no Python environment is needed");
    if (name == "exec" && c.words.size() == 1) return redirections(c);
    for (const char* n : {"set", "shopt", "umask", "trap", "unset", "echo", "printf", "date", "true", ":"})
      if (name == n) return dropped("of use to the script only");
    return dropped("it ran before the server; put it into ExecStartPre= if it is still wanted");
  }

  Status redirections(const ShellCommand& c) {
    std::string file;
    bool errors = false;
    for (const std::string& r : c.redirections) {
      const size_t arrow = r.find('>');
      if (arrow == std::string::npos) continue;  // input: systemd gives /dev/null
      const size_t begin = r.find_first_not_of(">&|", arrow);
      if (begin == std::string::npos) continue;
      const std::string target = r.substr(begin), fd = r.substr(0, arrow);
      if (r.find(">&") != std::string::npos && target.size() == 1) {
        errors = errors || (fd == "2" && target == "1");
      } else if (fd.empty() || fd == "1" || fd == "&") {
        file = target;
        errors = errors || fd == "&";
      }
    }
    // A relative file would need the folder that the script was in.
    if (file.empty() || file == "/dev/null" || (file[0] != '/' && file[0] != '$')) return {};
    DDTREE_RETURN_IF_ERROR(set(">" + file, "StandardOutput", "append:", file));
    if (errors) out.settings.emplace_back("StandardError", out.settings.back().second);
    return {};
  }

  std::string where_;
  const std::function<std::optional<std::string>(const std::string&)>& lookup_;
  const std::function<std::optional<std::string>(const std::string&)>& read_file_;
};

}  // namespace

const char* difference_name(UnitDifference::Kind kind) {
  switch (kind) {
    case UnitDifference::kKept: return "kept";
    case UnitDifference::kChanged: return "changed";
    case UnitDifference::kDropped: return "dropped";
    case UnitDifference::kAdded: return "added";
    case UnitDifference::kRefused: return "refused";
  }
  return "";
}

Result<LaunchCommand> find_launch_command(const std::string& exec_start, const std::string& where,
                                          const std::function<std::optional<std::string>(const std::string&)>& lookup,
                                          const std::function<std::optional<std::string>(const std::string&)>& read_file) {
  Finder finder(where, lookup, read_file);
  const size_t begin = exec_start.find_first_not_of("-@:+!");
  const std::string prefix = exec_start.substr(0, std::min(begin, exec_start.size()));
  auto words = split_unit_words(begin == std::string::npos ? "" : exec_start.substr(begin));
  if (!words) return Status(Code::kUsage, fmt::format("{}: {}", where, words.status().message()));
  if (std::find(words->begin(), words->end(), ";") != words->end())
    return Status(Code::kUsage, where + ": two commands in one ExecStart=; a server's unit has one");
  if (prefix.find(':') != std::string::npos)
    return Status(Code::kUsage, where + ": ':' switches variables off; write the command without it");
  if (prefix.find('@') != std::string::npos && words->size() > 1) words->erase(words->begin() + 1);  // argv[0]
  if (prefix.find('-') != std::string::npos)
    finder.out.around.push_back({Kind::kDropped, "ExecStart=-", "a failure that systemd may not see cannot be acted upon"});
  if (prefix.find_first_of("+!") != std::string::npos)
    finder.out.around.push_back({Kind::kDropped, "ExecStart=" + prefix, "the server needs no privileges"});
  DDTREE_RETURN_IF_ERROR(finder.command(std::move(*words), 0));
  return std::move(finder.out);
}

}  // namespace ddtree
