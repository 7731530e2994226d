//! Error messages of templates.

/// Bytes of an error's text: a template may raise any.
const MAX_ERROR: usize = 4 << 10;

/// An error message, cut if it is too long.
pub(super) fn shortened(mut text: String) -> String {
    if text.len() > MAX_ERROR {
        text.truncate(text.floor_char_boundary(MAX_ERROR));
        text.push_str(" ..");
    }
    text
}
