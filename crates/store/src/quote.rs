//! Names out of files, made safe to print.

/// A name out of a file, safe to print on one line: quoted, escaped, and cut at 120 characters.
pub(crate) fn quoted(name: &str) -> String {
    match name.char_indices().nth(120) {
        None => format!("{name:?}"),
        Some((cut, _)) => format!("{:?}...", &name[..cut]),
    }
}
