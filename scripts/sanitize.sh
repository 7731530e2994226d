#!/usr/bin/env bash
# Runs tests under one of the compiler's sanitizers, which see what an assertion does not:
#
#   scripts/sanitize.sh address   reads and writes outside of what was allocated, or after it was freed; the whole workspace but examples in comments
#   scripts/sanitize.sh thread    data races; the tests of what runs on several threads: the pool, readers, experts, the cache, the engine, the server
#
# More arguments go to `cargo test` in place of the choice of tests: scripts/sanitize.sh address -p sluice-store --test store readers
#
# Sanitizers are switches that stable compilers keep locked; RUSTC_BOOTSTRAP opens them. The thread sanitizer must see the standard
# library's own locks, or it takes what they order for races (111 in the readers' tests, all false), so the library is built anew: from the
# toolchain's component `rust-src`, which is installed where it is missing; RUSTC may name another compiler that has it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh kill=procps
[ -d "${CARGO_HOME:-$HOME/.cargo}/bin" ] && PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"

say() { printf 'sanitize: %s\n' "$*" >&2; }
kind=${1:-address}
[ $# -eq 0 ] || shift
target=x86_64-unknown-linux-gnu
options=()
export RUSTC_BOOTSTRAP=1
# Faults are tests' business: what handles SIGBUS here puts zeros in place of pages that are gone.
common=handle_sigbus=0

case $kind in
  address)
    flags=-Zsanitizer=address
    # Leaks are no errors: nodes of the fault handler are never freed, nor what a killed thread held.
    export ASAN_OPTIONS="$common:detect_leaks=0:allow_user_segv_handler=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
    ;;
  thread)
    flags=-Zsanitizer=thread
    library="$("${RUSTC:-rustc}" --print sysroot)/lib/rustlib/src/rust/library/Cargo.lock"
    if [ ! -e "$library" ] && command -v rustup >/dev/null; then
      say "installing rust-src"
      timeout 120 rustup component add rust-src >&2 || true
    fi
    if [ ! -e "$library" ]; then
      say "the component rust-src cannot be had: no thread sanitizer (without it every lock of the standard library looks like a race)"
      exit 3
    fi
    options+=(-Zbuild-std)
    export TSAN_OPTIONS="$common:suppressions=$PWD/scripts/tsan.txt${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
    ;;
  *) say "address or thread, not $kind"; exit 2 ;;
esac

export RUSTFLAGS="$flags${RUSTFLAGS:+ $RUSTFLAGS}"
run() { cargo test "${options[@]}" --profile quick --locked --target "$target" --target-dir "target/${kind:0:1}san" "$@"; }
if [ $# -gt 0 ]; then
  run "$@"
elif [ "$kind" = address ]; then
  # Under a sanitizer a program holds far more than it does otherwise: what `crates/cli/tests/program/budget.rs` measures is left out, and templates that take all
  # memory which their limit allows.
  left_out=(--skip want_all_memory)
  for test in $(sed -n 's/^fn \(.*\)() {$/\1/p' crates/cli/tests/program/budget.rs); do left_out+=(--skip "$test"); done
  run --workspace --lib --bins --tests -- "${left_out[@]}"
else
  # Of the engine only what has threads: a template's depth, which its own tests go to the end of, takes more stack here than there is.
  run -p sluice-cpu -p sluice-store -p sluice-experts --lib --test schedules
  run -p sluice-store --test store readers
  # One test at a time: rustix maps and unmaps memory by system calls of its own, so that addresses which a test gave back would look shared with the test that gets them.
  export RUST_TEST_THREADS=1
  run -p sluice-cache -p sluice-server --lib --tests
  run -p sluice-engine --test engine -- streaming exactness
fi
say "$kind: nothing found"
