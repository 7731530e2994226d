//! Files that are brought into the page cache through their map.

use std::io;
use std::ops::Range;

use super::read::ReadFile;
use crate::map::Map;
use crate::page_cache::resident_bytes;

/// Brings a part of a file into the page cache through the file's map, if it is not there. Unlike reads, this uses large pages and requests from the start. The
/// page table ends as it was, so that nothing counts as this process's memory.
pub(crate) fn populate_cache(file: &ReadFile, map: &Map, range: Range<usize>) -> io::Result<()> {
    let (start, len) = (range.start as u64, range.len() as u64);
    if resident_bytes(&file.buffered, start, len).is_ok_and(|cached| cached >= len) {
        return Ok(());
    }
    map.populate(range.clone())?;
    map.leave(range)
}
