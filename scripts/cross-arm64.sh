#!/usr/bin/env bash
# Builds for aarch64 Linux on an x86-64 Debian or Ubuntu, and runs what was built under qemu: scripts/cross-arm64.sh COMMAND [ARGUMENT...]
#
#   build ARGUMENT...         cargo build, as in `build --bin sluice`
#   test ARGUMENT...          cargo test, as in `test --test kernels -- matmul`
#   check ARGUMENT...         cargo check
#   suite [NAME...]           ./test's programs, or those with these names, at low priority: hours. The kernel is taught to run arm64 programs meanwhile:
#                             before 6.7 that takes root
#   each NAME...              tests of these programs one by one, SLUICE_ARM64_LIMIT seconds (600) each, with results in target/arm64-tests: it goes on where it was
#   list [NAME...]            only compiles them, and prints a line for each
#   smoke                     a short look, minutes after a build: kernels at every instruction set, golden logits on three processors
#   run PROGRAM ARGUMENT...   an arm64 program
#   count                     instructions per weight of inner loops, beside llama.cpp's (bench/arm64)
#   macos                     cargo check for Apple silicon: compiled, not linked
#   tools [macos]             only fetches what the others need, some 75 MB, or what macos needs, some 130
#
# SLUICE_ARM64_CPU names the processor that qemu plays: max (the default), neoverse-n1 (dot products, neither i8mm nor bf16), cortex-a72 (neither), ..
# Compilers, their C library and qemu are Debian's packages, unpacked into target/arm64: nothing is installed. Rust's standard library for
# arm64 is added to the toolchain of rust-toolchain.toml by rustup.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh dpkg-deb=dpkg

target=aarch64-unknown-linux-gnu
tools=$PWD/target/arm64
root=$tools/root
apple=$PWD/target/apple
zig=0.17.1
# What qemu-user cannot do.
left_out=(
  # It ignores the wish that pages of a map be read ahead; scripts/pages-arm64.sh tests what these see of it.
  a_file_truncated_under_its_map_fails_to_populate
  files_are_read_ahead_where_they_will_be_mapped_and_there_is_room
  # Its own memory counts as the program's: some 100 MB more, which change.
  the_demo_runs_within_the_smallest_budget_and_holds_no_more
  a_control_group_is_a_limit_that_is_named_and_has_a_figure
  a_hundred_megabytes_of_demo_run_in_little_more_than_a_quarter_of_that
  a_refused_memory_budget_says_which_one_would_do
  mixtures_hold_less_than_their_budget_in_a_control_group
  a_crowd_of_requests_leaves_nothing_behind
  # qemu 7 does not know TCGETS2, by which a program asks for a terminal's modes: there is no line editing then.
  every_line_of_a_paste_is_a_message
  lines_typed_while_an_answer_is_given_are_read_after_it
  a_byte_that_is_no_utf8_costs_itself_alone
  ctrl_c_at_an_empty_prompt_leaves_the_second_time
  ctrl_c_stops_an_answer_and_the_terminal_is_left_as_it_was
  whatever_ends_a_conversation_leaves_the_terminal_as_it_was
  # `bench load` refuses to measure direct reads without io_uring.
  loads_and_allocations_can_be_measured
)

die() { say "$*" && exit 1; }

# Packages with everything that they need and this machine lacks.
fetch_packages() {
  [ ! -e "$root/is-whole" ] || return 0
  command -v apt-get >/dev/null || die "there is no apt-get here: cross compilers and qemu come from Debian's packages"
  rm -rf "$tools"
  mkdir -p "$tools/packages/partial" "$root"
  say "fetching cross compilers and qemu into target/arm64"
  local options=(-qq --download-only --no-install-recommends -o "Dir::Cache::archives=$tools/packages" -o APT::Sandbox::User=root)
  local packages=(gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)
  # Whatever is installed here is not fetched: so a system that has some of it needs nothing but the rest.
  apt-get "${options[@]}" -y install "${packages[@]}" >/dev/null 2>&1 || {
    as_root apt-get update -qq
    as_root apt-get "${options[@]}" -y install "${packages[@]}" >/dev/null
  }
  local package
  for package in "$tools"/packages/*.deb; do dpkg-deb -x "$package" "$root"; done
  rm -r "$tools/packages"
  touch "$root/is-whole"
}

# Programs that find their own libraries, and those of arm64.
write_wrappers() {
  local libraries=$root/usr/lib/x86_64-linux-gnu name real
  mkdir -p "$tools/bin"
  for name in gcc g++ ar ranlib objdump; do
    real=$(of_root "aarch64-linux-gnu-$name")
    local sysroot=
    case $name in gcc | g++) [ ! -e "$root/usr/aarch64-linux-gnu/lib/libc.so" ] || sysroot="--sysroot=$root" ;; esac
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec %q %s "$@"\n' "$libraries" "$real" "$sysroot" >"$tools/bin/$name"
  done
  # The libraries are qemu's: a program that runs another hands on its own environment.
  printf '#!/bin/sh\nexec /usr/bin/env LD_LIBRARY_PATH=%q %q -L %q -cpu "${SLUICE_ARM64_CPU:-max}" -U LD_LIBRARY_PATH "$@"\n' \
    "$libraries" "$(of_root qemu-aarch64)" "$(dirname "$(dirname "$(of_root ../aarch64-linux-gnu/lib/libc.so.6)")")" >"$tools/bin/qemu"
  chmod +x "$tools"/bin/*
}

# A program of the unpacked packages, or the machine's own.
of_root() {
  [ ! -e "$root/usr/bin/$1" ] || { echo "$root/usr/bin/$1" && return; }
  [ ! -e "/usr/bin/$1" ] || { realpath -s "/usr/bin/$1" && return; }
  die "there is no $1 in Debian's packages"
}

# A C compiler for macOS: zig's, from its Python package. Of clang's arguments it has the target in its own.
write_apple_compiler() {
  mkdir -p "$apple"
  say "fetching zig into target/apple: some dependencies are C"
  python3 -m pip install -q --no-deps --target "$apple/zig" "ziglang==$zig" || die "pip cannot install ziglang"
  cat >"$apple/cc" <<END
#!/usr/bin/env bash
arguments=()
while [ \$# -gt 0 ]; do
  case \$1 in
    -arch) shift ;;
    -mmacosx-version-min=* | -mmacos-version-min=* | --target=*) ;;
    *) arguments+=("\$1") ;;
  esac
  shift
done
PYTHONPATH=$apple/zig ZIG_GLOBAL_CACHE_DIR=$apple/cache exec python3 -m ziglang cc -target aarch64-macos "\${arguments[@]}"
END
  chmod +x "$apple/cc"
}

fetch_std() {
  local sysroot
  sysroot=$(rustc --print sysroot)
  [ ! -d "$sysroot/lib/rustlib/$1/lib" ] || return 0
  command -v rustup >/dev/null || die "this Rust has no standard library for $1 (Debian: libstd-rust-dev:arm64 of the same version), and there is no rustup to fetch it"
  say "fetching Rust's standard library for $1"
  rustup target add "$1" >&2
}

setup_arm64() {
  fetch_packages
  [ -x "$tools/bin/qemu" ] || write_wrappers
  fetch_std "$target"
  export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$tools/bin/gcc CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$tools/bin/qemu
  export CC_aarch64_unknown_linux_gnu=$tools/bin/gcc CXX_aarch64_unknown_linux_gnu=$tools/bin/g++ AR_aarch64_unknown_linux_gnu=$tools/bin/ar
}

setup_macos() {
  target=aarch64-apple-darwin
  fetch_std "$target"
  [ -x "$apple/cc" ] || write_apple_compiler
  export CC_aarch64_apple_darwin=$apple/cc AR_aarch64_apple_darwin=ar
}

cargo_for() {
  local verb=$1
  shift
  cargo "$verb" --profile "${SLUICE_TEST_PROFILE:-quick}" --locked --workspace --target "$target" "$@"
}

# As scripts/list-tests, or of that those with these names.
list_tests() {
  local programs
  programs=$(scripts/list-tests --profile "${SLUICE_TEST_PROFILE:-quick}" --target "$target")
  [ $# = 0 ] || programs=$(awk -F'\t' -v names=" $* " 'index(names, " " $1 " ")' <<<"$programs")
  [ -n "$programs" ] || die "there is no test program with such a name"
  printf '%s\n' "$programs"
}

# Runs a command for which the kernel starts arm64 programs under qemu, since tests start `sluice` and themselves.
with_kernel() {
  local misc=/proc/sys/fs/binfmt_misc bytes='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  local rule=":sluice-arm64:M:0:$bytes:$mask:$tools/bin/qemu:" apart=(unshare --user --map-root-user --mount)
  # Tests compile libraries for the programs that they start.
  mkdir -p "$tools/native"
  ln -sf ../bin/gcc "$tools/native/cc" && ln -sf ../bin/g++ "$tools/native/c++"
  local PATH=$tools/native:$PATH
  # Since 6.7 a kernel can be told so for one namespace alone.
  if "${apart[@]}" mount -t binfmt_misc none "$misc" 2>/dev/null; then
    "${apart[@]}" bash -ec 'mount -t binfmt_misc none "$0"; printf %s "$1" >"$0/register"; exec "${@:2}"' "$misc" "$rule" "$@"
    return
  fi
  [ -e "$misc/register" ] || as_root mount -t binfmt_misc none "$misc"
  # Somebody else's, which may have other libraries, comes second.
  printf %s "$rule" | as_root tee "$misc/register" >/dev/null
  trap 'echo -1 | as_root tee /proc/sys/fs/binfmt_misc/sluice-arm64 >/dev/null' EXIT
  "$@"
}

# each_test LIMIT FOLDER_OF_RESULTS NAME FOLDER PROGRAM: runs the tests of a program one by one, each for so many seconds at most, and prints what came of it and
# the seconds. Those that are in the file of results are not run again, unless they were late or failed. In no order, so that the first hundred say something about all.
each_test() {
  local limit=$1 results=$2/$(basename "$4")-$3 folder=$4 program=$5 test begun result
  mkdir -p "$2" && touch "$results.tsv" && sed -i '/\t\(late\|FAILED\)\t/d' "$results.tsv"
  cd "$folder"
  "$program" --list --format terse | sed -n 's/: test$//p' | grep -v -w -F "$unable" | sort -R --random-source=/bin/sh | while read -r test; do
    ! grep -q -P "^\Q$test\E\t" "$results.tsv" || continue
    begun=$SECONDS result=passed
    CARGO_MANIFEST_DIR=$folder timeout -k 5 "$limit" "$program" --exact "$test" --nocapture >"$results.log" 2>&1 </dev/null || {
      [ $? = 124 ] && result=late || result=FAILED
      { echo "---- $test: $result" && cat "$results.log"; } >>"$results.failures"
    }
    ! grep -q SKIPPED "$results.log" || [ $result != passed ] || result=skipped
    printf '%s\t%s\t%d\n' "$test" "$result" $((SECONDS - begun)) | tee -a "$results.tsv"
  done
  echo "$(basename "$results"): $(cut -f 2 "$results.tsv" | sort | uniq -c | xargs)"
}

command=${1:-}
[ $# = 0 ] || shift
case $command in
  tools) if [ "${1:-}" = macos ]; then setup_macos; else setup_arm64; fi ;;
  build | test | check)
    setup_arm64
    cargo_for "$command" "$@"
    ;;
  list)
    setup_arm64
    list_tests "$@"
    ;;
  suite)
    setup_arm64
    programs=$(list_tests "$@")
    # A tenth of the random cases.
    export SLUICE_CONFORMANCE_CASES=${SLUICE_CONFORMANCE_CASES:-4} SLUICE_DRAFT_CASES=${SLUICE_DRAFT_CASES:-2}
    with_kernel nice -n 19 scripts/run-tests "${left_out[@]/#/--skip=}" <<<"$programs"
    ;;
  each)
    setup_arm64
    programs=$(list_tests "$@")
    export SLUICE_CONFORMANCE_CASES=${SLUICE_CONFORMANCE_CASES:-4} SLUICE_DRAFT_CASES=${SLUICE_DRAFT_CASES:-2}
    export -f each_test
    unable=$(printf '%s\n' "${left_out[@]}")
    export unable
    while IFS=$'\t' read -r name folder program; do
      with_kernel nice -n 15 bash -c 'each_test "$@"' each "${SLUICE_ARM64_LIMIT:-600}" "$tools-tests" "$name" "$folder" "$program" </dev/null
    done <<<"$programs"
    ;;
  smoke)
    setup_arm64
    # Of the kernels' tests those that are quick there; then golden logits, hashed on x86-64, at each instruction set.
    cargo_for test --test kernels --test engine --no-run
    cargo_for test --test kernels -- blocks_golden affine_golden delta extremes
    cargo_for test --test engine -- numerics
    for SLUICE_ARM64_CPU in neoverse-n1 cortex-a72; do
      export SLUICE_ARM64_CPU
      cargo_for test --test engine -- numerics
    done
    ;;
  count)
    setup_arm64
    cargo_for build --example one_product
    bench/arm64/count.py "$tools" "${CARGO_TARGET_DIR:-target}/$target/${SLUICE_TEST_PROFILE:-quick}/examples/one_product" "$@"
    ;;
  macos)
    setup_macos
    cargo_for check --lib --bins "$@"
    ;;
  run)
    setup_arm64
    "$tools/bin/qemu" "$@"
    ;;
  *)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit 2
    ;;
esac
