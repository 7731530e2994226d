//! The program's folders, and the disks that they are on.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::disk;
use crate::{folders, units};

/// Counting a folder's files ends after so long.
const PATIENCE: Duration = Duration::from_secs(2);

/// A folder of the program's.
#[derive(Serialize)]
pub struct Folder {
    pub what: &'static str,
    pub path: PathBuf,
    pub exists: bool,
    /// Bytes on disk; at least so many if there was no time to count all.
    pub bytes: u64,
    pub is_counted: bool,
    pub free: Option<u64>,
}

/// A disk that has one of the folders.
#[derive(Serialize)]
pub struct Disk {
    /// The mounted file system's place.
    pub mounted: PathBuf,
    /// `ext4`, `nfs`.
    pub file_system: String,
    pub is_rotational: Option<bool>,
    pub free: Option<u64>,
    pub speed: Option<disk::Speed>,
    /// Why it was not measured.
    pub unmeasured: Option<String>,
}

/// The folders, and each of their disks once.
pub fn find(measures: bool) -> (Vec<Folder>, Vec<Disk>) {
    let models = sluice_hub::Settings::from_env().ok().map(|settings| settings.cache);
    let named = [
        ("models", models.clone()),
        ("prompt cache", folders::prompt_cache()),
        ("own cache", folders::own_cache()),
        ("settings", folders::config_file()),
    ];
    let found: Vec<Folder> = named.into_iter().filter_map(|(what, path)| Some(Folder::look(what, path?))).collect();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut disks: Vec<(u64, Disk)> = Vec::new();
    for folder in &found {
        let there = nearest(&folder.path);
        let Ok(device) = fs::metadata(&there).map(|m| m.dev()) else { continue };
        if disks.iter().any(|(known, _)| *known == device) {
            continue;
        }
        let unknown = || (there.clone(), "a file system that is not known".to_owned());
        let (mounted, file_system) = mount_of(&mounts, &there).unwrap_or_else(unknown);
        let mut one = Disk {
            mounted,
            file_system,
            is_rotational: is_rotational(device),
            free: folder.free,
            speed: None,
            unmeasured: None,
        };
        if measures {
            match disk::measure(&there, models.as_deref().filter(|models| models.starts_with(&there))) {
                Ok(speed) => one.speed = Some(speed),
                Err(e) => one.unmeasured = Some(format!("{e:#}")),
            }
        }
        disks.push((device, one));
    }
    (found, disks.into_iter().map(|(_, disk)| disk).collect())
}

impl Folder {
    fn look(what: &'static str, path: PathBuf) -> Folder {
        let begun = Instant::now();
        let mut sum = Sum { bytes: 0, until: begun + PATIENCE, is_whole: true };
        let exists = path.exists();
        if exists {
            sum.add(&path);
        }
        let free = sluice_store::free_space(&nearest(&path)).ok();
        Folder { what, path, exists, bytes: sum.bytes, is_counted: sum.is_whole, free }
    }

    pub fn line(&self) -> (&'static str, String) {
        let size = match (self.exists, self.is_counted) {
            (false, _) => "not there yet".to_owned(),
            (true, false) => format!("more than {}", units::bytes(self.bytes)),
            (true, true) => units::bytes(self.bytes),
        };
        let free = self.free.map(|free| format!(", {} free", units::bytes(free))).unwrap_or_default();
        (self.what, format!("{}: {size}{free}", folders::shown(&self.path)))
    }
}

impl Disk {
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut text = format!("{}: {}", self.mounted.display(), self.file_system);
        // Virtual disks say that they turn, whatever they are.
        let is_slow = self.speed.as_ref().is_some_and(|speed| speed.small_request_seconds > 2e-3);
        if self.is_rotational == Some(true) && is_slow {
            text += ", spinning";
        }
        match (&self.speed, &self.unmeasured) {
            (Some(speed), _) => {
                text += &format!(
                    "; {}/s in requests of 4 MiB, eight at once; {:.0} us for one of 128 KiB alone ({})",
                    units::bytes(speed.bytes_per_second as u64),
                    speed.small_request_seconds * 1e6,
                    speed.measured_with
                );
            }
            (None, Some(why)) => text += &format!("; not measured: {why}"),
            (None, None) => {}
        }
        vec![("disk", text)]
    }
}

/// Bytes on disk of a folder.
struct Sum {
    bytes: u64,
    until: Instant,
    is_whole: bool,
}

impl Sum {
    /// Links are not followed, so what a link and a file share counts once.
    fn add(&mut self, path: &Path) {
        let Ok(facts) = fs::symlink_metadata(path) else { return };
        self.bytes += facts.blocks() * 512;
        if !facts.is_dir() {
            return;
        }
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            if Instant::now() > self.until {
                self.is_whole = false;
                return;
            }
            self.add(&entry.path());
        }
    }
}

/// The folder, or the nearest above it that is there.
fn nearest(path: &Path) -> PathBuf {
    let there = path.ancestors().find(|above| above.is_dir());
    there.map_or_else(|| PathBuf::from("/"), Path::to_owned)
}

/// Where the file system of `path` is mounted, and its type: of the mounts that lead to it the longest, of equal ones the last.
fn mount_of(mounts: &str, path: &Path) -> Option<(PathBuf, String)> {
    let real = path.canonicalize().ok()?;
    // 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw
    let parsed = mounts.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let place = before.split(' ').nth(4)?.replace("\\040", " ");
        Some((PathBuf::from(place), after.split(' ').next()?.to_owned()))
    });
    parsed.filter(|(place, _)| real.starts_with(place)).max_by_key(|(place, _)| place.as_os_str().len())
}

/// Whether the disk turns; of a partition, its disk's.
fn is_rotational(device: u64) -> Option<bool> {
    // A device is a signed number on some systems; those have no such folder.
    let device = device as rustix::fs::Dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let block = PathBuf::from(format!("/sys/dev/block/{major}:{minor}")).canonicalize().ok()?;
    let read = |folder: &Path| fs::read_to_string(folder.join("queue/rotational")).ok();
    let text = read(&block).or_else(|| read(block.parent()?))?;
    Some(text.trim() == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folders_mount_is_the_longest_that_leads_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().canonicalize().unwrap();
        let mounts = format!(
            "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:2 / {} rw shared:1 - xfs /dev/sdb rw\nbroken\n",
            place.display()
        );
        assert_eq!(mount_of(&mounts, &place), Some((place, "xfs".into())));
        assert_eq!(mount_of(&mounts, Path::new("/")), Some(("/".into(), "ext4".into())));
    }

    #[test]
    fn a_link_and_its_file_count_once() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("blobs")).unwrap();
        fs::write(dir.path().join("blobs/a"), vec![7; 1 << 20]).unwrap();
        std::os::unix::fs::symlink("blobs/a", dir.path().join("model")).unwrap();
        let folder = Folder::look("models", dir.path().to_owned());
        assert!(folder.exists && folder.is_counted, "{}", folder.bytes);
        assert!((1 << 20..2 << 20).contains(&folder.bytes), "{}", folder.bytes);
        assert!(Folder::look("none", dir.path().join("none")).line().1.contains("not there yet"));
    }
}
