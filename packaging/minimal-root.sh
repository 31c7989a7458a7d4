#!/usr/bin/env bash
# Makes a minimal Debian 12 root from this machine's own mirror: packaging/minimal-root.sh FOLDER [PACKAGE,PACKAGE…]
# Runs as root (debootstrap needs it). Its output goes to FOLDER.log.
set -euo pipefail
folder=${1:?minimal-root.sh FOLDER [PACKAGES]} packages=${2:-}
[ "$(id -u)" = 0 ] || { echo "minimal-root: needs root" >&2; exit 64; }
command -v debootstrap >/dev/null || { echo "minimal-root: needs the package debootstrap" >&2; exit 69; }
# The machine's own suite, not its security companion.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v -e security | head -1)
[ -n "$mirror" ] || { echo "minimal-root: apt names no mirror (is there a 'deb' line, and were its lists read?)" >&2; exit 69; }
mkdir -p "$(dirname "$folder")"
debootstrap --variant=minbase ${packages:+--include=$packages} bookworm "$folder" "$mirror" >"$folder.log" 2>&1 || { tail "$folder.log" >&2; exit 1; }
