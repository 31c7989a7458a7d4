#include "health/doctor.h"

#include <fmt/core.h>

#include <algorithm>

namespace ddtree {
namespace {

constexpr double kMiB = 1 << 20, kGiB = 1 << 30;
constexpr int kNcclLeast = 21800;  // 2.18
constexpr int64_t kFilesWanted = 4096, kShmWanted = int64_t{1} << 30, kHistoryWanted = int64_t{1} << 30;

std::string gib(int64_t bytes) { return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / kGiB); }
std::string library_version(int v) { return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100); }

class Examination {
 public:
  Examination(const Machine& m, const DoctorOptions& o) : m_(m), o_(o) {}

  std::vector<DoctorLine> run() {
    const bool usable = driver();
    if (usable) {
      blas();
      cards();
      if (m_.cards.size() > 1) peers(), nccl();
    }
    cpu();
    limits();
    disks();
    if (m_.clock_synchronised == 0)
      warn("clock", "not synchronised", "synchronised, or times in the history and the log mislead",
           "timedatectl set-ntp true, or start the machine's time service");
    else if (m_.clock_synchronised == 1) ok("clock", "synchronised");
    unit();
    return std::move(out_);
  }

 private:
  void ok(std::string check, std::string found) { out_.push_back({std::move(check), Verdict::kOk, std::move(found), "", ""}); }
  void warn(std::string check, std::string found, std::string wanted, std::string cure) {
    out_.push_back({std::move(check), Verdict::kWarn, std::move(found), std::move(wanted), std::move(cure)});
  }
  void fail(std::string check, std::string found, std::string wanted, std::string cure, bool temporary = false) {
    out_.push_back({std::move(check), Verdict::kFail, std::move(found), std::move(wanted), std::move(cure), temporary});
  }

  // False where nothing can be said about cards.
  bool driver() {
    const ops::DriverState& d = m_.driver;
    if (!m_.cuda_build) {
      const char* const found = "this build has no CUDA engine: it serves on the CPU only";
      const char* const wanted = "a build with CUDA, for any but small models";
      const char* const cure = "install the package that is built with CUDA, or build where nvcc is (cmake -DDDTREE_CUDA=on)";
      if (o_.needs_card) fail("build", found, wanted, cure);
      else if (m_.nvidia_hardware) warn("build", found, wanted, cure);
      else ok("build", std::string(found) + "; this machine has no NVIDIA card");
      return false;
    }
    const std::string needed = ops::cuda_version_text(d.needed_version);
    ok("build", "made with CUDA " + needed);
    const std::string release = m_.driver_release.empty() ? "" : " (release " + m_.driver_release + ")";
    const std::string wanted = "a driver for CUDA " + needed + " or later";
    if (m_.nvml_mismatch || d.error == ops::kCudaDriverMismatch) {
      fail("driver", "the driver's library and its kernel module are of different releases" + release, "both of one release",
           "after a driver update, restart the machine, or stop what uses the cards and reload the module (rmmod nvidia_uvm nvidia; "
           "modprobe nvidia)",
           true);
      return false;
    }
    if (d.driver_version == 0 && !m_.nvidia_hardware) {
      if (o_.needs_card)
        fail("driver", "no NVIDIA driver, and no NVIDIA card on the bus", "a card of compute capability 8.0 or later, and " + wanted,
             "serve on a machine with a card, or small models with --device cpu");
      else
        warn("driver", "no NVIDIA driver, and no NVIDIA card on the bus", "a card, for any but small models",
             "none needed where --device cpu is meant; else serve on a machine with a card");
      return false;
    }
    if (d.driver_version == 0) {
      fail("driver", "an NVIDIA card is there, but no driver answers" + release, wanted,
           "install the NVIDIA driver; in a container, start it with the cards (--gpus all)");
      return false;
    }
    const Status status = check_driver(d);
    const std::string found = "CUDA " + ops::cuda_version_text(d.driver_version) + release;
    if (status.ok()) {
      ok("driver", fmt::format("{}, {} card{}", found, d.cards, d.cards == 1 ? "" : "s"));
      return true;
    }
    if (d.driver_version / 1000 < d.needed_version / 1000) fail("driver", found, wanted, "update the driver, then restart the machine");
    else if (status.code() == Code::kTemporary)
      fail("driver", found + ", which does not answer properly yet: " + d.error_text, "a driver that answers",
           "wait until the cards are attached; after a driver update restart the machine", true);
    else
      fail("driver", found + ", which shows no card" + (d.error_text.empty() ? "" : ": " + d.error_text),
           "a card of compute capability 8.0 or later",
           "check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, that the cards are given to it");
    return false;
  }

  void blas() {
    const int major = m_.driver.needed_version / 1000;
    const std::string wanted = fmt::format("libcublasLt.so.{}", major);
    const std::string slower = "without it long prompts are read more slowly; answers are the same";
    const std::string cure = fmt::format(
        "install cuBLAS {0} (the package libcublas-{0}-0, or pip's nvidia-cublas) where the loader finds it (ldconfig, LD_LIBRARY_PATH)",
        major);
    const int made_for = m_.blas.cuda > 0 ? m_.blas.cuda / 1000 : m_.blas.version / 10000;
    if (!m_.blas.file.empty() && made_for == major) ok("cublasLt", fmt::format("{} ({})", library_version(m_.blas.version), m_.blas.file));
    else if (!m_.blas.file.empty())
      warn("cublasLt", fmt::format("{} is {} for CUDA {}", m_.blas.file, library_version(m_.blas.version), made_for),
           fmt::format("{} of major {}; {}", wanted, major, slower), cure);
    else if (!m_.blas.other.empty()) warn("cublasLt", m_.blas.other + ", which is of another major", wanted + "; " + slower, cure);
    else warn("cublasLt", "not found", wanted + "; " + slower, cure);
  }

  void nccl() {
    const char* const cure = "install NCCL 2.18 or later (the package libnccl2) where the loader finds it";
    if (m_.nccl.file.empty()) warn("nccl", "not found", "libnccl.so.2, to serve one model on several cards; one card needs none", cure);
    else if (m_.nccl.version < kNcclLeast) warn("nccl", library_version(m_.nccl.version), "2.18 or later", cure);
    else ok("nccl", fmt::format("{} ({})", library_version(m_.nccl.version), m_.nccl.file));
  }

  void cards() {
    if (m_.cards.empty() && m_.driver.cards > 0)
      warn("cards",
           fmt::format("{} by the driver; NVML tells nothing about them: {}", m_.driver.cards,
                       m_.nvml_error.empty() ? "no library" : m_.nvml_error),
           "libnvidia-ml.so.1", "install the driver's NVML library (it comes with nvidia-smi)");
    for (const CardFacts& c : m_.cards) card(c);
  }

  void card(const CardFacts& c) {
    const std::string name = fmt::format("card {}", c.index);
    if (c.major > 0)
      if (const Status s = ops::check_card(c.index, c.name, c.major, c.minor, true); !s.ok()) {
        fail(name, fmt::format("{}, compute capability {}.{}", c.name, c.major, c.minor),
             "8.0 or later (A100, A6000, L40, H100, H200, RTX PRO 6000 …)",
             "serve on another card: --device cuda:N, or CUDA_VISIBLE_DEVICES");
        return;
      }
    std::string about = fmt::format("{}, {:.0f} MiB, {:.0f} free", c.name, static_cast<double>(c.memory_bytes) / kMiB,
                                    static_cast<double>(c.free_bytes) / kMiB);
    if (c.sm_max_mhz > 0)
      about += fmt::format("; clocks {} of {} MHz, memory {} of {}", c.sm_mhz, c.sm_max_mhz, c.memory_mhz, c.memory_max_mhz);
    if (c.celsius > 0) about += fmt::format("; {} °C", c.celsius);
    ok(name, about);
    if (c.mig)
      warn(name, "MIG is on: a process sees one slice", "the whole card, for the speed that is published",
           "nvidia-smi -mig 0, where the card is yours alone");
    std::string holders;
    for (const CardFacts::Process& p : c.processes)
      holders += fmt::format("{}{} ({}{})", holders.empty() ? "" : ", ", p.name.empty() ? "a process" : p.name, p.pid,
                             p.bytes >= 0 ? fmt::format(", {:.0f} MiB", static_cast<double>(p.bytes) / kMiB) : "");
    if (!holders.empty())
      warn(name, "used already by " + holders, "a card of its own: what they hold, the KV pool cannot have",
           "stop them, or choose another card (--device cuda:N)");
    else if (c.memory_bytes > 0 && c.memory_bytes - c.free_bytes > c.memory_bytes / 20 + (int64_t{512} << 20))
      warn(name,
           fmt::format("{:.0f} MiB are taken by processes that cannot be seen from here",
                       static_cast<double>(c.memory_bytes - c.free_bytes) / kMiB),
           "a card of its own", "look outside this container: nvidia-smi on the host");
    if (c.link_width > 0 && c.link_max_width > 0) {
      if (c.link_width < c.link_max_width)
        warn(name, fmt::format("PCIe x{} (generation {})", c.link_width, c.link_generation),
             fmt::format("x{}: loading takes {} times as long", c.link_max_width, c.link_max_width / std::max(c.link_width, 1)),
             "seat the card in a full slot, look at risers and at the board's lane sharing");
      else
        // Cards lower the generation while idle: no sign of anything.
        ok(name, fmt::format("PCIe x{}, generation {} of {}{}", c.link_width, c.link_generation, c.link_max_generation,
                             c.link_generation < c.link_max_generation ? " (lower while idle)" : ""));
    }
    if (c.persistence == 0)
      warn(name, "persistence mode is off", "on: else the driver lets the card go when nobody uses it, and each start waits seconds for it",
           "nvidia-smi -pm 1, or systemctl enable --now nvidia-persistenced");
    if (c.remapping_failed) fail(name, "memory rows could not be remapped", "a card without broken rows", "have the card replaced");
    else if (c.remapping_pending)
      warn(name, "broken memory rows wait to be remapped", "none", "reset the card (nvidia-smi -r) or restart the machine");
    if (c.uncorrected_errors > 0)
      warn(name, fmt::format("{} uncorrected memory errors since the driver was loaded", c.uncorrected_errors),
           "none: answers may be wrong", "dmesg | grep -i xid; reset the card (nvidia-smi -r), and have it replaced if they come again");
  }

  void peers() {
    std::string missing;
    bool known = false;
    for (size_t i = 0; i < m_.peers.size(); ++i)
      for (size_t j = i + 1; j < m_.peers[i].size(); ++j) {
        known |= m_.peers[i][j] >= 0;
        if (m_.peers[i][j] == 0) missing += fmt::format("{}{}-{}", missing.empty() ? "" : ", ", m_.cards[i].index, m_.cards[j].index);
      }
    if (!missing.empty())
      warn("p2p", "no direct access between cards " + missing, "all pairs, for one model on several cards",
           "look at nvidia-smi topo -p2p r; IOMMU and ACS of the board's BIOS are the usual reasons; NCCL_P2P_DISABLE=1 works meanwhile, "
           "more slowly");
    else if (known) ok("p2p", fmt::format("all {} cards reach each other directly", m_.cards.size()));
  }

  void cpu() {
    const std::string about = fmt::format("{} cores, {} of {} memory available", m_.cores, gib(m_.ram_available), gib(m_.ram_bytes));
    if (m_.governor == "powersave" || m_.governor == "conservative")
      warn("cpu", about + "; governor " + m_.governor,
           "performance, where the driver is not intel_pstate or amd_pstate: a slow core adds to every round",
           "cpupower frequency-set -g performance");
    else ok("cpu", about + (m_.governor.empty() ? "" : "; governor " + m_.governor));
  }

  void limits() {
    const auto text = [](int64_t n) { return n < 0 ? std::string("unlimited") : std::to_string(n); };
    // serve raises the soft limit to the hard one by itself.
    const int64_t files = m_.files_hard < 0 ? -1 : std::max(m_.files, m_.files_hard);
    if (files >= 0 && files < kFilesWanted)
      warn("limits", "open files: " + text(files), fmt::format("{} or more: each stream is one", kFilesWanted),
           "LimitNOFILE=65536 in the unit, or ulimit -n");
    else ok("limits", "open files: " + text(files));
    if (m_.cards.size() > 1 && m_.memlock >= 0 && m_.memlock < (int64_t{64} << 20))
      warn("limits", fmt::format("locked memory: {} KiB", m_.memlock >> 10), "unlimited: collectives over InfiniBand lock memory",
           "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited");
    if (m_.cards.size() > 1) {
      if (m_.shm_bytes >= 0 && m_.shm_bytes < kShmWanted)
        warn("shm", fmt::format("/dev/shm has {:.0f} MiB", static_cast<double>(m_.shm_bytes) / kMiB),
             "1 GiB or more: collectives between cards use it",
             "mount -o remount,size=1G /dev/shm; in a container --shm-size=1g or --ipc=host");
      else if (m_.shm_bytes >= 0) ok("shm", "/dev/shm has " + gib(m_.shm_bytes));
    }
  }

  void disks() {
    for (const DiskFacts& d : m_.disks) {
      const std::string check = "disk (" + d.what + ")";
      if (d.free_bytes < 0) warn(check, d.path + ": " + d.error, "a folder that can be read", "give another path, or make it readable");
      else if (d.what == "history" && d.free_bytes < kHistoryWanted)
        warn(check, fmt::format("{}: {:.0f} MiB free", d.path, static_cast<double>(d.free_bytes) / kMiB),
             "1 GiB or more: a full disk stops the history, not the answers",
             "make room, set --retain-size, or put it elsewhere with --db");
      else ok(check, d.path + ": " + gib(d.free_bytes) + " free");
    }
  }

  void unit() {
    const Machine::Unit& u = m_.unit;
    if (u.name.empty()) return;
    std::string found = u.name + " is " + u.active;
    if (u.restarts > 0) found += fmt::format(", restarted {} times", u.restarts);
    if (u.active == "failed")
      fail("unit", found + fmt::format(" ({}, status {})", u.result, u.exit_status), "active",
           fmt::format("journalctl -u {} -n 50 says why; the exit code's meaning is in docs/install.md", u.name));
    else if (u.notify != "notify" && u.notify != "notify-reload" && !u.notify.empty())
      warn("unit", found + ", Type=" + u.notify, "Type=notify: else it counts as started before the model answers",
           "ddtree install writes such a unit");
    else if (u.restarts > 3) warn("unit", found, "no restarts", fmt::format("journalctl -u {} says why", u.name));
    else ok("unit", found);
  }

  const Machine& m_;
  const DoctorOptions& o_;
  std::vector<DoctorLine> out_;
};

}  // namespace

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk: return "ok";
    case Verdict::kWarn: return "warn";
    case Verdict::kFail: return "fail";
  }
  return "?";
}

std::vector<DoctorLine> examine(const Machine& machine, const DoctorOptions& options) { return Examination(machine, options).run(); }

int exit_code_of(const std::vector<DoctorLine>& findings) {
  bool any = false, lasting = false;
  for (const DoctorLine& f : findings)
    if (f.verdict == Verdict::kFail) any = true, lasting |= !f.temporary;
  return !any ? 0 : exit_code(lasting ? Code::kUnavailable : Code::kTemporary);
}

}  // namespace ddtree
