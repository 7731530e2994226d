//! Compiled kernels, as `scripts/kernels` makes them: those that were packed into the program when it was built, or those of a folder.
//!
//! An object is a unit for an architecture: lines that say what it was made from, an empty one, then PTX and perhaps machine code, compressed.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use sluice_store::read_small;

use super::families::Kernel;

include!(concat!(env!("OUT_DIR"), "/objects.rs"));

/// Names a folder whose kernels are loaded instead of those that are packed into the program.
const FOLDER: &str = "SLUICE_CUDA_KERNELS";

/// The most bytes of an object in a folder, and of the code that it unpacks to: many times what the largest unit has.
const MAX_OBJECT: u64 = 64 << 20;
const MAX_CODE: u64 = 256 << 20;

/// Bytes that lie in the program for GPUs: programs that compute elsewhere never read them.
pub fn embedded_bytes() -> u64 {
    EMBEDDED.iter().map(|(.., object)| object.len() as u64).sum()
}

/// The code of a unit.
pub struct Code {
    /// Text without a zero behind it.
    pub ptx: Vec<u8>,
    /// Empty where there is none for the device.
    pub machine_code: Vec<u8>,
}

/// Architecture, unit, and the object.
type Found = (u32, String, Cow<'static, [u8]>);

/// The objects that a device takes, by unit.
pub struct Objects {
    architecture: u32,
    units: BTreeMap<String, Cow<'static, [u8]>>,
}

impl Objects {
    /// Those of the newest architecture that a device of this compute capability takes (75 for 7.5).
    ///
    /// # Errors
    /// Where there are none, in one sentence that says what to do.
    pub fn for_capability(capability: i32) -> Result<Objects> {
        match std::env::var_os(FOLDER) {
            Some(folder) => {
                let folder = Path::new(&folder);
                let all = read_folder(folder).with_context(|| format!("{FOLDER}={}", folder.display()))?;
                newest(all, capability, &format!("{FOLDER}={} has", folder.display()))
            }
            None => {
                let all =
                    EMBEDDED.iter().map(|&(architecture, unit, object)| (architecture, unit.to_owned(), object.into()));
                newest(all.collect(), capability, "this program was built with")
            }
        }
    }

    /// The code of a unit for a device of this compute capability.
    ///
    /// # Errors
    /// Where there is no such unit, or it is damaged.
    pub fn code(&self, unit: &str, capability: i32) -> Result<Code> {
        let object = self.units.get(unit).with_context(|| format!("no kernels of the unit {unit}"))?;
        let (ptx, machine_code) =
            parts(object).with_context(|| format!("the kernels of the unit {unit} are damaged"))?;
        // Machine code is for devices of the same first number, from its own on.
        let takes = capability / 10 == self.architecture as i32 / 10;
        let machine_code = if takes { unpacked(machine_code)? } else { Vec::new() };
        Ok(Code { ptx: unpacked(ptx)?, machine_code })
    }
}

fn newest(all: Vec<Found>, capability: i32, source: &str) -> Result<Objects> {
    let mut by_architecture: BTreeMap<u32, BTreeMap<String, Cow<'static, [u8]>>> = BTreeMap::new();
    for (architecture, unit, object) in all {
        by_architecture.entry(architecture).or_default().insert(unit, object);
    }
    by_architecture.retain(|_, units| Kernel::all().all(|kernel| units.contains_key(kernel.unit())));
    let known: Vec<String> = by_architecture.keys().map(|a| format!("{}.{}", a / 10, a % 10)).collect();
    if known.is_empty() {
        bail!("{source} no GPU kernels: run scripts/kernels, then cargo build --release");
    }
    let found = by_architecture.into_iter().rev().find(|(architecture, _)| *architecture as i32 <= capability);
    let Some((architecture, units)) = found else {
        let known = known.join(", ");
        let wanted = format!("{}.{}", capability / 10, capability % 10);
        bail!(
            "{source} GPU kernels for compute capability {known} on, and this device has {wanted}: run scripts/kernels, then cargo build --release"
        );
    };
    Ok(Objects { architecture, units })
}

fn read_folder(folder: &Path) -> Result<Vec<Found>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "kernels") {
            let object = read_small(&path, MAX_OBJECT)?;
            let (architecture, unit) = heading(&object).with_context(|| format!("{} is damaged", path.display()))?;
            all.push((architecture, unit, object.into()));
        }
    }
    Ok(all)
}

/// The lines before the empty one, and how many bytes they are with it.
fn head(object: &[u8]) -> Option<(&str, usize)> {
    let end = object.windows(2).position(|pair| pair == b"\n\n")?;
    Some((std::str::from_utf8(&object[..end]).ok()?, end + 2))
}

/// The value of a line `NAME VALUE` of a head.
fn value<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
}

fn heading(object: &[u8]) -> Option<(u32, String)> {
    let (head, _) = head(object)?;
    Some((value(head, "arch")?.parse().ok()?, value(head, "unit")?.to_owned()))
}

/// PTX and machine code of an object, compressed.
fn parts(object: &[u8]) -> Option<(&[u8], &[u8])> {
    let (head, start) = head(object)?;
    let [ptx, code] = ["ptx", "code"].map(|name| value(head, name)?.parse::<usize>().ok());
    let (ptx, rest) = object[start..].split_at_checked(ptx?)?;
    (rest.len() == code?).then_some((ptx, rest))
}

fn unpacked(packed: &[u8]) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    if !packed.is_empty() {
        flate2::read::GzDecoder::new(packed).take(MAX_CODE + 1).read_to_end(&mut all)?;
        ensure!(!all.is_empty(), "an empty module");
        ensure!(all.len() as u64 <= MAX_CODE, "a module of more than {MAX_CODE} bytes");
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(architecture: u32, unit: &str) -> Found {
        (architecture, unit.to_owned(), Cow::Borrowed(&[]))
    }

    fn whole(architecture: u32) -> Vec<Found> {
        Kernel::all().map(|kernel| object(architecture, kernel.unit())).collect()
    }

    #[test]
    fn a_device_takes_the_newest_architecture_that_is_whole_and_not_newer_than_it() {
        let all = || [whole(75), whole(80), whole(90)].concat();
        for (capability, architecture) in [(75, 75), (80, 80), (86, 80), (89, 80), (90, 90), (120, 90)] {
            assert_eq!(newest(all(), capability, "").unwrap().architecture, architecture);
        }
        let partial = [whole(80), vec![object(90, "gemv/fused")]].concat();
        assert_eq!(newest(partial, 90, "").unwrap().architecture, 80);
    }

    #[test]
    fn what_is_missing_is_said_in_one_sentence() {
        let why = |all, capability| newest(all, capability, "this program was built with").err().unwrap().to_string();
        let none = "this program was built with no GPU kernels: run scripts/kernels, then cargo build --release";
        assert_eq!(why(Vec::new(), 90), none);
        let old = "this program was built with GPU kernels for compute capability 9.0 on, and this device has 8.6: run scripts/kernels, then cargo build --release";
        assert_eq!(why(whole(90), 86), old);
    }

    #[test]
    fn what_is_no_file_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("gemv_fused.kernels");
        // Opened as a file, it would wait for a writer.
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let why = format!("{:#}", read_folder(folder.path()).err().unwrap());
        assert_eq!(why, format!("{}: not a regular file", pipe.display()));
    }

    #[test]
    fn an_object_is_taken_apart() {
        let bytes = b"sluice-kernels 1\nunit gemv/fused\narch 90\nsource 12 a b.cu\nptx 3\ncode 2\n\nabcde";
        assert_eq!(heading(bytes), Some((90, "gemv/fused".to_owned())));
        assert_eq!(parts(bytes), Some((&b"abc"[..], &b"de"[..])));
        for end in 0..bytes.len() {
            assert_eq!(parts(&bytes[..end]), None, "{end} bytes");
        }
    }
}
