#!/usr/bin/env bash
# Fuzzes every place where Sluice reads what others wrote: scripts/fuzz.sh [SECONDS_FOR_EACH] [TARGET...]
#
# With libFuzzer, built from source by the stable toolchain: no nightly, no cargo-fuzz. Where it cannot be built (no C++ compiler, say) the seeds
# and random changes of them are tried instead, for the same time, by an ordinary test. What is found lies in target/fuzz/found.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-6}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=($(ls fuzz/seeds))

coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing"
# Long runs repay what the compiler takes.
speed=()
[ "$seconds" -lt 60 ] || speed=(--config profile.release.opt-level=3 --config profile.release.package.sluice-kernels.opt-level=3)
# A target is named, so that build scripts and macros go without.
host=$(rustc -vV | sed -n 's/^host: //p')
if ! (cd fuzz && RUSTFLAGS=$(echo $coverage) cargo build --release --locked "${speed[@]}" --target "$host" --target-dir ../target/fuzz); then
    echo "fuzz: libFuzzer cannot be built here; random changes of the seeds instead"
    for name in "${targets[@]}"; do
        SLUICE_FUZZ_TARGET=$name SLUICE_FUZZ_SECONDS=$seconds cargo test --profile quick --locked --workspace --test replay -- --nocapture
    done
    exit 0
fi

mkdir -p target/fuzz/found
# One target, by its name.
fuzz() {
    local name=$1 corpus=target/fuzz/corpus/$1 log=target/fuzz/$1.log begun runs
    mkdir -p "$corpus"
    local limits=(-rss_limit_mb=2048 -timeout=25 -max_len=16384)
    # A template may ask for any memory and time: its process has limits, which are tested elsewhere. Here it must not panic.
    [ "$name" = template ] && limits=(-rss_limit_mb=1024 -malloc_limit_mb=256 -timeout=5 -max_len=8192 -fork=1 -ignore_ooms=1 -ignore_timeouts=1)
    begun=$(date +%s)
    if ! SLUICE_FUZZ_TARGET=$name "$program" "${limits[@]}" -max_total_time="$seconds" -print_final_stats=1 \
        -artifact_prefix=target/fuzz/found/"$name"- "$corpus" fuzz/seeds/"$name" >"$log" 2>&1; then
        tail -40 "$log"
        echo "fuzz: $name: FOUND something, see target/fuzz/found"
        # Ends the others.
        return 255
    fi
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p; s/^INFO: fuzzed for [0-9]* seconds, wrapping up soon.*//p' "$log" | tail -1)
    [ -n "$runs" ] || runs=$(sed -n 's/^#\([0-9]*\):.*/\1/p' "$log" | tail -1)
    echo "fuzz: $name: ${runs:-?} executions in $(($(date +%s) - begun)) s, nothing found"
}
export -f fuzz
export seconds program=target/fuzz/$host/release/fuzz_targets
# One for each core.
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I{} bash -c 'fuzz "$1"' fuzz {}
