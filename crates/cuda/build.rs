//! Packs the GPU's kernels that `scripts/kernels` has made into the crate, where they are there and fresh, and reads the lists that both sides share: weight
//! formats (`kernels/format/list.cuh`) and limits of shared memory (`kernels/shared_memory.txt`). Without kernels the crate builds all the same, for the CPU alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

const MAGIC: &str = "sluice-kernels 1";
/// The unit of `sluice bench roofline`, without which an architecture is whole.
const PROBES: &str = "probes/probes";

fn main() {
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let (sources, out) = (here.join("kernels"), PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it")));
    let made = match std::env::var_os("CARGO_TARGET_DIR") {
        Some(target) => here.join("../..").join(target).join("kernels"),
        None => here.join("../../target/kernels"),
    };
    // A folder that is missing would count as changed in every build.
    fs::create_dir_all(&made).expect("the target folder can be written");
    for watched in [&sources, &made] {
        println!("cargo:rerun-if-changed={}", watched.display());
    }
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=CARGO_TARGET_DIR");

    let list = fs::read_to_string(sources.join("format/list.cuh")).expect("the list of formats is there");
    let limits = fs::read_to_string(sources.join("shared_memory.txt")).expect("the limits are there");
    fs::write(out.join("formats.rs"), formats(&list)).expect("the output folder can be written");
    fs::write(out.join("shared_memory.rs"), shared_memory(&limits)).expect("the output folder can be written");
    fs::write(out.join("objects.rs"), objects(&sources, &made)).expect("the output folder can be written");
}

/// The lists `#define NAME_FORMATS(X) X(name, Type) ...` as `formats!` and `format_lists!` of `src/kernels/format.rs` take them.
fn formats(text: &str) -> String {
    let (mut all, mut lists) = (Vec::new(), String::new());
    for list in text.replace("\\\n", " ").lines().filter_map(|line| line.strip_prefix("#define ")) {
        let Some((name, members)) = list.split_once("_FORMATS(X)") else { continue };
        let members: Vec<&str> =
            members.split("X(").skip(1).map(|x| x.split(',').next().unwrap_or_default().trim()).collect();
        let variants: Vec<String> = members.iter().map(|member| camel(member)).collect();
        writeln!(lists, "format_lists! {{ {name} {} }}", variants.join(" ")).expect("a string");
        for (member, variant) in members.iter().zip(&variants) {
            // `q4_int8` has weights of 4 bits, and so have `b4_int8`, `v4_int8` and `h4_int8`.
            let bits =
                member.strip_prefix(['q', 'b', 'v', 'h']).and_then(|m| m.split('_').next()?.parse().ok()).unwrap_or(0);
            let line = format!("{variant} {member:?} {bits},");
            if !all.contains(&line) {
                all.push(line);
            }
        }
    }
    assert!(all.len() > 6, "format/list.cuh is not written as build.rs reads it");
    format!("formats! {{\n{}\n}}\n{lists}", all.join("\n"))
}

/// `q4_int8` as `Q4Int8`.
fn camel(name: &str) -> String {
    name.split('_').flat_map(|word| [word[..1].to_uppercase(), word[1..].to_owned()]).collect()
}

fn shared_memory(text: &str) -> String {
    let lines: Vec<(&str, Option<usize>)> = text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| match line.split_once(' ') {
            Some((name, bytes)) => (name, Some(bytes.trim().parse().expect("a number of bytes"))),
            None => (line, None),
        })
        .collect();
    let most = lines.iter().find(|(name, _)| *name == "most").and_then(|(_, bytes)| *bytes).expect("a line `most`");
    let mut code = format!("pub const STATIC_SHARED: usize = {most};\nconst LARGE_SHARED: &[(&str, usize)] = &[\n");
    for (name, bytes) in lines.iter().filter(|(name, _)| *name != "most") {
        writeln!(code, "    ({name:?}, {}),", bytes.unwrap_or(most)).expect("a string");
    }
    code + "];\n"
}

/// An object that was made, as far as its head says.
struct Object {
    unit: String,
    architecture: u32,
    sources: Vec<(String, String)>,
}

impl Object {
    fn read(path: &Path) -> Option<Object> {
        let content = fs::read(path).ok()?;
        let end = content.windows(2).position(|pair| pair == b"\n\n")?;
        let head = std::str::from_utf8(&content[..end]).ok()?;
        let mut object = Object { unit: String::new(), architecture: 0, sources: Vec::new() };
        let mut lines = head.lines();
        if lines.next() != Some(MAGIC) {
            return None;
        }
        let mut bytes = end + 2;
        for line in lines {
            match *line.split(' ').collect::<Vec<_>>() {
                ["unit", unit] => object.unit = unit.to_owned(),
                ["arch", architecture] => object.architecture = architecture.parse().ok()?,
                ["source", hash, name] => object.sources.push((hash.to_owned(), name.to_owned())),
                ["ptx" | "code", n] => bytes += n.parse::<usize>().ok()?,
                _ => return None,
            }
        }
        (bytes == content.len()).then_some(object)
    }

    fn is_fresh(&self, hashes: &mut BTreeMap<String, Option<String>>, sources: &Path) -> bool {
        let mut now = |name: &str| {
            let hash = || Some(format!("{:x}", Sha256::digest(fs::read(sources.join(name)).ok()?)));
            hashes.entry(name.to_owned()).or_insert_with(hash).clone()
        };
        self.sources.iter().all(|(hash, name)| now(name).as_ref() == Some(hash))
    }
}

/// The table of what is packed: architectures of which all units are fresh. Says in one line what is not.
fn objects(sources: &Path, made: &Path) -> String {
    let units = units(sources);
    let (mut by_architecture, mut stale): (BTreeMap<u32, BTreeMap<String, PathBuf>>, usize) = Default::default();
    let mut hashes = BTreeMap::new();
    for path in fs::read_dir(made).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if path.extension().is_none_or(|extension| extension != "kernels") {
            continue;
        }
        match Object::read(&path) {
            Some(object) if units.contains(&object.unit) && object.is_fresh(&mut hashes, sources) => {
                by_architecture.entry(object.architecture).or_default().insert(object.unit, path);
            }
            _ => stale += 1,
        }
    }
    let is_whole = |made: &BTreeMap<String, PathBuf>| units.iter().all(|u| u == PROBES || made.contains_key(u));
    let (whole, partial): (Vec<_>, Vec<_>) = by_architecture.into_iter().partition(|(_, made)| is_whole(made));
    let partial: Vec<String> = partial.iter().map(|(architecture, _)| architecture.to_string()).collect();
    if whole.is_empty() && stale == 0 && partial.is_empty() {
        println!(
            "cargo:warning=no GPU kernels are built, so this program computes on the CPU alone: scripts/kernels makes them"
        );
    } else if stale > 0 || !partial.is_empty() {
        let left =
            if whole.is_empty() { "the GPU's kernels are left out" } else { "some of the GPU's kernels are left out" };
        println!(
            "cargo:warning={left}, since what they were made from has changed or some are missing: run scripts/kernels"
        );
    }
    let mut code = String::from("static EMBEDDED: &[(u32, &str, &[u8])] = &[\n");
    for (architecture, made) in whole {
        for (unit, path) in made {
            let path = path.canonicalize().expect("it was just read");
            writeln!(code, "    ({architecture}, {unit:?}, include_bytes!({:?})),", path.display().to_string())
                .expect("a string");
        }
    }
    code + "];\n"
}

/// All units, as `gemv/fused`: the .cu files of the folders of `kernels`.
fn units(sources: &Path) -> BTreeSet<String> {
    let folders = fs::read_dir(sources).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
    let files = folders.flat_map(|folder| fs::read_dir(folder.path()).into_iter().flatten().flatten());
    let units = files.filter_map(|file| {
        let path = file.path();
        let unit = path.strip_prefix(sources).ok()?.to_str()?.strip_suffix(".cu")?.replace('\\', "/");
        Some(unit)
    });
    units.collect()
}
