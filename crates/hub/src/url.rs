//! Addresses of the hub and of the hosts that it redirects to: only as much of URLs as that takes.

use crate::error::{Error, Result};

/// An `http` or `https` URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// `https`, say.
    pub scheme: String,
    /// Host, and port if there is one; in lower case.
    pub authority: String,
    /// Path and query, from the first `/` on. Already percent-encoded.
    pub path: String,
}

impl Url {
    /// # Errors
    /// Anything but `http://HOST..` and `https://HOST..`, and user names in it: they would be shown in messages.
    pub fn parse(text: &str) -> Result<Url> {
        let wrong = || Error::Name(format!("{text:?}: expected an URL such as https://huggingface.co"));
        let (scheme, rest) = text.split_once("://").ok_or_else(wrong)?;
        let scheme = scheme.to_ascii_lowercase();
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let path = path.split('#').next().unwrap_or_default();
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_:[]".contains(c);
        if !["http", "https"].contains(&&*scheme) || authority.is_empty() || !authority.chars().all(plain) {
            return Err(wrong());
        }
        if path.chars().any(|c| c.is_control() || c.is_whitespace() || !c.is_ascii()) {
            return Err(wrong());
        }
        let slash = if path.starts_with('/') { "" } else { "/" };
        Ok(Url { scheme, authority: authority.to_ascii_lowercase(), path: format!("{slash}{path}") })
    }

    /// The URL that a redirect from this one names.
    pub fn join(&self, location: &str) -> Result<Url> {
        if location.contains("://") {
            return Url::parse(location);
        }
        if let Some(rest) = location.strip_prefix("//") {
            return Url::parse(&format!("{}://{rest}", self.scheme));
        }
        let origin = format!("{}://{}", self.scheme, self.authority);
        if location.starts_with('/') {
            return Url::parse(&format!("{origin}{location}"));
        }
        let path = self.path.split('?').next().unwrap_or_default();
        let folder = &path[..path.rfind('/').map_or(0, |at| at + 1)];
        Url::parse(&format!("{origin}{folder}{location}"))
    }

    /// Whether both name the same server: scheme, host and port. A token for one goes to no other.
    pub fn is_same_server(&self, other: &Url) -> bool {
        let port = |url: &Url| match url.scheme.as_str() {
            "http" => ":80",
            _ => ":443",
        };
        let plain = |url: &Url| url.authority.strip_suffix(port(url)).unwrap_or(&url.authority).to_owned();
        self.scheme == other.scheme && plain(self) == plain(other)
    }

    /// Without the query, which may be a signature.
    pub fn shown(&self) -> String {
        format!("{}://{}{}", self.scheme, self.authority, self.path.split('?').next().unwrap_or_default())
    }
}

impl std::fmt::Display for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}://{}{}", self.scheme, self.authority, self.path)
    }
}

/// Percent-encodes a path; its slashes stay.
pub fn encoded(path: &str) -> String {
    let mut out = String::new();
    for byte in path.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => out.push(char::from(byte)),
            other => out += &format!("%{other:02X}"),
        }
    }
    out
}

/// Undoes [`encoded`]. `None` for what is no UTF-8 and for a `%` without two digits.
pub fn decoded(path: &str) -> Option<String> {
    let (mut out, mut bytes) = (Vec::new(), path.bytes());
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let digits = [bytes.next()?, bytes.next()?];
            out.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            out.push(byte);
        }
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_may_be_whole_or_relative() {
        let from = Url::parse("https://Hub.example:8443/a/b?x=1").unwrap();
        assert_eq!(from.authority, "hub.example:8443");
        for (location, whole) in [
            ("/c?d=e", "https://hub.example:8443/c?d=e"),
            ("c", "https://hub.example:8443/a/c"),
            ("//cdn.example/c", "https://cdn.example/c"),
            ("http://cdn.example", "http://cdn.example/"),
        ] {
            assert_eq!(from.join(location).unwrap().to_string(), whole);
        }
        for wrong in ["ftp://x/", "https:///x", "https://me:secret@x/", "https://x/a b", "x"] {
            assert!(Url::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn servers_are_the_same_only_with_scheme_host_and_port() {
        let one = Url::parse("https://hub.example/a").unwrap();
        for (other, same) in [
            ("https://HUB.example:443/b", true),
            ("http://hub.example/a", false),
            ("https://hub.example:444/", false),
            ("https://hub.example.evil/", false),
            ("https://cdn.hub.example/", false),
        ] {
            assert_eq!(one.is_same_server(&Url::parse(other).unwrap()), same, "{other}");
        }
    }

    #[test]
    fn paths_are_encoded_and_decoded() {
        for (plain, coded) in [("a/b-1.gguf", "a/b-1.gguf"), ("a b%é", "a%20b%25%C3%A9")] {
            assert_eq!(encoded(plain), coded);
            assert_eq!(decoded(coded).unwrap(), plain);
        }
        assert!(decoded("%2").is_none() && decoded("%ff").is_none() && decoded("%zz").is_none());
    }
}
