#!/usr/bin/env bash
# What a newcomer on arm64 meets: ./demo and ./test in a small Debian for arm64, under qemu: scripts/root-arm64.sh COMMAND [ARGUMENT...]
#
#   make               makes the root: Debian's smallest with git, and a clone of this repository as it is committed. Some minutes, 400 MB
#   demo [ARGUMENT..]  ./demo there: it fetches what it needs, as on a new machine, and builds everything under emulation
#   test [ARGUMENT..]  ./test there
#   run COMMAND..      any other command, in the clone there
#
# Needs root on a Debian or Ubuntu, debootstrap and qemu-user-static (which it installs), and the network. The kernel is taught to run arm64 programs
# until this script ends. SLUICE_ARM64_ROOT names the root (target/arm64-root), SLUICE_ARM64_SUITE Debian's suite (trixie).
set -euo pipefail
cd "$(dirname "$0")/.."

root=${SLUICE_ARM64_ROOT:-$PWD/target/arm64-root}
suite=${SLUICE_ARM64_SUITE:-trixie}
clone=/root/sluice
# What tells programs how to reach the network here.
handed=(http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY PIP_INDEX_URL SLUICE_TEST_PROFILE CARGO_BUILD_JOBS)

say() { printf 'root-arm64: %s\n' "$*" >&2; }
die() { say "$*" && exit 1; }

# Tells the kernel to run arm64 programs under qemu. F: qemu is opened now, so that it is found in the root as well, where it is not.
teach_kernel() {
  local misc=/proc/sys/fs/binfmt_misc bytes='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  [ -e "$misc/register" ] || mount -t binfmt_misc none "$misc"
  printf '%s' ":sluice-root-$$:M:0:$bytes:$mask:$(command -v qemu-aarch64-static):F" >"$misc/register"
  trap 'echo -1 >/proc/sys/fs/binfmt_misc/sluice-root-$$' EXIT
}

# Mounts are seen by this script alone, and end with it.
attach() {
  local what
  for what in proc sys dev; do mount --rbind "/$what" "$root/$what"; done
  cp /etc/resolv.conf "$root/etc/resolv.conf"
}

# In the clone there, with nothing of this machine's environment but the way to the network.
inside() {
  local variables=() name
  for name in "${handed[@]}"; do [ -z "${!name:-}" ] || variables+=("$name=${!name}"); done
  chroot "$root" /usr/bin/env -i HOME=/root USER=root TERM=dumb LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    "${variables[@]}" /bin/bash -c 'cd "$0" 2>/dev/null || cd /; exec "$@"' "$clone" "$@"
}

make_root() {
  [ ! -e "$root$clone" ] || die "there is a root in $root already"
  mkdir -p "$root"
  if [ ! -e "$root/is-whole" ]; then
    say "making a root of Debian's $suite for arm64 in $root"
    debootstrap --arch=arm64 --variant=minbase --include=git,ca-certificates --foreign "$suite" "$root" >"$root.log"
    chroot "$root" /debootstrap/debootstrap --second-stage >>"$root.log"
    # Whom this machine trusts beyond Debian's list.
    cp -r /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates"
    chroot "$root" update-ca-certificates >>"$root.log" 2>&1
    touch "$root/is-whole"
  fi
  git clone -q . "$root$clone"
}

command=${1:-}
[ $# = 0 ] || shift
case $command in
  make | demo | test | run)
    [ "$(id -u)" = 0 ] || die "needs root: a root of its own, and a kernel that runs arm64 programs"
    command -v debootstrap qemu-aarch64-static >/dev/null || apt-get install -y -qq --no-install-recommends debootstrap qemu-user-static >/dev/null
    [ -n "${SLUICE_ARM64_APART:-}" ] || SLUICE_ARM64_APART=1 exec unshare --mount "$0" "$command" "$@"
    teach_kernel
    ;;
  *)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit 2
    ;;
esac
[ "$command" != make ] && [ -e "$root$clone" ] || make_root
[ "$command" = make ] || attach
case $command in
  make) ;;
  run) inside "$@" ;;
  *) inside "./$command" "$@" ;;
esac
