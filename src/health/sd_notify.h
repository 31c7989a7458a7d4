// systemd's notification protocol: one datagram to $NOTIFY_SOCKET. Without that variable nothing is sent.
#pragma once

#include <string>

namespace ddtree {

// "READY=1", "STATUS=loading weights", "STOPPING=1", several separated by newlines. False where nobody listens.
bool sd_notify(const std::string& state);

}  // namespace ddtree
