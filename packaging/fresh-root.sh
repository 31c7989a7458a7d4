#!/usr/bin/env bash
# Proves the README's two commands on a clean clone in a fresh Debian 12 root: nothing but debootstrap's minimum and git.
#
#   packaging/fresh-root.sh [FOLDER] [--keep]     FOLDER: where the root goes (default: a temporary one)
#
# Runs as root (debootstrap and chroot need it). The clone is of this checkout's HEAD, so commit first.
set -euo pipefail
cd "$(dirname "$0")/.."
keep=no folder=
for a in "$@"; do case "$a" in --keep) keep=yes ;; --help | -h) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;; *) folder=$a ;; esac; done
[ "$(id -u)" = 0 ] || { echo "fresh-root: needs root" >&2; exit 64; }
[ -n "$folder" ] || folder=$(mktemp -d /var/tmp/ddtree-fresh.XXXXXX)
cleanup() {
  for m in proc sys dev/shm dev; do umount -l "$folder/root/$m" 2>/dev/null || true; done
  [ $keep = yes ] || rm -rf "$folder"
}
trap cleanup EXIT
mkdir -p "$folder"
packaging/minimal-root.sh "$folder/root" git,ca-certificates
# What any machine has: its resolver, its proxy and apt settings if there are any, and npm's.
cp -L /etc/resolv.conf "$folder/root/etc/" 2>/dev/null || true
cp -rL /etc/apt/apt.conf.d/. "$folder/root/etc/apt/apt.conf.d/" 2>/dev/null || true
bundle=/etc/ssl/certs/ca-certificates.crt
if [ -f $bundle ]; then cp -L $bundle "$folder/root$bundle"; fi
for f in /root/.npmrc /etc/npmrc; do [ -f $f ] && cp -L $f "$folder/root/root/.npmrc"; done
mount -t proc proc "$folder/root/proc"
mount -t sysfs sys "$folder/root/sys" || true
mount --rbind /dev "$folder/root/dev"
git clone -q --no-hardlinks . "$folder/root/root/ddtree"
enter() { chroot "$folder/root" /usr/bin/env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM="${TERM:-dumb}" LANG=C.UTF-8 \
  ${http_proxy:+http_proxy=$http_proxy} ${https_proxy:+https_proxy=$https_proxy} ${NODE_EXTRA_CA_CERTS:+NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt} CI=true bash -c "$1"; }

echo "== ./dev serve"
enter 'cd /root/ddtree && ./dev serve --port 31999 >/tmp/serve.log 2>&1 & pid=$!
  for i in $(seq 3000); do if (exec 3<>/dev/tcp/127.0.0.1/31999) 2>/dev/null; then break; fi; kill -0 $pid 2>/dev/null || break; sleep 1; done
  for i in $(seq 60); do
    exec 3<>/dev/tcp/127.0.0.1/31999 && printf "GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" >&3 && head -1 <&3 | grep -q " 200 " && ready=yes && break
    sleep 1
  done
  tail -20 /tmp/serve.log; kill $pid 2>/dev/null; wait $pid; [ "${ready:-no}" = yes ]'
echo "== ldd"
enter 'ldd /root/ddtree/build/ddtree'
echo "== ./dev test"
enter 'cd /root/ddtree && ./dev test'
echo "fresh root: ok"
