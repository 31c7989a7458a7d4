#!/usr/bin/env bash
# Formatting, file lengths and the floors' order; clang-tidy too unless --fast (it takes minutes).
set -euo pipefail
cd "$(dirname "$0")/.."
bad=0
complain() { echo "lint: $*" >&2; bad=1; }

sources=$(git ls-files "src/*" "kernels/*" "tests/*" | grep -E "\.(cpp|h|cu|cuh)$" || true)
if command -v clang-format >/dev/null; then
  for f in $sources; do clang-format --dry-run -Werror "$f" >/dev/null 2>&1 || complain "$f is not formatted: ./dev fmt"; done
fi

# Merged into another checkout, a tracked .deps takes the place of its dependencies.
[ -z "$(git ls-files .deps)" ] || complain ".deps is tracked: git rm --cached .deps"

# Lengths: a file past these wants a second room.
while read -r lines f; do
  case "$f" in
    total) ;;
    src/*.h | *.cuh) [ "$lines" -le 250 ] || complain "$f has $lines lines; headers stay under 250" ;;
    *) [ "$lines" -le 800 ] || complain "$f has $lines lines; sources stay under 800" ;;
  esac
done < <({ echo "$sources"; git ls-files 'web/src/*' | grep -E '\.(ts|tsx|css)$' || true; } | xargs wc -l)

# A lower floor never includes a higher one.
declare -A rank=([base]=0 [text]=1 [model]=1 [ops]=2 [nn]=3 [spec]=3 [engine]=4 [store]=5 [health]=6 [server]=7 [cli]=8)
for f in $(git ls-files 'src/*' | grep -E '\.(cpp|h)$'); do
  floor=$(cut -d/ -f2 <<<"$f")
  while read -r other; do
    [ -n "${rank[$other]:-}" ] || continue
    [ "${rank[$other]}" -lt "${rank[$floor]}" ] || [ "$other" = "$floor" ] || complain "$f ($floor) includes $other/, which is not below it"
  done < <(sed -nE 's/^#include "([a-z]+)\/.*/\1/p' "$f")
done

if [ "${1:-}" != --fast ] && command -v clang-tidy >/dev/null; then
  folder=build
  [ -f $folder/compile_commands.json ] || { echo "lint: no $folder/compile_commands.json; ./dev build first" >&2; exit 1; }
  git ls-files 'src/*.cpp' | xargs -P "$(nproc)" -n 4 clang-tidy -p $folder --quiet 2>/dev/null | grep -E 'warning:|error:' | sort -u | tee /tmp/ddtree-tidy.$$ || true
  [ -s /tmp/ddtree-tidy.$$ ] && complain "clang-tidy has findings"
  rm -f /tmp/ddtree-tidy.$$
fi
[ $bad = 0 ] && echo "lint: ok"
exit $bad
