# Sourced by ./demo, ./test and .ci/run, in the repository's root: installs what building Sluice needs and this machine lacks (a C linker, and the Rust
# toolchain that rust-toolchain.toml names), and puts cargo on PATH. Where that toolchain cannot be fetched, one that is here and new enough does.
# Needs bash and what every Debian or Ubuntu has; further programs are named by whoever sources it: `. scripts/setup.sh PROGRAM=PACKAGE...`.
# shellcheck shell=bash

say() { printf 'setup: %s\n' "$*" >&2; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

apt_updated=
install_packages() {
  if ! command -v apt-get >/dev/null || { [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; }; then
    say "please install: $*"
    exit 1
  fi
  say "installing $* (apt)"
  [ -n "$apt_updated" ] || as_root apt-get update -qq
  apt_updated=1
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# The version of a compiler, `1.95.0` also for a nightly of it; nothing where it does not run.
version_of() { "$@" --version 2>/dev/null | sed -n 's/^rustc \([0-9][0-9.]*\).*/\1/p'; }
is_enough() { [ -n "$1" ] && [ "$(printf '%s\n' "$least" "$1" | sort -V | head -n 1)" = "$least" ]; }

# Prints what is there, or why it cannot be had.
fetch_text() { curl --proto '=https' --tlsv1.2 --connect-timeout 20 -sSf "$1" 2>&1; }

# A toolchain that is here instead of the wanted one: of rustup, or a distribution's. 1: none is new enough.
use_another() {
  local name version folder
  if command -v rustup >/dev/null; then
    while read -r name _; do
      version=$(version_of rustup run "$name" rustc)
      if is_enough "$version"; then
        say "Rust $wanted cannot be fetched ($why): using Rust $version, which is here ($name)"
        export RUSTUP_TOOLCHAIN=$name
        return
      fi
    done < <(
      # Releases first; and asking must not begin to fetch.
      names=$(RUSTUP_AUTO_INSTALL=0 rustup toolchain list 2>/dev/null)
      grep -v nightly <<<"$names"
      grep nightly <<<"$names"
    )
  fi
  while read -r name; do
    folder=$(dirname "$name")
    # What rustup put there is rustup's name for all toolchains, and asked above.
    if [ -x "$folder/rustup" ]; then continue; fi
    version=$(version_of "$folder/rustc")
    if is_enough "$version"; then
      say "Rust $wanted cannot be fetched ($why): using Rust $version, which is here ($name)"
      export PATH="$folder:$PATH"
      return
    fi
  done < <(type -ap cargo)
  return 1
}

setup_rust() {
  local wanted least why version
  wanted=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
  least=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  # rustup keeps its toolchains under RUSTUP_HOME, wherever HOME points.
  export PATH="${CARGO_HOME:-${HOME:-/root}/.cargo}/bin:$PATH"

  # 1. what is here: what the user chose, what rust-toolchain.toml names, or a distribution's
  if command -v rustup >/dev/null; then
    [ -z "${RUSTUP_TOOLCHAIN:-}" ] || return 0
    rustup run "$wanted" rustc --version >/dev/null 2>&1 && return
  elif version=$(version_of rustc) && command -v cargo >/dev/null && is_enough "$version"; then
    [ "$version" = "$wanted" ] || say "using Rust $version, which is here ($(command -v cargo)), instead of $wanted"
    return
  fi

  # 2. the wanted one, from the network
  if ! command -v rustup >/dev/null; then
    command -v curl >/dev/null || install_packages curl ca-certificates
    say "installing rustup"
    # On success the installer, else why not. The second host has the same file, and the toolchains.
    if ! why=$(fetch_text https://sh.rustup.rs) && ! why=$(fetch_text https://static.rust-lang.org/rustup/rustup-init.sh); then
      use_another || no_rust
      return
    fi
    sh -s -- -y -q --no-modify-path --default-toolchain none <<<"$why" >&2
    hash -r
  fi
  say "installing Rust $wanted"
  why=$(rustup toolchain install "$wanted" --profile minimal --component rustfmt --component clippy 2>&1 >/dev/null) && return
  # Of rustup's error the cause, which comes last.
  why=$(printf '%s\n' "$why" | sed -n 's/^error: //p' | head -n 1 | sed -E 's/.*: ([^:]*: [^:]*)$/\1/')
  use_another || no_rust
}

# Makes the GPU's kernels where there is a GPU. Where that fails, the build goes on for the CPU alone.
setup_kernels() {
  if ! command -v nvidia-smi >/dev/null && [ ! -e /dev/nvidia0 ]; then return; fi
  command -v python3 >/dev/null || install_packages python3
  python3 -m pip --version >/dev/null 2>&1 || python3 -c 'import ensurepip' 2>/dev/null || install_packages python3-venv
  scripts/kernels --if-gpu >&2 || say "the GPU's kernels are not made: the program computes on the CPU alone"
}

# A place for the temporary files of compilers, pip and tests, which write some hundred megabytes.
setup_temporary() {
  local target=${CARGO_TARGET_DIR:-target} temporary=${TMPDIR:-/tmp} probe
  if ! mkdir -p "$target/tmp" 2>/dev/null || [ ! -w "$target/tmp" ]; then
    say "nothing can be written to $target: please set CARGO_TARGET_DIR to a folder of yours"
    exit 1
  fi
  if probe=$(mktemp 2>/dev/null) && rm "$probe" && [ "$(free_megabytes "$temporary")" -ge 512 ]; then return; fi
  export TMPDIR
  TMPDIR=$(cd "$target/tmp" && pwd)
  say "there is no room for temporary files in $temporary: they go to $TMPDIR"
}

# setup_room MEGABYTES: a word beforehand where a build from nothing, which takes so much, will not fit.
setup_room() {
  local target=${CARGO_TARGET_DIR:-target} free
  free=$(free_megabytes "$target")
  if [ "$free" -lt "$1" ] && ! compgen -G "$target/*/deps" >/dev/null; then
    say "there are $free MB free for $target, and a build from nothing takes about $1: it may stop with \"No space left on device\". CARGO_TARGET_DIR names another folder"
  fi
}

# Megabytes that can be written to a folder.
free_megabytes() { df -Pm "$1" | { read -r _ && read -r _ _ _ free _ && echo "$free"; }; }

no_rust() {
  say "Rust $wanted cannot be fetched ($why), and none that is here is new enough ($least): see https://rustup.rs"
  exit 1
}

setup_temporary
command -v cc >/dev/null || install_packages gcc libc6-dev
for needed in "$@"; do
  [ -n "$(type -P "${needed%%=*}")" ] || install_packages "${needed#*=}"
done
setup_rust
cargo --version >&2
