#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <system_error>

#include "base/status.h"
#include "cli/command.h"

namespace ddtree::cli {

std::vector<Command>& commands() {
  static std::vector<Command> all;
  return all;
}

// Output that never arrived is no success, whatever the command: a script would go on with half a file.
static int written(const char* command, int (*run)(int, char**), int argc, char** argv) {
  try {
    const int code = run(argc, argv);
    std::cout.flush();
    if ((std::fflush(stdout) == 0 && !std::ferror(stdout) && std::cout.good()) || code != 0) return code;
  } catch (const std::system_error&) {
    // fmt::print: more was written than stdio's buffer holds.
    if (!std::ferror(stdout)) throw;
  }
  std::fprintf(stderr, "ddtree %s: the output could not be written: standard output is closed, or its disk is full\n", command);
  return exit_code(Code::kUnavailable);
}

}  // namespace ddtree::cli

int main(int argc, char** argv) {
  auto& all = ddtree::cli::commands();
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return std::strcmp(a.name, b.name) < 0; });
  const auto help = [&](FILE* out) {
    std::fprintf(out, "ddtree %s: serves Qwen3.5-family models with draft trees over the OpenAI API\n\nusage: ddtree COMMAND [options]\n\n",
                 DDTREE_VERSION);
    for (const auto& c : all) std::fprintf(out, "  %-12s %s\n", c.name, c.summary);
    std::fprintf(out, "\nddtree COMMAND --help says more.\n");
  };
  if (argc >= 2 && (!std::strcmp(argv[1], "--help") || !std::strcmp(argv[1], "-h") || !std::strcmp(argv[1], "help")))
    return help(stdout), 0;
  if (argc >= 2 && (!std::strcmp(argv[1], "--version") || !std::strcmp(argv[1], "version")))
    return std::printf("ddtree %s\n", DDTREE_VERSION), 0;
  if (argc < 2) return help(stderr), 64;
  for (const auto& c : all)
    if (!std::strcmp(c.name, argv[1])) return ddtree::cli::written(c.name, c.run, argc - 1, argv + 1);
  std::fprintf(stderr, "ddtree: no command '%s'; ddtree --help lists them\n", argv[1]);
  return 64;
}
