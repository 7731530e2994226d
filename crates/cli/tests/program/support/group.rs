//! Runs programs in memory control groups of their own (version 1's controller, which also charges page cache).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const CONTROLLER: &str = "/sys/fs/cgroup/memory";

/// A group, removed when dropped.
pub struct Group(PathBuf);

impl Group {
    /// A group with a limit in bytes, or without one. `None`, with a note, if groups cannot be created.
    pub fn new(limit: Option<u64>) -> Option<Group> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let group = Group(Path::new(CONTROLLER).join(format!("sluice-test-{}-{number}", std::process::id())));
        let made = fs::create_dir(&group.0).and_then(|()| {
            let limit = limit.map_or("-1".to_owned(), |bytes| bytes.to_string());
            fs::write(group.0.join("memory.limit_in_bytes"), limit)
        });
        if let Err(e) = made {
            eprintln!("SKIPPED: no memory control group can be made at {CONTROLLER}: {e}");
            return None;
        }
        Some(group)
    }

    /// Runs a program in the group to its end; nothing of it is charged elsewhere. One at a time, since how fast pages come back is part of the test.
    pub fn run(&self, command: &Command) -> Output {
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
        let enter = format!("echo $$ > '{}' && exec \"$@\"", self.0.join("cgroup.procs").display());
        let mut inside = Command::new("sh");
        inside.args(["-c", &enter, "sh"]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside.stdin(Stdio::null()).output().unwrap()
    }

    /// The most bytes that were charged to it at once.
    pub fn peak(&self) -> u64 {
        fs::read_to_string(self.0.join("memory.max_usage_in_bytes")).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..100 {
            let _ = fs::write(self.0.join("memory.force_empty"), "0");
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            // A process that has just ended is still counted.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
