//! All that is found.

use serde::Serialize;

use super::folders::{self, Disk, Folder};
use super::graphics::Graphics;
use super::limits::Limits;
use super::memory::Memory;
use super::processor::Processor;
use crate::version::version;

#[derive(Serialize)]
pub struct Report {
    pub version: String,
    pub program: Option<String>,
    pub processor: Processor,
    pub memory: Memory,
    pub gpu: Graphics,
    pub limits: Limits,
    pub disks: Vec<Disk>,
    pub folders: Vec<Folder>,
}

impl Report {
    /// Looks at everything; measures memory and disks only if asked to.
    pub fn gather(measures: bool) -> Report {
        let (folders, disks) = folders::find(measures);
        Report {
            version: version(),
            program: std::env::current_exe().ok().map(|path| path.display().to_string()),
            processor: Processor::find(),
            memory: Memory::find(measures),
            gpu: Graphics::find(),
            limits: Limits::find(),
            disks,
            folders,
        }
    }

    /// Name and text of each line.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = vec![("sluice", self.version.clone())];
        lines.extend(self.program.iter().map(|path| ("", path.clone())));
        lines.extend(self.processor.lines());
        lines.extend(self.memory.lines());
        lines.extend(self.gpu.lines());
        lines.extend(self.limits.lines());
        lines.extend(self.disks.iter().flat_map(Disk::lines));
        lines.extend(self.folders.iter().map(Folder::line));
        lines
    }
}
