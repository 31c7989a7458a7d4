// What `ddtree doctor` knows of this machine. The driver and NVML are opened by name, with prototypes written down here from their public
// documentation: the executable links neither and runs where neither is. Nothing here makes a CUDA context.
#include <dirent.h>
#include <dlfcn.h>
#include <fmt/core.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "health/doctor.h"
#ifdef DDTREE_HAS_CUDA
#include "ops/cuda/device.h"
#endif

namespace ddtree {
namespace {

namespace fs = std::filesystem;

class Library {
 public:
  explicit Library(const char* name) : handle_(dlopen(name, RTLD_LAZY | RTLD_LOCAL)) {
    if (handle_ == nullptr)
      if (const char* why = dlerror()) error_ = why;
  }
  // Never closed: drivers' libraries keep threads.
  bool ok() const { return handle_ != nullptr; }
  const std::string& error() const { return error_; }
  template <class F>
  F* get(const char* name) const {
    return ok() ? reinterpret_cast<F*>(dlsym(handle_, name)) : nullptr;
  }

 private:
  void* handle_;
  std::string error_;
};

std::string first_line(const fs::path& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

int64_t number_in(const fs::path& path) {
  const std::string text = first_line(path);
  return text.empty() ? -1 : std::strtoll(text.c_str(), nullptr, 0);
}

void probe_driver(Machine* m) {
  const Library cuda("libcuda.so.1");
  if (!cuda.ok()) return;
  int version = 0;
  // It answers without a kernel module too: a driver is one that starts.
  if (auto* get = cuda.get<int(int*)>("cuDriverGetVersion"); get == nullptr || get(&version) != 0) return;
  m->driver.driver_version = version;
  auto* init = cuda.get<int(unsigned)>("cuInit");
  int error = init != nullptr ? init(0) : -1;
  if (auto* count = cuda.get<int(int*)>("cuDeviceGetCount"); error == 0 && count != nullptr) error = count(&m->driver.cards);
  m->driver.error = error;
  if (error != 0) {
    const char* words = nullptr;
    if (auto* text = cuda.get<int(int, const char**)>("cuGetErrorString"); text != nullptr && text(error, &words) == 0 && words != nullptr)
      m->driver.error_text = words;
    if (m->driver.error_text.empty()) m->driver.error_text = fmt::format("error {}", error);
  }
}

// NVML's own numbers and structures (nvml.h's documentation).
constexpr int kNvmlMismatch = 18, kClockSm = 1, kClockMemory = 2, kUncorrected = 1, kVolatile = 0, kTemperatureGpu = 0;
struct NvmlMemory {
  unsigned long long total, free, used;
};
struct NvmlProcess {
  unsigned int pid;
  unsigned long long used;
  unsigned int gpu_instance, compute_instance;
};
using Device = void*;

int unsigned_of(const Library& nvml, const char* name, Device d) {
  unsigned int value = 0;
  auto* f = nvml.get<int(Device, unsigned int*)>(name);
  return f != nullptr && f(d, &value) == 0 ? static_cast<int>(value) : 0;
}
int clock_of(const Library& nvml, const char* name, Device d, int kind) {
  unsigned int value = 0;
  auto* f = nvml.get<int(Device, int, unsigned int*)>(name);
  return f != nullptr && f(d, kind, &value) == 0 ? static_cast<int>(value) : 0;
}

CardFacts probe_card(const Library& nvml, Device d, int index) {
  CardFacts c;
  c.index = index;
  char name[96] = "";
  if (auto* f = nvml.get<int(Device, char*, unsigned int)>("nvmlDeviceGetName"); f != nullptr && f(d, name, sizeof name) == 0)
    c.name = name;
  NvmlMemory memory{};
  if (auto* f = nvml.get<int(Device, NvmlMemory*)>("nvmlDeviceGetMemoryInfo"); f != nullptr && f(d, &memory) == 0)
    c.memory_bytes = static_cast<int64_t>(memory.total), c.free_bytes = static_cast<int64_t>(memory.free);
  if (auto* f = nvml.get<int(Device, int*, int*)>("nvmlDeviceGetCudaComputeCapability"); f == nullptr || f(d, &c.major, &c.minor) != 0)
    c.major = c.minor = 0;
  c.sm_mhz = clock_of(nvml, "nvmlDeviceGetClockInfo", d, kClockSm);
  c.sm_max_mhz = clock_of(nvml, "nvmlDeviceGetMaxClockInfo", d, kClockSm);
  c.memory_mhz = clock_of(nvml, "nvmlDeviceGetClockInfo", d, kClockMemory);
  c.memory_max_mhz = clock_of(nvml, "nvmlDeviceGetMaxClockInfo", d, kClockMemory);
  c.celsius = clock_of(nvml, "nvmlDeviceGetTemperature", d, kTemperatureGpu);
  c.link_width = unsigned_of(nvml, "nvmlDeviceGetCurrPcieLinkWidth", d);
  c.link_max_width = unsigned_of(nvml, "nvmlDeviceGetMaxPcieLinkWidth", d);
  c.link_generation = unsigned_of(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", d);
  c.link_max_generation = unsigned_of(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", d);
  int on = 0;
  if (auto* f = nvml.get<int(Device, int*)>("nvmlDeviceGetPersistenceMode"); f != nullptr && f(d, &on) == 0) c.persistence = on;
  unsigned long long errors = 0;
  if (auto* f = nvml.get<int(Device, int, int, unsigned long long*)>("nvmlDeviceGetTotalEccErrors");
      f != nullptr && f(d, kUncorrected, kVolatile, &errors) == 0)
    c.uncorrected_errors = static_cast<int64_t>(errors);
  unsigned int corrected = 0, uncorrected = 0, pending = 0, failed = 0;
  if (auto* f = nvml.get<int(Device, unsigned int*, unsigned int*, unsigned int*, unsigned int*)>("nvmlDeviceGetRemappedRows");
      f != nullptr && f(d, &corrected, &uncorrected, &pending, &failed) == 0)
    c.remapping_pending = pending != 0, c.remapping_failed = failed != 0;
  unsigned int mig = 0, mig_next = 0;
  if (auto* f = nvml.get<int(Device, unsigned int*, unsigned int*)>("nvmlDeviceGetMigMode"); f != nullptr && f(d, &mig, &mig_next) == 0)
    c.mig = mig != 0;
  NvmlProcess processes[64];
  unsigned int count = 64;
  if (auto* f = nvml.get<int(Device, unsigned int*, NvmlProcess*)>("nvmlDeviceGetComputeRunningProcesses_v3");
      f != nullptr && f(d, &count, processes) == 0)
    for (unsigned int i = 0; i < count; ++i)
      c.processes.push_back({processes[i].pid, processes[i].used == ~0ull ? -1 : static_cast<int64_t>(processes[i].used),
                             first_line(fmt::format("/proc/{}/comm", processes[i].pid))});
  return c;
}

void probe_cards(Machine* m) {
  const Library nvml("libnvidia-ml.so.1");
  auto* init = nvml.get<int()>("nvmlInit_v2");
  if (init == nullptr) {
    m->nvml_error = nvml.ok() ? "libnvidia-ml.so.1 has no nvmlInit_v2" : nvml.error();
    return;
  }
  if (const int error = init(); error != 0) {
    m->nvml_mismatch = error == kNvmlMismatch;
    auto* text = nvml.get<const char*(int)>("nvmlErrorString");
    m->nvml_error = text != nullptr ? text(error) : fmt::format("error {}", error);
    return;
  }
  char release[96] = "";
  if (auto* f = nvml.get<int(char*, unsigned int)>("nvmlSystemGetDriverVersion"); f != nullptr && f(release, sizeof release) == 0)
    m->driver_release = release;
  unsigned int count = 0;
  auto* get_count = nvml.get<int(unsigned int*)>("nvmlDeviceGetCount_v2");
  auto* get_device = nvml.get<int(unsigned int, Device*)>("nvmlDeviceGetHandleByIndex_v2");
  std::vector<Device> devices;
  if (get_count != nullptr && get_device != nullptr && get_count(&count) == 0)
    for (unsigned int i = 0; i < count; ++i)
      if (Device d = nullptr; get_device(i, &d) == 0) {
        m->cards.push_back(probe_card(nvml, d, static_cast<int>(i)));
        devices.push_back(d);
      }
  auto* peer = nvml.get<int(Device, Device, int, int*)>("nvmlDeviceGetP2PStatus");
  m->peers.assign(devices.size(), std::vector<int>(devices.size(), -1));
  for (size_t i = 0; i < devices.size(); ++i)
    for (size_t j = 0; j < devices.size(); ++j) {
      int read = 0, write = 0;
      if (i != j && peer != nullptr && peer(devices[i], devices[j], 0, &read) == 0 && peer(devices[i], devices[j], 1, &write) == 0)
        m->peers[i][j] = read == 0 && write == 0;
    }
  if (auto* shutdown = nvml.get<int()>("nvmlShutdown")) shutdown();
}

void probe_libraries(Machine* m) {
  const int major = m->driver.needed_version / 1000;
  const auto blas_name = [](int n) { return fmt::format("libcublasLt.so.{}", n); };
  for (const std::string& file : ops::cublas_lt_files(m->driver.needed_version)) {
    const Library blas(file.c_str());
    if (!blas.ok()) {
      if (m->blas.error.empty()) m->blas.error = blas.error();
      continue;
    }
    m->blas.file = file;
    if (auto* version = blas.get<size_t()>("cublasLtGetVersion")) m->blas.version = static_cast<int>(version());
    if (auto* cuda = blas.get<size_t()>("cublasLtGetCudartVersion")) m->blas.cuda = static_cast<int>(cuda());
    break;
  }
  if (m->blas.file.empty())
    for (int other = major + 2; other >= 10 && m->blas.other.empty(); --other)
      if (other != major && Library(blas_name(other).c_str()).ok()) m->blas.other = blas_name(other);
  if (m->cards.size() < 2) return;
  const Library nccl("libnccl.so.2");
  if (!nccl.ok()) m->nccl.error = nccl.error();
  else if (auto* version = nccl.get<int(int*)>("ncclGetVersion"); version != nullptr && version(&m->nccl.version) == 0)
    m->nccl.file = "libnccl.so.2";
}

// A card on the bus: NVIDIA's vendor id and a display or 3D controller's class.
bool nvidia_on_bus() {
  std::error_code error;
  for (fs::directory_iterator it("/sys/bus/pci/devices", error), end; !error && it != end; it.increment(error))
    if (number_in(it->path() / "vendor") == 0x10de && number_in(it->path() / "class") >> 16 == 0x03) return true;
  return false;
}

void probe_host(Machine* m) {
  m->cores = static_cast<int>(std::thread::hardware_concurrency());
  // Worse rules win: one slow core is enough to slow a round.
  for (int i = 0; i < m->cores; ++i) {
    const std::string folder = fmt::format("/sys/devices/system/cpu/cpu{}/cpufreq/", i), rule = first_line(folder + "scaling_governor");
    // With these drivers powersave is the ordinary rule, which goes up to full speed.
    const std::string driver = first_line(folder + "scaling_driver");
    const bool own = driver == "intel_pstate" || driver.rfind("amd-pstate", 0) == 0;
    if (m->governor.empty() || (rule == "powersave" && !own)) m->governor = own && rule == "powersave" ? "powersave of " + driver : rule;
  }
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    const auto bytes = [&] { return std::strtoll(line.c_str() + line.find(':') + 1, nullptr, 10) * 1024; };
    if (line.rfind("MemTotal:", 0) == 0) m->ram_bytes = bytes();
    if (line.rfind("MemAvailable:", 0) == 0) m->ram_available = bytes();
  }
  rlimit limit{};
  const auto value = [](rlim_t n) { return n == RLIM_INFINITY ? int64_t{-1} : static_cast<int64_t>(n); };
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0) m->memlock = value(limit.rlim_cur);
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) m->files = value(limit.rlim_cur), m->files_hard = value(limit.rlim_max);
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0) m->shm_bytes = static_cast<int64_t>(shm.f_blocks) * static_cast<int64_t>(shm.f_frsize);
  timex clock{};
  if (adjtimex(&clock) >= 0) m->clock_synchronised = (clock.status & STA_UNSYNC) == 0;
}

DiskFacts probe_disk(const std::string& what, const std::string& path) {
  DiskFacts d{what, path, -1, ""};
  // A folder that will be made: the nearest one above that is there.
  std::error_code error;
  fs::path there = fs::absolute(path, error);
  while (!fs::exists(there, error) && there.has_parent_path() && there.parent_path() != there) there = there.parent_path();
  struct statvfs info {};
  if (statvfs(there.c_str(), &info) != 0) d.error = std::strerror(errno);
  else d.free_bytes = static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
  return d;
}

void probe_unit(Machine* m, const std::string& unit) {
  std::error_code error;
  if (!fs::exists("/run/systemd/system", error)) return;
  // The name goes through a shell: letters that units have, and nothing else.
  if (unit.empty() || unit.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.@") != std::string::npos)
    return;
  std::FILE* pipe =
      popen(("systemctl show -p LoadState,ActiveState,Result,ExecMainStatus,NRestarts,Type -- " + unit + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return;
  std::map<std::string, std::string> values;
  char line[512];
  while (std::fgets(line, sizeof line, pipe) != nullptr) {
    std::string text(line);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    if (const size_t equals = text.find('='); equals != std::string::npos) values[text.substr(0, equals)] = text.substr(equals + 1);
  }
  pclose(pipe);
  if (values["LoadState"] != "loaded") return;
  m->unit = {
      unit, values["ActiveState"], values["Result"], values["ExecMainStatus"], values["Type"], std::atoi(values["NRestarts"].c_str())};
}

}  // namespace

Machine inspect_machine(const DoctorOptions& options) {
  Machine m;
#ifdef DDTREE_HAS_CUDA
  m.cuda_build = true;
  m.driver.needed_version = ops::cuda::built_for();
#endif
  m.nvidia_hardware = nvidia_on_bus();
  probe_driver(&m);
  if (m.cuda_build) {
    probe_cards(&m);
    probe_libraries(&m);
  }
  // A driver's library without a driver: a container that was started without the cards.
  std::error_code error;
  if (m.driver.error != 0 && !fs::exists("/proc/driver/nvidia/version", error) && !m.nvml_mismatch) m.driver.driver_version = 0;
  if (m.driver.cards > 0) m.nvidia_hardware = true;
  probe_host(&m);
  if (!options.store_path.empty()) m.disks.push_back(probe_disk("history", options.store_path));
  if (!options.model_path.empty()) m.disks.push_back(probe_disk("model", options.model_path));
  probe_unit(&m, options.unit);
  return m;
}

}  // namespace ddtree
