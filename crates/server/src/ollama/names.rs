//! Names of models with tags, as Ollama's clients write them: `NAME:TAG`.

use crate::http::state::AppState;

/// A model's name with its tag; without one, with `:latest`.
pub fn tagged(name: &str) -> String {
    if split_tag(name).1.is_some() { name.to_owned() } else { format!("{name}:latest") }
}

/// Splits off the tag, which follows the last `/`.
pub fn split_tag(name: &str) -> (&str, Option<&str>) {
    match name.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (name, None),
    }
}

/// The name that a client means. A tag that no model has is dropped.
pub fn requested<'a>(app: &AppState, name: Option<&'a str>) -> Option<&'a str> {
    name.map(|name| if app.models.find(name).is_some() { name } else { split_tag(name).0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_tags() {
        for (name, expected) in [("a", "a:latest"), ("a:4b", "a:4b"), ("host:80/a", "host:80/a:latest")] {
            assert_eq!(tagged(name), expected);
        }
        assert_eq!(split_tag("org/a:latest"), ("org/a", Some("latest")));
        assert_eq!(split_tag("host:80/a"), ("host:80/a", None));
    }
}
