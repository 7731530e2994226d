#!/bin/sh
# Installs Sluice: downloads a release, compares its checksum, and puts it below a prefix.
#
#   sh install.sh                          into /usr/local for root, else into ~/.local
#   sh install.sh --prefix DIR             somewhere else
#   sh install.sh --from URL_OR_FOLDER     from where a release's files are
#   sh install.sh --uninstall              removes what it installed; models and settings stay
#
# Needs a shell, tar, gzip, sha256sum, and curl or wget. Nothing is changed before the checksum is right and the program has run.
set -eu

# Where releases are; scripts/release writes it.
url=

die() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }
say() { printf '%s\n' "$*"; }

# Everything is in a function, so that a script that was cut off in transfer does nothing.
main() {
  prefix='' uninstall='' from=${SLUICE_URL:-$url}
  while [ $# -gt 0 ]; do
    case $1 in
      --prefix) [ $# -gt 1 ] || die "--prefix needs a folder"; prefix=$2; shift ;;
      --prefix=*) prefix=${1#*=} ;;
      --from) [ $# -gt 1 ] || die "--from needs a URL or a folder"; from=$2; shift ;;
      --from=*) from=${1#*=} ;;
      --uninstall) uninstall=yes ;;
      -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
      *) die "$1: unknown (--prefix DIR, --from URL, --uninstall)" ;;
    esac
    shift
  done
  if [ -z "$prefix" ]; then
    if [ "$(id -u)" = 0 ]; then prefix=/usr/local; else prefix=${HOME:?install.sh: there is no home folder, give --prefix}/.local; fi
  fi
  case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
  # What was installed, one path a line.
  list=$prefix/share/sluice/installed

  if [ -n "$uninstall" ]; then
    [ -f "$list" ] || die "$list: not there, so nothing was installed below $prefix"
    remove "$list"
    say "Sluice is removed from $prefix. Models (~/.cache/huggingface) and settings (~/.config/sluice) stay."
    exit
  fi

  # 1. whether it can run here
  [ "$(uname -s)" = Linux ] || die "releases are for Linux, this is $(uname -s)"
  case $(uname -m) in
    x86_64 | amd64) machine=x86_64 ;;
    *) die "releases are for x86-64, this is $(uname -m): build it from source" ;;
  esac
  for tool in tar gzip sha256sum mktemp; do
    command -v $tool >/dev/null || die "$tool is missing"
  done
  [ -n "$from" ] || die "where are the files? --from URL"
  from=${from%/}

  # 2. the archive, and its checksum
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  trap 'exit 130' INT TERM HUP
  fetch SHA256SUMS
  archive=$(sed -n "s/^[0-9a-f]\{64\} [ *]\(sluice-[A-Za-z0-9._+-]*-$machine-linux\.tar\.gz\)\$/\1/p" "$work/SHA256SUMS")
  [ -n "$archive" ] || die "$from/SHA256SUMS names no archive for $machine"
  [ "$(printf '%s\n' "$archive" | wc -l)" = 1 ] || die "$from/SHA256SUMS names several archives"
  say "Fetching $archive"
  fetch "$archive"
  grep " [ *]$archive\$" "$work/SHA256SUMS" >"$work/sum"
  (cd "$work" && sha256sum -c sum >/dev/null 2>&1) || die "$archive: its checksum is wrong, nothing was installed"

  # 3. unpacked, and run once
  mkdir "$work/unpacked"
  tar -xzf "$work/$archive" -C "$work/unpacked" --no-same-owner || die "$archive: cannot be unpacked"
  root=$work/unpacked/${archive%.tar.gz}
  [ -x "$root/bin/sluice" ] || die "$archive: has no bin/sluice"
  version=$("$root/bin/sluice" --version 2>"$work/why") || die "the program does not run here (glibc 2.31 or newer is needed): $(head -n 1 "$work/why")"

  # 4. in place: what an older version had and this one has not goes
  mkdir -p "$prefix/share/sluice" 2>/dev/null && [ -w "$prefix/share/sluice" ] || die "$prefix: cannot be written (--prefix DIR, or as root)"
  (cd "$root" && find . -type f ! -path ./SHA256SUMS ! -path ./install.sh | sed 's|^\./||' | LC_ALL=C sort) >"$work/new"
  while IFS= read -r file; do
    mkdir -p "$prefix/$(dirname "$file")"
    # Under another name first: a program that runs keeps its file, and nobody sees half of one.
    cp -p "$root/$file" "$prefix/$file.new.$$"
    mv -f "$prefix/$file.new.$$" "$prefix/$file"
  done <"$work/new"
  if [ -f "$list" ]; then
    LC_ALL=C sort "$list" | LC_ALL=C comm -23 - "$work/new" >"$work/gone"
    forget "$work/gone"
  fi
  cp "$work/new" "$list"

  say "Installed: $version"
  say "  $prefix/bin/sluice"
  case :$PATH: in
    *":$prefix/bin:"*) ;;
    *) say "  $prefix/bin is not on PATH: export PATH=\"$prefix/bin:\$PATH\"" ;;
  esac
  say "Try: sluice doctor; sluice run \"Once upon a time\"; sluice run Qwen/Qwen3-0.6B \"Explain mmap\""
}

# fetch NAME: from where the files are, into the work folder.
fetch() {
  case $from in
    http://* | https://*)
      if command -v curl >/dev/null; then
        curl -fsSL --retry 3 -o "$work/$1" "$from/$1" || die "$from/$1: cannot be fetched"
      elif command -v wget >/dev/null; then
        wget -q -O "$work/$1" "$from/$1" || die "$from/$1: cannot be fetched"
      else
        die "curl or wget is needed"
      fi
      ;;
    *) cp "$from/$1" "$work/$1" 2>/dev/null || die "$from/$1: not there" ;;
  esac
}

# forget LIST: removes files that it names, and folders that are empty then.
forget() {
  while IFS= read -r file; do
    case $file in "" | /* | *..*) continue ;; esac
    rm -f "$prefix/$file"
    folder=$(dirname "$file")
    while [ "$folder" != . ] && rmdir "$prefix/$folder" 2>/dev/null; do folder=$(dirname "$folder"); done
  done <"$1"
}

remove() {
  copy=$(mktemp)
  cp "$1" "$copy"
  rm -f "$1"
  forget "$copy"
  rm -f "$copy"
  rmdir "$prefix/share/sluice" 2>/dev/null || true
}

main "$@"
