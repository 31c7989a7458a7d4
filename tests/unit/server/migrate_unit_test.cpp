// What SGLang's units become. The samples are in tests/data/units/.
#include "server/units/migrate_unit.h"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "base/embedded.h"
#include "server/serve_flags.h"
#include "server/units/unit_swap.h"

using namespace ddtree;
using Catch::Matchers::ContainsSubstring;
using Words = std::vector<std::string>;
using Kind = UnitDifference::Kind;

namespace {

std::string sample(const std::string& name) {
  std::ifstream in(std::string(DDTREE_SOURCE_DIR) + "/tests/data/units/" + name);
  std::ostringstream text;
  text << in.rdbuf();
  REQUIRE(!text.str().empty());
  return text.str();
}

struct Machine {
  std::map<std::string, std::string> files;
  bool cuda = true;
  Words leave_out;
  std::string target;  // empty: in place
  std::vector<std::string> drop_ins;

  Result<UnitMigration> migrate(const std::string& text, const std::string& name = "sglang.service") const {
    MigrationOptions o;
    o.source = "/etc/systemd/system/" + name;
    o.target = target.empty() ? o.source : target;
    o.packaged_unit = std::string(embedded_file("packaging/systemd/ddtree.service").value());
    o.cuda = cuda;
    o.leave_out = leave_out;
    o.read_file = [this](const std::string& path) { return files.contains(path) ? std::optional(files.at(path)) : std::nullopt; };
    o.home_of = [](const std::string& user) {
      return user == "root" ? std::optional<std::string>("/root") : user == "nobody" ? std::nullopt : std::optional("/home/" + user);
    };
    auto unit = UnitFile::parse(text, o.source);
    REQUIRE(unit);
    std::vector<UnitFile> more;
    for (const std::string& d : drop_ins) {
      auto parsed = UnitFile::parse(d, o.source + ".d/x.conf");
      REQUIRE(parsed);
      more.push_back(*parsed);
    }
    return migrate_unit(*unit, more, o);
  }
  UnitMigration good(const std::string& text, const std::string& name = "sglang.service") const {
    auto m = migrate(text, name);
    INFO((m ? "" : m.status().message()));
    REQUIRE(m);
    return std::move(*m);
  }
  // Of a command line alone.
  UnitMigration command(const std::string& exec) const { return good("[Service]\nExecStart=" + exec + "\n"); }
};

UnitFile parsed(const UnitMigration& m) {
  auto unit = UnitFile::parse(m.text, "new");
  INFO(m.text);
  REQUIRE(unit);
  return *unit;
}

// The new unit's command, read back from its text.
Words command_of(const UnitMigration& m) {
  auto words = split_unit_words(parsed(m).value("Service", "ExecStart"));
  REQUIRE(words);
  CHECK(*words == m.command);
  return *words;
}

const UnitDifference* find(const std::vector<UnitDifference>& list, const std::string& what) {
  for (const UnitDifference& d : list)
    if (d.what.starts_with(what)) return &d;
  return nullptr;
}

const std::string kServer = "/opt/venv/bin/python3 -m sglang.launch_server --model-path /srv/m";

}  // namespace

TEST_CASE("a plain unit: flags by the server's own rules, everything else kept or explained", "[units]") {
  const UnitMigration m = Machine{}.good(sample("plain.service"));
  CHECK(m.blockers.empty());
  const Words command = command_of(m);
  CHECK(command == Words{"/usr/bin/ddtree",
                         "serve",
                         "--model-path",
                         "/srv/models/Qwen3.6-27B",
                         "--speculative-algorithm",
                         "DFLASH",
                         "--speculative-draft-model-path",
                         "/srv/models/Qwen3.6-27B-DFlash",
                         "--speculative-num-draft-tokens",
                         "16",
                         "--mem-fraction-static",
                         "0.85",
                         "--chunked-prefill-size",
                         "8192",
                         "--host",
                         "0.0.0.0",
                         "--port",
                         "30000",
                         "--served-model-name",
                         "qwen 27b",
                         "--tool-call-parser",
                         "qwen3_coder",
                         "--reasoning-parser",
                         "qwen3",
                         "--device",
                         "cuda"});
  // The server takes what is written, and its remarks are the reasons given here.
  auto config = parse_serve_flags(Words(command.begin() + 2, command.end()));
  REQUIRE(config);
  REQUIRE(config->notes.size() == 2);
  const UnitDifference* chunk = find(m.flags, "--chunked-prefill-size 8192");
  REQUIRE(chunk);
  CHECK(chunk->kind == Kind::kChanged);
  const UnitDifference* memory = find(m.flags, "--mem-fraction-static 0.85");
  REQUIRE(memory);
  CHECK(memory->kind == Kind::kChanged);
  CHECK_THAT(config->notes[0], ContainsSubstring(memory->reason));
  CHECK_THAT(config->notes[1], ContainsSubstring(chunk->reason));
  CHECK(find(m.flags, "--device cuda")->kind == Kind::kAdded);

  const UnitFile unit = parsed(m);
  CHECK(m.text.starts_with(kInstalledUnitMark));
  CHECK(unit.value("Service", "Type") == "notify");
  CHECK(unit.value("Service", "Restart") == "on-failure");
  CHECK(unit.value("Service", "User") == "llm");
  CHECK(unit.value("Service", "WorkingDirectory") == "/srv/sglang");
  CHECK(unit.value("Service", "EnvironmentFile") == "-/etc/sglang/extra.env");
  CHECK(unit.value("Service", "LimitNOFILE") == "1048576");
  CHECK(unit.value("Service", "KillSignal").empty());
  CHECK(unit.value("Service", "StateDirectory") == "ddtree-%N");
  CHECK(unit.value("Service", "ProtectHome") == "yes");
  CHECK(unit.value("Unit", "Description") == "Qwen answers for the office");
  CHECK(unit.value("Install", "WantedBy") == "multi-user.target");
  Words variables;
  for (const UnitSetting& s : unit.values("Service", "Environment")) variables.push_back(s.value);
  CHECK(variables == Words{"CUDA_CACHE_PATH=%C/ddtree-%N", "CUDA_VISIBLE_DEVICES=1", "HF_HOME=/srv/huggingface"});
  CHECK(find(m.environment, "SGLANG_ENABLE_SPEC_V2")->kind == Kind::kDropped);
  CHECK(find(m.settings, "Restart=always")->kind == Kind::kChanged);
  CHECK(find(m.settings, "KillSignal=SIGINT")->kind == Kind::kDropped);
  // Every setting of the old unit is spoken of.
  const auto old_unit = UnitFile::parse(sample("plain.service"), "old");
  for (const UnitSetting& s : old_unit->settings())
    if (s.section == "Service" && s.name != "ExecStart" && s.name != "Environment") CHECK(find(m.settings, s.name + "="));
}

TEST_CASE("bash -c with conda, cd, export, numactl, a redirection and a secret", "[units]") {
  Machine machine;
  UnitMigration m = machine.good(sample("wrapped.service"));
  REQUIRE(m.blockers.size() == 1);
  CHECK_THAT(m.blockers[0], ContainsSubstring("--tp 2") && ContainsSubstring("--leave-out --tp"));
  CHECK(find(m.flags, "--tp 2")->kind == Kind::kRefused);
  machine.leave_out = {"--tp"};
  m = machine.good(sample("wrapped.service"));
  CHECK(m.blockers.empty());
  CHECK(command_of(m) == Words{"/usr/bin/ddtree", "serve", "--model-path", "Qwen/Qwen3.6-27B", "--port", "31000", "--api-key", "${KEY}",
                               "--device", "cuda"});
  const UnitFile unit = parsed(m);
  CHECK(unit.value("Service", "WorkingDirectory") == "/home/ada/serve");
  CHECK(unit.value("Service", "StandardOutput") == "append:/var/log/sglang.log");
  CHECK(unit.value("Service", "StandardError") == "append:/var/log/sglang.log");
  CHECK(unit.value("Service", "NUMAPolicy") == "bind");
  CHECK(unit.value("Service", "NUMAMask") == "0");
  CHECK(unit.value("Service", "CPUAffinity") == "numa");
  CHECK(unit.value("Service", "ProtectHome") == "read-only");  // the model's cache and the folder are in /home/ada
  CHECK(unit.value("Service", "ExecStop").empty());
  CHECK(find(m.environment, "HF_TOKEN=…"));
  for (const auto* list : {&m.flags, &m.around, &m.environment, &m.settings})
    for (const UnitDifference& d : *list) CHECK(d.what.find("hf_secret") == std::string::npos);
  // The home of the user has the cache; HOME is set by systemd where User= is.
  CHECK(m.text.find("HF_HOME") == std::string::npos);
}

TEST_CASE("a start script is read, and its variables", "[units]") {
  Machine machine;
  machine.files["/opt/serve/start.sh"] =
      "#!/usr/bin/env bash\nset -e\nMODEL=/srv/models/Qwen3.5-4B\nARGS=\"--context-length 32768 --trust-remote-code\"\nulimit -n "
      "65000\nnvidia-smi -pm 1\n"
      "exec python3 -m sglang.launch_server \\\n  --model-path \"$MODEL\" $ARGS --served-model-name 'a%b' \"$@\"\n";
  const UnitMigration m = machine.good(sample("script.service"));
  CHECK(m.blockers.empty());
  CHECK(command_of(m) == Words{"/usr/bin/ddtree", "serve", "--model-path", "/srv/models/Qwen3.5-4B", "--context-length", "32768",
                               "--served-model-name", "a%%b", "--device", "cuda"});
  CHECK(parsed(m).value("Service", "LimitNOFILE") == "65000");
  CHECK_THAT(find(m.around, "nvidia-smi")->reason, ContainsSubstring("ExecStartPre="));
  CHECK_FALSE(parsed(m).values("Service", "User").size());  // root, as before
  auto missing = Machine{}.migrate(sample("script.service"));
  REQUIRE_FALSE(missing);
  CHECK_THAT(missing.status().message(), ContainsSubstring("/opt/serve/start.sh") && ContainsSubstring("cannot be read"));
}

TEST_CASE("instances, specifiers and variables: kept where systemd knows them, written out where flags are in them", "[units]") {
  const UnitMigration m = Machine{}.good(sample("variables@.service"), "sglang@.service");
  CHECK(m.blockers.empty());
  CHECK(command_of(m) == Words{"/usr/bin/ddtree", "serve", "--model-path", "${MODEL}", "--port", "3000%i", "--context-length", "32768",
                               "--log-level", "info", "--device", "cuda"});
  CHECK(find(m.environment, "EXTRA=")->kind == Kind::kDropped);
  CHECK(find(m.environment, "MODEL=")->kind == Kind::kKept);

  Machine machine;
  machine.files["/etc/sglang.env"] = "MODEL=/root/models/q\nMORE='--port 1234 --served-model-name a%b'\n";
  const UnitMigration file =
      machine.good("[Service]\nEnvironmentFile=/etc/sglang.env\nExecStart=" + kServer + " --model-path ${MODEL} $MORE\n");
  CHECK(file.blockers.empty());
  CHECK(command_of(file)[5] == "${MODEL}");
  CHECK(find(file.flags, "--port 1234"));
  CHECK(find(file.flags, "--served-model-name a%%b"));
  CHECK(parsed(file).value("Service", "ProtectHome") == "read-only");  // by the variable's value
  const UnitMigration unknown = Machine{}.good("[Service]\nEnvironmentFile=/etc/sglang.env\nExecStart=" + kServer + " --port ${PORT}\n");
  REQUIRE(unknown.blockers.size() >= 1);
  CHECK_THAT(unknown.blockers[0], ContainsSubstring("${PORT}") && ContainsSubstring("/etc/sglang.env cannot be read"));
}

TEST_CASE("refused and unknown flags are all named, and stand in the way until somebody agrees", "[units]") {
  Machine machine;
  UnitMigration m = machine.good(sample("refused.service"));
  REQUIRE(m.blockers.size() == 4);
  CHECK_THAT(m.blockers[0], ContainsSubstring("--tp-size 4"));
  CHECK_THAT(m.blockers[1], ContainsSubstring("--kv-cache-dtype fp8_e4m3"));
  CHECK_THAT(m.blockers[2], ContainsSubstring("--hicache-ratio 2"));
  CHECK_THAT(m.blockers[3], ContainsSubstring("did you mean --max-running-requests?"));
  machine.leave_out = {"--tp-size", "--kv-cache-dtype", "--hicache-ratio", "--max-running-request"};
  m = machine.good(sample("refused.service"));
  CHECK(m.blockers.empty());
  CHECK_THAT(find(m.flags, "--tp-size 4")->reason, ContainsSubstring("left out, as asked"));
  machine.leave_out = {"--port"};
  CHECK_THAT(machine.command(kServer).blockers.at(0), ContainsSubstring("--leave-out --port"));
  // Contradictions are found as at a start.
  CHECK_THAT(Machine{}.command(kServer + " --speculative-dflash-block-size 8 --speculative-num-draft-tokens 16").blockers.at(0),
             ContainsSubstring("same figure"));
  CHECK_THAT(Machine{}.command(kServer + " --port 70000").blockers.at(0), ContainsSubstring("0 to 65535"));
}

TEST_CASE("the ways SGLang is started", "[units]") {
  for (const char* prefix :
       {"/opt/venv/bin/python3 -m sglang.launch_server", "python -u -m sglang.launch_server", "/opt/sglang/bin/sglang serve",
        "/usr/bin/env -i A=b python3.11 -m sglang.launch_server", "/usr/bin/python3 /opt/sglang/python/sglang/launch_server.py",
        "/opt/conda/bin/conda run -n sgl --no-capture-output python -m sglang.launch_server",
        "/usr/local/bin/uv run --project /opt/x python -m sglang.launch_server",
        "-/usr/bin/nice -n 5 /usr/bin/python3 -m sglang.launch_server", "@/usr/bin/python3 sglang -m sglang.launch_server",
        "/bin/sh -c 'exec python3 -m sglang.launch_server --model-path /srv/m'",
        "/bin/bash -ec \"ulimit -l unlimited; cd /srv && python3 -m sglang.launch_server --model-path /srv/m\"",
        "/usr/bin/taskset -c 0-7 /usr/bin/stdbuf -oL python3 -m sglang.launch_server",
        "/bin/bash -c 'eval \"$$(conda shell.bash hook)\" && conda activate x && python3 -m sglang.launch_server --model-path /srv/m'"}) {
    INFO(prefix);
    const std::string line = prefix;
    const UnitMigration m = Machine{}.command(line.find("/srv/m") == std::string::npos ? line + " --model-path /srv/m" : line);
    CHECK(m.blockers.empty());
    CHECK(command_of(m) == Words{"/usr/bin/ddtree", "serve", "--model-path", "/srv/m", "--device", "cuda"});
  }
  CHECK(parsed(Machine{}.command("/usr/bin/nice -n 5 " + kServer)).value("Service", "Nice") == "5");
  CHECK(parsed(Machine{}.command("/usr/bin/taskset -c 0-7 " + kServer)).value("Service", "CPUAffinity") == "0-7");
  CHECK(parsed(Machine{}.command("/bin/bash -c 'ulimit -l unlimited; " + kServer + "'")).value("Service", "LimitMEMLOCK") == "infinity");
}

TEST_CASE("what is not SGLang, or cannot be read, is said so and nothing is guessed", "[units]") {
  const auto error = [](const std::string& name) {
    auto m = Machine{}.migrate(sample("other/" + name + ".service"));
    REQUIRE_FALSE(m);
    CHECK(m.status().code() == Code::kUsage);
    return m.status().message();
  };
  CHECK_THAT(error("vllm"), ContainsSubstring("vLLM") && ContainsSubstring("only SGLang"));
  CHECK_THAT(error("llama"), ContainsSubstring("llama.cpp"));
  CHECK_THAT(error("docker"), ContainsSubstring("container"));
  CHECK_THAT(error("backup"), ContainsSubstring("/opt/backup.py"));
  CHECK_THAT(error("pipe"), ContainsSubstring("pipe"));
  CHECK_THAT(error("loop"), ContainsSubstring("'for'"));
  CHECK_THAT(error("two"), ContainsSubstring("second ExecStart="));
  auto none = Machine{}.migrate("[Unit]\nDescription=x\n");
  REQUIRE_FALSE(none);
  CHECK_THAT(none.status().message(), ContainsSubstring("no ExecStart="));
  auto dollar = Machine{}.migrate("[Service]\nExecStart=/bin/sh -c 'python -m sglang.launch_server --port `cat /p`'\n");
  REQUIRE_FALSE(dollar);
  CHECK_THAT(dollar.status().message(), ContainsSubstring("`cat /p`"));
  auto own = Machine{}.migrate("[Service]\nExecStart=/usr/bin/ddtree serve\n");
  REQUIRE_FALSE(own);
  CHECK_THAT(own.status().message(), ContainsSubstring("ddtree is started here"));
}

TEST_CASE("a unit beside the old one takes its drop-ins over; in place they stay, or stand in the way", "[units]") {
  Machine machine;
  machine.drop_ins = {"[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=3\nMemoryMax=100G\n"};
  const std::string text = "[Service]\nUser=llm\nEnvironment=CUDA_VISIBLE_DEVICES=1\nExecStart=" + kServer + "\n";
  UnitMigration m = machine.good(text);
  CHECK(m.blockers.empty());
  CHECK(parsed(m).value("Service", "MemoryMax").empty());
  CHECK_THAT(m.text, ContainsSubstring("CUDA_VISIBLE_DEVICES=1") && !ContainsSubstring("Conflicts="));
  machine.target = "/etc/systemd/system/ddtree-sglang.service";
  m = machine.good(text);
  CHECK(parsed(m).value("Service", "MemoryMax") == "100G");
  CHECK_THAT(m.text, ContainsSubstring("CUDA_VISIBLE_DEVICES=3") && !ContainsSubstring("CUDA_VISIBLE_DEVICES=1"));
  CHECK(parsed(m).value("Unit", "Conflicts") == "sglang.service");
  machine.target.clear();
  machine.drop_ins = {"[Service]\nExecStart=\nExecStart=" + kServer + " --port 31000\n"};
  m = machine.good(text);
  CHECK(find(m.flags, "--port 31000"));  // what really runs
  REQUIRE(m.blockers.size() == 2);       // the reset and the command
  CHECK_THAT(m.blockers[1], ContainsSubstring("x.conf") && ContainsSubstring("would override"));
}

TEST_CASE("cards: SGLang's default and --base-gpu-id become --device; without a CUDA engine that is said", "[units]") {
  CHECK(command_of(Machine{}.command(kServer + " --base-gpu-id 2")).back() == "cuda:2");
  CHECK(command_of(Machine{}.command(kServer + " --device cuda:1")).back() == "cuda:1");
  Machine bare;
  bare.cuda = false;
  const UnitMigration m = bare.command(kServer);
  CHECK(command_of(m).back() == "/srv/m");
  CHECK_THAT(m.notes.at(0), ContainsSubstring("no CUDA engine"));
}

TEST_CASE("root's model cache is named, since systemd gives a unit without User= no $HOME", "[units]") {
  const UnitMigration m = Machine{}.command("python3 -m sglang.launch_server --model-path Qwen/Qwen3.6-27B");
  CHECK_THAT(m.text, ContainsSubstring("Environment=HF_HOME=/root/.cache/huggingface"));
  CHECK(parsed(m).value("Service", "ProtectHome") == "read-only");
  CHECK(Machine{}.command(kServer).text.find("HF_HOME") == std::string::npos);
}

TEST_CASE("what the old unit orders already is not said twice, and comments speak of this unit", "[units]") {
  const Machine machine;
  const std::string exec = "[Service]\nExecStart=/usr/bin/python3 -m sglang.launch_server --model-path /srv/m\n";
  const auto lines = [](const std::string& text, const std::string& start) {
    std::vector<std::string> out;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);)
      if (line.starts_with(start)) out.push_back(line);
    return out;
  };
  const std::string all =
      machine.good("[Unit]\nAfter=network-online.target nvidia-persistenced.service\nWants=network-online.target\n" + exec).text;
  CHECK(lines(all, "After=") == Words{"After=network-online.target nvidia-persistenced.service", "After=modprobe@nvidia_uvm.service"});
  CHECK(lines(all, "Wants=") == Words{"Wants=network-online.target", "Wants=modprobe@nvidia_uvm.service"});
  CHECK_THAT(all, !ContainsSubstring("may not be there before this"));  // a comment without its setting
  CHECK_THAT(all, ContainsSubstring("# The card's driver first"));
  CHECK_THAT(all, ContainsSubstring("(systemctl edit sglang)") && !ContainsSubstring("systemctl edit ddtree"));
  // Taken back in the old unit, so said by the new one; and with nothing there all is as packaged.
  const std::string back = machine.good("[Unit]\nAfter=network-online.target\nAfter=\n" + exec).text;
  CHECK(lines(back, "After=network-online.target").size() == 2);
  const std::string bare = machine.good(exec, "other@.service").text;
  CHECK(lines(bare, "After=") == Words{"After=network-online.target", "After=modprobe@nvidia_uvm.service nvidia-persistenced.service"});
  CHECK_THAT(bare, ContainsSubstring("(systemctl edit other@)"));
}

TEST_CASE("a model in the cache of a user whom this machine does not know: homes can be read, and that is said", "[units]") {
  const Machine machine;
  const std::string service = "[Service]\nUser=nobody\nExecStart=/usr/bin/python3 -m sglang.launch_server --model-path ";
  const auto cached = machine.good(service + "Qwen/Qwen3.6-27B\n");
  CHECK(parsed(cached).value("Service", "ProtectHome") == "read-only");
  CHECK(std::any_of(cached.settings.begin(), cached.settings.end(), [](const UnitDifference& d) {
    return d.kind == Kind::kAdded && d.what == "ProtectHome=read-only" && d.reason.find("home of nobody") != std::string::npos;
  }));
  CHECK(parsed(machine.good(service + "/srv/m\n")).value("Service", "ProtectHome") == "yes");
}
