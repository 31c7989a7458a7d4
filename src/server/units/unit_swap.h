// Replaces a unit file and brings the old one back: atomically, durably, and so that a kill at any moment loses nothing. The old unit is
// kept as FILE.before-ddtree: the same inode, so rights, owner, times and attributes stay as they were. systemd does not read that name.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"

namespace ddtree {

std::string unit_backup_path(const std::string& unit);    // FILE.before-ddtree
std::string unit_leftover_path(const std::string& unit);  // FILE.after-ddtree: the ddtree unit that a rollback put aside; later ones get a
                                                          // number: nothing is overwritten

// The first line of every unit that ddtree install writes begins like this: how its own files are told from others'.
inline constexpr const char* kInstalledUnitMark = "# Written by ddtree install";

// Called after each step that changes a folder, with its name; for tests that stop there.
using UnitSwapStep = std::function<void(const char* step)>;

// The file's text, for reading and for replace_unit to compare. kUsage: not there, a link (its target is named), no plain file, over 1 MiB.
Result<std::string> read_unit(const std::string& unit);

// Whether replace_unit would find the backup's name free (or an unfinished replacement of its own). kUsage: it is taken.
Status backup_free(const std::string& unit);

// Puts `text` into `unit`'s place with its rights and owner. `before`: what the new text was made from; anything else there now is refused.
// kUsage: a backup is there already (it is never overwritten); kUnavailable: what the system would not do. Where it fails, the old unit is
// in its place. A backup that is the unit itself is what a kill between two steps leaves; that is completed.
Status replace_unit(const std::string& unit, const std::string& before, const std::string& text, const UnitSwapStep& step = {});

// Writes a unit where none is. kUsage: there is a file of that name.
Status create_unit(const std::string& unit, const std::string& text, const UnitSwapStep& step = {});

struct UnitRollback {
  bool was_in_place = false;  // a kill had left the old unit in its place: only the backup's name went
  std::string leftover;       // where the unit that was replaced is now; empty: there was none
};
// Brings back FILE.before-ddtree. kUsage: there is none, or what stands in its place does not begin with kInstalledUnitMark.
Result<UnitRollback> rollback_unit(const std::string& unit, const UnitSwapStep& step = {});

}  // namespace ddtree
