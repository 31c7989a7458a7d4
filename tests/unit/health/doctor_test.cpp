// ddtree doctor over machines that never were: what it says of each, and the cure.
#include "health/doctor.h"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <set>

namespace ddtree {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

CardFacts card(int index) {
  CardFacts c;
  c.index = index, c.name = "NVIDIA H200", c.major = 9, c.minor = 0;
  c.memory_bytes = int64_t{143771} << 20, c.free_bytes = int64_t{143150} << 20;
  c.sm_mhz = 345, c.sm_max_mhz = 1980, c.memory_mhz = 3201, c.memory_max_mhz = 3201, c.celsius = 31;
  c.link_width = c.link_max_width = 16, c.link_generation = 1, c.link_max_generation = 5;
  c.persistence = 1, c.uncorrected_errors = 0;
  return c;
}

// A machine on which all is well.
Machine healthy(int cards = 1) {
  Machine m;
  m.cuda_build = m.nvidia_hardware = true;
  m.driver.driver_version = m.driver.needed_version = 13000;
  m.driver.cards = cards;
  m.driver_release = "580.65.06";
  m.blas = {"libcublasLt.so.13", "", 130002, ""};
  m.nccl = {"libnccl.so.2", "", 22809, ""};
  for (int i = 0; i < cards; ++i) m.cards.push_back(card(i));
  m.peers.assign(static_cast<size_t>(cards), std::vector<int>(static_cast<size_t>(cards), 1));
  m.cores = 64, m.governor = "performance", m.ram_bytes = 512 * kGiB, m.ram_available = 500 * kGiB;
  m.memlock = -1, m.files = 1024, m.files_hard = 524288, m.shm_bytes = 64 * kGiB, m.clock_synchronised = 1;
  m.disks = {{"history", "/var/lib/ddtree/ddtree.db", 100 * kGiB, ""}};
  m.unit = {"ddtree.service", "active", "success", "0", "notify", 0};
  return m;
}

std::vector<DoctorLine> bad(const std::vector<DoctorLine>& lines) {
  std::vector<DoctorLine> out;
  for (const DoctorLine& l : lines) {
    CHECK(!l.check.empty());
    CHECK(!l.found.empty());
    if (l.verdict == Verdict::kOk) continue;
    INFO(l.check << ": " << l.found);
    CHECK(!l.wanted.empty());  // nobody is left with a complaint and no way out
    CHECK(!l.cure.empty());
    out.push_back(l);
  }
  return out;
}

// The one thing that is wrong.
DoctorLine only(const Machine& m, const DoctorOptions& o = {}) {
  const auto lines = bad(examine(m, o));
  REQUIRE(lines.size() == 1);
  return lines[0];
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void check(const DoctorLine& l, const std::string& name, Verdict verdict, const std::string& found, const std::string& wanted,
           const std::string& cure) {
  INFO(l.check << " " << verdict_name(l.verdict) << "\n" << l.found << "\n" << l.wanted << "\n" << l.cure);
  CHECK(l.check == name);
  CHECK(l.verdict == verdict);
  CHECK(has(l.found, found));
  CHECK(has(l.wanted, wanted));
  CHECK(has(l.cure, cure));
}

}  // namespace

TEST_CASE("doctor: sound machines of one and eight cards", "[doctor]") {
  for (const int cards : {1, 8}) {
    const auto lines = examine(healthy(cards), {.needs_card = true});
    CHECK(bad(lines).empty());
    CHECK(exit_code_of(lines) == 0);
    std::set<std::string> checks;
    for (const DoctorLine& l : lines) checks.insert(l.check);
    for (int i = 0; i < cards; ++i) CHECK(checks.contains("card " + std::to_string(i)));
    CHECK(checks.contains("p2p") == (cards > 1));  // one card has no peers and needs no collectives
    CHECK(checks.contains("nccl") == (cards > 1));
  }
}

TEST_CASE("doctor: drivers", "[doctor]") {
  SECTION("too old: the words that serve ends with, and 69") {
    Machine m = healthy();
    m.driver.driver_version = 12080, m.driver.error = ops::kCudaInsufficientDriver;
    const DoctorLine l = only(m);
    check(l, "driver", Verdict::kFail, "CUDA 12.8 (release 580.65.06)", "CUDA 13.0 or later", "update the driver");
    CHECK(exit_code_of({l}) == 69);
    const Status s = check_driver(m.driver);
    CHECK(s.code() == Code::kUnavailable);
    CHECK(has(s.message(), "is for CUDA 12.8, this build needs 13.0 or later: update the driver"));
  }
  SECTION("a later minor and a later major carry this build") {
    Machine m = healthy();
    for (const int version : {13000, 13020, 14000}) {
      m.driver.driver_version = version;
      CHECK(bad(examine(m, {})).empty());
      CHECK(check_driver(m.driver).ok());
    }
  }
  SECTION("library and kernel module differ: 75, for a restart of the machine mends it") {
    Machine m = healthy();
    m.nvml_mismatch = true, m.driver.error = ops::kCudaDriverMismatch,
    m.driver.error_text = "system has unsupported display driver / cuda driver combination";
    const DoctorLine l = only(m);
    check(l, "driver", Verdict::kFail, "different releases", "one release", "restart the machine");
    CHECK(exit_code_of({l}) == 75);
    CHECK(check_driver(m.driver).code() == Code::kTemporary);
  }
  SECTION("cards not attached yet") {
    Machine m = healthy();
    m.driver.error = ops::kCudaSystemNotReady, m.driver.error_text = "system not yet initialized", m.driver.cards = 0;
    const DoctorLine l = only(m);
    check(l, "driver", Verdict::kFail, "system not yet initialized", "answers", "wait until the cards are attached");
    CHECK(exit_code_of({l}) == 75);
  }
  SECTION("a driver without cards") {
    Machine m = healthy();
    m.driver.error = ops::kCudaNoDevice, m.driver.error_text = "no CUDA-capable device is detected", m.driver.cards = 0, m.cards.clear();
    check(only(m), "driver", Verdict::kFail, "shows no card: no CUDA-capable device", "8.0 or later", "CUDA_VISIBLE_DEVICES");
  }
  SECTION("a card without a driver") {
    Machine m = healthy();
    m.driver.driver_version = m.driver.cards = 0, m.cards.clear(), m.driver_release = "";
    const DoctorLine l = only(m);
    check(l, "driver", Verdict::kFail, "no driver answers", "CUDA 13.0", "--gpus all");
    CHECK(exit_code_of({l}) == 69);
  }
  SECTION("no card at all: a remark, and a failure where one is needed") {
    Machine m = healthy();
    m.driver.driver_version = m.driver.cards = 0, m.cards.clear(), m.nvidia_hardware = false;
    check(only(m), "driver", Verdict::kWarn, "no NVIDIA card on the bus", "small models", "--device cpu");
    CHECK(exit_code_of(examine(m, {})) == 0);
    check(only(m, {.needs_card = true}), "driver", Verdict::kFail, "no NVIDIA card", "8.0 or later", "--device cpu");
    CHECK(exit_code_of(examine(m, {.needs_card = true})) == 69);
  }
  SECTION("a build without CUDA says so first") {
    Machine m = healthy();
    m.cuda_build = false, m.driver = {}, m.cards.clear();
    check(only(m), "build", Verdict::kWarn, "no CUDA engine", "a build with CUDA", "DDTREE_CUDA=on");
    check(only(m, {.needs_card = true}), "build", Verdict::kFail, "no CUDA engine", "a build with CUDA", "package");
    m.nvidia_hardware = false;
    const auto lines = examine(m, {});
    CHECK(bad(lines).empty());
    CHECK(has(lines[0].found, "this machine has no NVIDIA card"));
  }
}

TEST_CASE("doctor: libraries", "[doctor]") {
  Machine m = healthy(2);
  SECTION("cuBLASLt of another major") {
    m.blas = {"", "libcublasLt.so.13: cannot open shared object file", 0, "libcublasLt.so.12"};
    check(only(m), "cublasLt", Verdict::kWarn, "libcublasLt.so.12, which is of another major", "libcublasLt.so.13", "install cuBLAS 13");
  }
  SECTION("a file that is not what its name says") {
    m.blas.version = 120304;
    check(only(m), "cublasLt", Verdict::kWarn, "is 12.3.4 for CUDA 12", "of major 13", "install cuBLAS 13");
    m.blas.version = 130002, m.blas.cuda = 12080;  // what it was made for counts
    check(only(m), "cublasLt", Verdict::kWarn, "is 13.0.2 for CUDA 12", "of major 13", "install cuBLAS 13");
  }
  SECTION("none") {
    m.blas = {};
    check(only(m), "cublasLt", Verdict::kWarn, "not found", "answers are the same", "libcublas-13");
  }
  SECTION("NCCL missing or old, with two cards") {
    m.nccl = {};
    check(only(m), "nccl", Verdict::kWarn, "not found", "libnccl.so.2", "2.18");
    m.nccl = {"libnccl.so.2", "", 21601, ""};
    check(only(m), "nccl", Verdict::kWarn, "2.16.1", "2.18 or later", "libnccl2");
  }
  SECTION("one card needs none") {
    m = healthy(1);
    m.nccl = {};
    CHECK(bad(examine(m, {})).empty());
  }
}

TEST_CASE("doctor: cards", "[doctor]") {
  Machine m = healthy(2);
  CardFacts& c = m.cards[1];
  SECTION("a narrow link") {
    c.link_width = 4, c.link_generation = 5;
    check(only(m), "card 1", Verdict::kWarn, "PCIe x4 (generation 5)", "x16: loading takes 4 times as long", "full slot");
  }
  SECTION("persistence") {
    c.persistence = 0;
    check(only(m), "card 1", Verdict::kWarn, "persistence mode is off", "on", "nvidia-smi -pm 1");
  }
  SECTION("somebody else's process") {
    c.processes = {{4711, int64_t{20480} << 20, "python3"}, {4712, -1, ""}};
    c.free_bytes -= int64_t{20480} << 20;
    check(only(m), "card 1", Verdict::kWarn, "python3 (4711, 20480 MiB), a process (4712)", "of its own", "--device cuda:N");
  }
  SECTION("memory taken by what cannot be seen from here") {
    c.free_bytes = 10 * kGiB;
    check(only(m), "card 1", Verdict::kWarn, "cannot be seen from here", "of its own", "nvidia-smi on the host");
  }
  SECTION("errors of the memory") {
    c.uncorrected_errors = 3;
    check(only(m), "card 1", Verdict::kWarn, "3 uncorrected", "answers may be wrong", "xid");
    c.uncorrected_errors = -1, c.remapping_failed = true;
    check(only(m), "card 1", Verdict::kFail, "could not be remapped", "without broken rows", "replaced");
    c.remapping_failed = false, c.remapping_pending = true;
    check(only(m), "card 1", Verdict::kWarn, "wait to be remapped", "none", "nvidia-smi -r");
  }
  SECTION("MIG") {
    c.mig = true;
    check(only(m), "card 1", Verdict::kWarn, "MIG is on", "the whole card", "-mig 0");
  }
  SECTION("an old card beside a good one, in the words of serve") {
    c.name = "Tesla V100", c.major = 7, c.minor = 0;
    const DoctorLine l = only(m);
    check(l, "card 1", Verdict::kFail, "Tesla V100, compute capability 7.0", "8.0 or later", "--device cuda:N");
    CHECK(exit_code_of({l}) == 69);
    CHECK(has(ops::check_card(1, c.name, 7, 0, true).message(), "no code for card 1 (Tesla V100, compute capability 7.0)"));
    CHECK(ops::check_card(1, c.name, 12, 0, true).ok());
    CHECK(!ops::check_card(1, c.name, 12, 0, false).ok());
  }
  SECTION("direct access between cards") {
    m = healthy(4);
    m.peers[0][2] = m.peers[2][0] = m.peers[1][3] = m.peers[3][1] = 0;
    check(only(m), "p2p", Verdict::kWarn, "between cards 0-2, 1-3", "all pairs", "NCCL_P2P_DISABLE=1");
  }
  SECTION("NVML is not there") {
    m.cards.clear(), m.peers.clear(), m.nvml_error = "libnvidia-ml.so.1: cannot open shared object file";
    check(only(m), "cards", Verdict::kWarn, "cannot open shared object", "libnvidia-ml.so.1", "install");
  }
}

TEST_CASE("doctor: the host", "[doctor]") {
  Machine m = healthy(2);
  SECTION("governor") {
    m.governor = "powersave";
    check(only(m), "cpu", Verdict::kWarn, "governor powersave", "performance", "cpupower");
    m.governor = "powersave of intel_pstate";  // goes up to full speed by itself
    CHECK(bad(examine(m, {})).empty());
  }
  SECTION("limits") {
    m.files_hard = m.files = 1024;
    check(only(m), "limits", Verdict::kWarn, "open files: 1024", "4096 or more", "LimitNOFILE");
    m.files_hard = -1, m.memlock = 64 << 10;
    check(only(m), "limits", Verdict::kWarn, "locked memory: 64 KiB", "unlimited", "LimitMEMLOCK");
    m.memlock = -1, m.shm_bytes = 64 << 20;
    check(only(m), "shm", Verdict::kWarn, "64 MiB", "1 GiB", "--shm-size");
  }
  SECTION("disks") {
    m.disks[0].free_bytes = 100 << 20;
    check(only(m), "disk (history)", Verdict::kWarn, "/var/lib/ddtree/ddtree.db: 100 MiB free", "not the answers", "--db");
    m.disks[0] = {"model", "/models/x", -1, "No such file or directory"};
    check(only(m), "disk (model)", Verdict::kWarn, "/models/x: No such file", "can be read", "another path");
  }
  SECTION("clock") {
    m.clock_synchronised = 0;
    check(only(m), "clock", Verdict::kWarn, "not synchronised", "synchronised", "set-ntp");
  }
  SECTION("unit") {
    m.unit.active = "failed", m.unit.result = "exit-code", m.unit.exit_status = "65";
    check(only(m), "unit", Verdict::kFail, "ddtree.service is failed (exit-code, status 65)", "active", "journalctl -u ddtree.service");
    m.unit.active = "active", m.unit.notify = "simple";
    check(only(m), "unit", Verdict::kWarn, "Type=simple", "Type=notify", "ddtree install");
    m.unit.notify = "notify", m.unit.restarts = 9;
    check(only(m), "unit", Verdict::kWarn, "restarted 9 times", "no restarts", "journalctl");
    m.unit = {};
    CHECK(bad(examine(m, {})).empty());
  }
  SECTION("of a lasting and a passing failure the lasting one is the exit code") {
    m.unit.active = "failed";
    m.nvml_mismatch = true;
    const auto lines = examine(m, {});
    CHECK(bad(lines).size() == 2);
    CHECK(exit_code_of(lines) == 69);
  }
}

// Whatever this machine is: nothing is left without words, and the exit code follows from the lines.
TEST_CASE("doctor: this machine", "[doctor]") {
  const DoctorOptions o{.store_path = "/tmp/ddtree-doctor/not/there/yet.db"};
  const Machine m = inspect_machine(o);
  CHECK(m.cores > 0);
  CHECK(m.ram_bytes > 0);
  REQUIRE(m.disks.size() == 1);
  CHECK(m.disks[0].free_bytes > 0);  // of the nearest folder that is there
  CHECK(m.peers.size() == m.cards.size());
  const auto lines = examine(m, o);
  bad(lines);
  const bool failed = std::any_of(lines.begin(), lines.end(), [](const DoctorLine& l) { return l.verdict == Verdict::kFail; });
  CHECK((exit_code_of(lines) != 0) == failed);
}

}  // namespace ddtree
