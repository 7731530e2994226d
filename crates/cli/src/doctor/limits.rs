//! What the system grants this process: locked memory, open files, maps, io_uring.

use std::fs;

use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use sluice_store::requests::{ReadQueue, RequestOptions, Requests, StreamedFiles};

use super::processor::word;
use crate::units;

/// `None`: no limit, or not known.
#[derive(Serialize)]
pub struct Limits {
    /// Bytes.
    pub memlock: Option<u64>,
    pub nofile: Option<u64>,
    pub nofile_most: Option<u64>,
    pub max_map_count: Option<u64>,
    /// Why io_uring is refused; none where it works.
    pub io_uring_refused: Option<String>,
    /// `kernel.io_uring_disabled`: 1: for privileged programs only, 2: for nobody.
    pub io_uring_disabled: Option<u64>,
    /// Whether the program runs in a container, as far as can be told.
    pub is_container: bool,
}

impl Limits {
    pub fn find() -> Limits {
        let files = getrlimit(Resource::Nofile);
        let number = |path: &str| word(path)?.parse().ok();
        Limits {
            memlock: getrlimit(Resource::Memlock).current,
            nofile: files.current,
            nofile_most: files.maximum,
            max_map_count: number("/proc/sys/vm/max_map_count"),
            io_uring_refused: io_uring_refused(),
            io_uring_disabled: number("/proc/sys/kernel/io_uring_disabled"),
            is_container: ["/.dockerenv", "/run/.containerenv"].iter().any(|path| fs::exists(path).unwrap_or(false)),
        }
    }

    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let number = |n: Option<u64>| n.map_or("unlimited".to_owned(), |n| n.to_string());
        let ring =
            self.io_uring_refused.as_deref().map_or("io_uring works".to_owned(), |why| format!("no io_uring ({why})"));
        let maps = self.max_map_count.map(|n| format!("; maps {n}")).unwrap_or_default();
        let container = if self.is_container { "; in a container" } else { "" };
        let memlock = self.memlock.map_or("unlimited".to_owned(), units::bytes);
        vec![("limits", format!("{ring}; memlock {memlock}; open files {}{maps}{container}", number(self.nofile)))]
    }
}

/// Why reads cannot go through io_uring.
fn io_uring_refused() -> Option<String> {
    let options = RequestOptions { direct: false, depth: 2, io_uring: true, threads: 1, faults: None };
    match Requests::new(StreamedFiles::default(), &options) {
        Ok(requests) if requests.is_ring() => None,
        Ok(requests) => {
            let why = requests.notes().join("; ");
            let inner = why.strip_prefix("no io_uring (").and_then(|rest| rest.split_once(");"));
            Some(inner.map_or(why.clone(), |(inner, _)| inner.to_owned()))
        }
        Err(e) => Some(e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_limits() {
        let found = Limits::find();
        assert!(found.nofile.is_none_or(|n| n > 0) && found.max_map_count.unwrap() > 0);
        let text = &found.lines()[0].1;
        assert_eq!(text.contains("no io_uring"), found.io_uring_refused.is_some(), "{text}");
    }
}
