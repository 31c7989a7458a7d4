#!/usr/bin/env bash
# Makes the .deb and the tarball of a built executable.
#
#   packaging/package.sh [--binary FILE] [--out FOLDER] [--revision WORD] [--fast]
#
#   --binary FILE    the executable (default: build-package/ddtree, which ./dev package makes)
#   --out FOLDER     where they go (default: build/packages)
#   --revision WORD  appended to the version, as in 0.1.0+WORD: a rebuild of the same source
#   --fast           quick compression, for tests
#
# The version is the executable's own, which is CMake's project version. Runs without root and without network.
set -euo pipefail
cd "$(dirname "$0")/.."
top=$PWD
binary=build-package/ddtree out=build/packages revision='' compress=(-Zxz) gzip=-9
while [ $# -gt 0 ]; do
  case "$1" in
    --binary) binary=${2:?--binary needs a file} && shift ;;
    --out) out=${2:?--out needs a folder} && shift ;;
    --revision) revision=${2:?--revision needs a word} && shift ;;
    --fast) compress=(-Zgzip -z1) gzip=-1 ;;
    --help | -h) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "package.sh: no option '$1' (--binary, --out, --revision, --fast)" >&2; exit 64 ;;
  esac
  shift
done
[ -x "$binary" ] || { echo "package.sh: $binary is not there: ./dev package builds it, or name one with --binary" >&2; exit 66; }
[[ $revision =~ ^[A-Za-z0-9.~]*$ ]] || { echo "package.sh: --revision $revision: letters, digits, '.' and '~' only" >&2; exit 64; }
version=$("$binary" --version)
version=${version#ddtree }
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || { echo "package.sh: $binary says it is version '$version', not N.N.N" >&2; exit 65; }
version=$version${revision:++$revision}
arch=$(dpkg --print-architecture)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y "$binary")}
umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
doc=$root/usr/share/doc/ddtree

# --- the files -----------------------------------------------------------------------------------------------------------------
install -D -m 755 "$binary" "$root/usr/bin/ddtree"
strip --strip-unneeded "$root/usr/bin/ddtree"
for unit in ddtree.service ddtree@.service; do install -D -m 644 packaging/systemd/ddtree.service "$root/usr/lib/systemd/system/$unit"; done
install -D -m 644 packaging/default/ddtree "$root/etc/default/ddtree"
install -D -m 644 -t "$doc" docs/*.md

# The licence, and those of what is linked in. A copyright file that is missing is an error: they must go along.
licences=$doc/third-party
mkdir -p "$licences"
licence() { [ -s "$2" ] || { echo "package.sh: the licence of $1 is not at $2" >&2; exit 66; }; install -m 644 "$2" "$licences/$1"; }
for p in nlohmann-json3-dev libsqlite3-dev libspdlog-dev libfmt-dev libpcre2-dev libutf8proc-dev libcli11-dev; do licence "$p" "/usr/share/doc/$p/copyright"; done
for p in preact @preact/signals @preact/signals-core uplot; do licence "$(tr / - <<<"${p#@}")" "web/node_modules/$p/LICENSE"; done
tar -xOf "$top"/.deps/apt-trixie/cpp-httplib_*.orig.tar.* --wildcards '*/LICENSE' >"$work/httplib"
licence cpp-httplib "$work/httplib"
licence gcc-runtime "/usr/share/doc/gcc-$(g++ -dumpversion | cut -d. -f1)-base/copyright"
{
  printf 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: ddtree\n\n'
  printf 'Files: *\nCopyright: the ddtree authors\nLicense: Apache-2.0\n'
  printf ' On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.\n\n'
  printf 'Comment: libraries linked into /usr/bin/ddtree keep their own licences: see third-party/ beside this file.\n'
} >"$doc/copyright"

# The manual page comes from the help texts, so that neither can be older than the other.
roff() { sed -e 's/\\/\\e/g' -e "s/^\([.']\)/\\\\\&\1/" -e 's/-/\\-/g'; }
man=$work/ddtree.1
{
  printf '.TH DDTREE 1 "%s" "ddtree %s"\n.SH NAME\nddtree \\- OpenAI\\-compatible server with draft trees\n' "$(date -u -d "@$SOURCE_DATE_EPOCH" +%F)" "$version"
  printf '.SH SYNOPSIS\n.B ddtree\n.I COMMAND\n[options]\n.SH COMMANDS\n.nf\n'
  "$binary" --help | sed -n '/^  /p' | roff
  for command in $("$binary" --help | sed -n 's/^  \([a-z]*\) .*/\1/p'); do
    printf '.fi\n.SH DDTREE %s\n.nf\n' "${command^^}"
    "$binary" "$command" --help | roff
  done
  printf '.fi\n.SH FILES\n.TP\n/etc/default/ddtree\nflags of the unit ddtree.service; /etc/default/ddtree@NAME of ddtree@NAME.service\n'
  printf '.TP\n/var/lib/ddtree/ddtree.db\nthe history (SQLite)\n.TP\n/usr/share/doc/ddtree/install.md\ninstalling, moving from SGLang, going back\n'
} >"$man"
gzip -9nc "$man" | install -D -m 644 /dev/stdin "$root/usr/share/man/man1/ddtree.1.gz"

# --- the .deb --------------------------------------------------------------------------------------------------------------------
control=$root/DEBIAN
mkdir -p "$control" "$work/debian"
for script in postinst prerm postrm; do install -m 755 "packaging/debian/$script" "$control/$script"; done
echo /etc/default/ddtree >"$control/conffiles"
# What the loader needs, from the executable's own symbol versions. dpkg-shlibdeps insists on a source package around it.
printf 'Source: ddtree\n\nPackage: ddtree\nArchitecture: any\n' >"$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O -e"$root/usr/bin/ddtree" 2>/dev/null | sed -n 's/^shlibs:Depends=//p')
[ -n "$depends" ] || { echo "package.sh: dpkg-shlibdeps says nothing about $binary" >&2; exit 70; }
cat >"$control/control" <<CONTROL
Package: ddtree
Version: $version
Architecture: $arch
Maintainer: ${DEBFULLNAME:-ddtree packagers} <${DEBEMAIL:-packagers@ddtree.invalid}>
Depends: $depends, passwd
Suggests: systemd, nvidia-modprobe
Section: net
Priority: optional
Installed-Size: $(du -k --apparent-size -s --exclude=DEBIAN "$root" | cut -f1)
Description: OpenAI-compatible server with draft trees
 Serves Qwen3.5-family models several times faster than token by token: a DFlash
 drafter proposes, a draft tree (DDTree) is verified in one pass, and the text is
 the target's own. Ready only when it has answered, and answered sense; a
 dashboard and the history of every start and request are in the same executable.
 .
 No Python, no GPU needed for the embedded demo pair. CUDA is found at run time.
CONTROL
(cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum) >"$control/md5sums"
mkdir -p "$out"
out=$(cd "$out" && pwd)
dpkg-deb --root-owner-group "${compress[@]}" --build "$root" "$out/ddtree_${version}_$arch.deb" >/dev/null

# --- the tarball -----------------------------------------------------------------------------------------------------------------
name=ddtree-$version-linux-$(uname -m)
flat=$work/$name
install -D -m 755 "$root/usr/bin/ddtree" "$flat/bin/ddtree"
install -D -m 644 packaging/systemd/ddtree.service "$flat/systemd/ddtree.service"
install -D -m 644 packaging/default/ddtree "$flat/default/ddtree"
install -D -m 644 "$man" "$flat/man/ddtree.1"
install -m 644 docs/install.md "$flat/INSTALL.md"
install -m 644 LICENSE "$flat/LICENSE"
cp -r "$licences" "$flat/third-party"
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -cf - "$name" | gzip "$gzip" -n >"$out/$name.tar.gz"
du -b "$out/ddtree_${version}_$arch.deb" "$out/$name.tar.gz" | awk '{printf "%s, %.1f MB\n", $2, $1 / 1e6}'
