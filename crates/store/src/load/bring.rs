//! Files that are brought into the page cache through their map.

use std::io;
use std::ops::Range;

use super::read::ReadFile;
use crate::map::Map;
use crate::page_cache::resident_bytes;

/// Brings a part of a file into the page cache by the file's map, if it is not there: in large pages and by requests as large, where reads begin with small ones. The
/// page table is left as it was before, so that nothing of it counts as this process's memory.
pub(crate) fn populate_cache(file: &ReadFile, map: &Map, range: Range<usize>) -> io::Result<()> {
    let (start, len) = (range.start as u64, range.len() as u64);
    if resident_bytes(&file.buffered, start, len).is_ok_and(|cached| cached >= len) {
        return Ok(());
    }
    map.populate(range.clone())?;
    map.leave(range)
}
