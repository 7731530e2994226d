# Sourced: packages from npm's registry without installing anything: none of their scripts is run.
# shellcheck shell=bash

# fetch_npm FOLDER NAME VERSION SHA256: unpacks the package into FOLDER/NAME, where its sum is the one given.
fetch_npm() {
  local folder=$1 name=$2 version=$3 sum=$4 packed
  packed=$(cd "$folder" && npm pack --silent "$name@$version" 2>/dev/null) || { echo "npm: $name@$version cannot be had" >&2; return 1; }
  if ! printf '%s  %s\n' "$sum" "$folder/$packed" | sha256sum --check --quiet --status; then
    echo "npm: $packed is not what it was: $(sha256sum <"$folder/$packed"), not $sum" >&2
    return 1
  fi
  mkdir -p "$folder/$name"
  tar -xzf "$folder/$packed" -C "$folder/$name" --strip-components=1
  rm "$folder/$packed"
}
