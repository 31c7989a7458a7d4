// systemd's notification protocol: one datagram to $NOTIFY_SOCKET. Without that variable nothing is sent.
#pragma once

#include <string>
#include <vector>

namespace ddtree {

// What is wrong with NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, a sentence each with name, value and what would be right: systemd sets
// them right, so somebody else did, and would wait in vain for READY=1 or WATCHDOG=1. Empty: nothing, also where none is set.
std::vector<std::string> notify_environment_troubles();

// "READY=1", "STATUS=loading weights", "STOPPING=1", several separated by newlines. False where nobody listens: `why`, unless null, says
// why where NOTIFY_SOCKET is set.
bool sd_notify(const std::string& state, std::string* why = nullptr);

}  // namespace ddtree
