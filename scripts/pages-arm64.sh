#!/usr/bin/env bash
# Boots Debian's arm64 kernels with pages of 4 and of 16 KiB in an emulated machine, and compares logits there with this machine's, in every way of loading. Then
# runs the store's tests there, with io_uring. Some ten minutes after a build. Fetches 200 MB. (Debian has no kernel with pages of 64 KiB.)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh dpkg-deb=dpkg cpio=cpio qemu-system-aarch64=qemu-system-arm
setup_room 1000

release=trixie
profile=${SLUICE_TEST_PROFILE:-quick}
target=aarch64-unknown-linux-gnu
home=$PWD/target/arm64/pages
models=(qwen3 gemma3 mlx_qwen3_moe)

scripts/cross-arm64.sh tools
mkdir -p "$home"/{lists/partial,cache/archives/partial,packages}
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $release main" >"$home/sources.list"
options=(-qq -o "Dir::Etc::sourcelist=$home/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$home/lists"
  -o "Dir::Cache=$home/cache" -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root)

# The package that a metapackage stands for.
newest() { apt-cache "${options[@]}" depends "$1" | sed -n 's/^ *Depends: //p' | head -n 1; }

# fetch PACKAGE FOLDER
fetch() {
  [ ! -e "$2/is-whole" ] || return 0
  say "fetching $1"
  rm -rf "$2" && mkdir -p "$2"
  (cd "$home/packages" && rm -f ./*.deb && apt-get "${options[@]}" download "$1" && dpkg-deb -x ./*.deb "$2" && rm ./*.deb)
  touch "$2/is-whole"
}
apt-get "${options[@]}" update
fetch "$(newest linux-image-arm64)" "$home/4"
fetch "$(newest linux-image-arm64-16k)" "$home/16"
fetch busybox-static "$home/busybox"
for package in libc6 libgcc-s1 libstdc++6; do fetch "$package" "$home/$package"; done

# 1. Everything in the initial file system
scripts/cross-arm64.sh build --bin sluice
programs=$(scripts/cross-arm64.sh list store)
root=$home/root
rm -rf "$root" && mkdir -p "$root"/{bin,lib,proc,sys,dev,tmp,golden,tests}
cp "$home"/busybox/usr/bin/busybox "$root/bin/"
ln -s busybox "$root/bin/sh"
find "$home"/lib* -path '*/aarch64-linux-gnu/*' \( -name 'lib*.so.[0-9]*' -o -name 'ld-linux*' \) -exec cp -L {} "$root/lib/" \;
cp "target/$target/$profile/sluice" "$root/bin/"
while IFS=$'\t' read -r name _ program; do cp "$program" "$root/tests/$name"; done <<<"$programs"
for model in "${models[@]}"; do cp -r "tests/golden/$model" "$root/golden/"; done

cat >"$root/logits" <<'END'
# Prints a hash of logits for each model in a folder and each way of loading. $1: the folder.
for model in "$1"/*; do
  for way in "--load mmap" "--load pread" "--load direct"; do
    hash=$(sluice eval logits "$model" --tokens 1,2,3,4,5,6,7 --json $way | sed 's/.stats.*//' | md5sum)
    echo "logits ${model##*/} $way $hash"
  done
done
END
cat >"$root/init" <<'END'
#!/bin/sh
/bin/busybox --install -s /bin
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev; mount -t tmpfs none /tmp
export LD_LIBRARY_PATH=/lib HOME=/tmp RUST_BACKTRACE=0
awk '/KernelPageSize/ { print "pages " $2; exit }' /proc/self/smaps
# Where tests have their files, and files can be read past the page cache.
mkdir -p "$(cat /tests/folder)" && mount -t tmpfs none "$(cat /tests/folder)"
cp -r /golden /tmp/golden
sh /logits /tmp/golden
# Its files are in memory: what wants a disk is left out.
/tests/store --skip a_file_that_is_truncated_after_it_was_opened --skip what_cannot_be_delivered --skip tensors_beyond_4_gib \
  --skip vectors_are_there_at_once --skip files_are_read_ahead 2>&1 | grep -E "FAILED|panicked|SKIPPED|^test result" | sed 's/; finished.*//'
poweroff -f
END
chmod +x "$root/init"
echo "$PWD/target/$target/tmp" >"$root/tests/folder"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$home/initrd.gz"

# 2. What this machine computes, and each kernel
cargo build --profile "$profile" --locked --workspace --bin sluice
PATH="$PWD/target/$profile:$PATH" sh "$root/logits" "$root/golden" >"$home/wanted"
for kib in 4 16; do
  say "booting a kernel with pages of $kib KiB"
  # An emulated processor has all that Sluice can use.
  timeout 3600 qemu-system-aarch64 -M virt -cpu max -smp 2 -m 3G -nic none -nographic -no-reboot -kernel "$home/$kib"/boot/vmlinuz-* \
    -initrd "$home/initrd.gz" -append "console=ttyAMA0 quiet panic=-1" </dev/null | sed -u 's/\r//' | tee "$home/$kib.log"
  grep -q "^pages $kib$" "$home/$kib.log" || { say "no kernel with pages of $kib KiB" && exit 1; }
  diff <(grep ^logits "$home/$kib.log") "$home/wanted" || { say "other logits with pages of $kib KiB" && exit 1; }
  grep -q '^test result: ok' "$home/$kib.log" || { say "tests fail with pages of $kib KiB" && exit 1; }
done
say "pages of 4 and of 16 KiB: the same logits, and the store's tests pass"
