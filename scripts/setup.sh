#!/usr/bin/env bash
# Installs what building Sluice needs and this machine lacks: a C linker, and the Rust toolchain that rust-toolchain.toml names.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
apt_updated=
install_packages() {
  command -v apt-get >/dev/null || { say "please install: $*"; exit 1; }
  say "installing $* (apt)"
  [ -n "$apt_updated" ] || as_root apt-get update -qq
  apt_updated=1
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

command -v cc >/dev/null || install_packages gcc libc6-dev

# rustup keeps its toolchains under RUSTUP_HOME, wherever HOME points.
[ -d "${CARGO_HOME:-$HOME/.cargo}/bin" ] && PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
if ! command -v cargo >/dev/null || ! cargo --version >/dev/null 2>&1; then
  if ! command -v rustup >/dev/null; then
    command -v curl >/dev/null || install_packages curl ca-certificates
    say "installing rustup"
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y -q --no-modify-path --default-toolchain none >&2
    PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
  fi
  wanted=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
  say "installing Rust $wanted"
  rustup toolchain install "$wanted" --profile minimal --component rustfmt --component clippy >&2
fi
cargo --version >&2
