// `ddtree doctor`: what a machine has, held against what serving needs. examine() is pure: tests feed it machines that never were.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "ops/driver.h"

namespace ddtree {

struct SharedLibrary {
  std::string file;   // that was opened; empty: none
  std::string error;  // the loader's words where none was
  int version = 0;    // as the library says: major·10000 + minor·100 + patch
  std::string other;  // a file of another major that is there
  int cuda = 0;       // CUDA it was made for, 13000 = 13.0; 0: it does not say
};

struct CardFacts {
  int index = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability; 0: unknown
  int64_t memory_bytes = 0, free_bytes = 0;
  int sm_mhz = 0, sm_max_mhz = 0, memory_mhz = 0, memory_max_mhz = 0, celsius = 0;  // 0: unknown
  int link_width = 0, link_max_width = 0, link_generation = 0, link_max_generation = 0;
  int persistence = -1;             // -1: unknown
  int64_t uncorrected_errors = -1;  // ECC, since the driver was loaded; -1: unknown or no ECC
  bool remapping_pending = false, remapping_failed = false, mig = false;
  struct Process {
    int64_t pid = 0, bytes = 0;  // bytes -1: the driver does not say
    std::string name;
  };
  std::vector<Process> processes;
};

struct DiskFacts {
  std::string what, path;  // "history", "model"
  int64_t free_bytes = -1;
  std::string error;  // why free_bytes is unknown
};

struct Machine {
  bool cuda_build = false;
  bool nvidia_hardware = false;  // a card on the PCI bus, whatever the driver says
  ops::DriverState driver;       // needed_version also for builds without CUDA: 0
  std::string driver_release;    // "580.65.06"; empty: unknown
  bool nvml_mismatch = false;    // library and kernel module of different releases
  std::string nvml_error;        // why cards are not known in detail
  SharedLibrary blas, nccl;
  std::vector<CardFacts> cards;
  std::vector<std::vector<int>> peers;  // [cards][cards] 1: direct, 0: not, -1: unknown
  int cores = 0;
  std::string governor;  // of the slowest rule among the cores; empty: the system does not scale
  int64_t ram_bytes = 0, ram_available = 0;
  int64_t memlock = -1, files = -1, files_hard = -1;  // limits; -1: none
  int64_t shm_bytes = -1;                             // of /dev/shm; -1: not there
  int clock_synchronised = -1;                        // -1: unknown
  std::vector<DiskFacts> disks;
  struct Unit {
    std::string name;  // empty: no systemd, or no such unit
    std::string active, result, exit_status, notify;
    int restarts = 0;
  } unit;
};

enum class Verdict : uint8_t { kOk, kWarn, kFail };
const char* verdict_name(Verdict verdict);  // "ok", "warn", "fail"

struct DoctorLine {
  std::string check;  // "driver", "card 0", "limits"
  Verdict verdict = Verdict::kOk;
  std::string found;       // what is there
  std::string wanted;      // what would be right; empty where it is
  std::string cure;        // what to do; never empty with kWarn and kFail
  bool temporary = false;  // a failure that passes, or that a restart of the machine mends
};

struct DoctorOptions {
  bool needs_card = false;  // --device cuda: without a usable card it is a failure, not a remark
  std::string store_path, model_path, unit = "ddtree.service";
};

std::vector<DoctorLine> examine(const Machine& machine, const DoctorOptions& options);
// 0: no failure; 75: every failure is temporary; else 69.
int exit_code_of(const std::vector<DoctorLine>& lines);

// Asks this machine: the driver and NVML through their libraries, the rest through /proc, /sys and systemctl. Never fails: what cannot be
// found out is unknown.
Machine inspect_machine(const DoctorOptions& options);

}  // namespace ddtree
