//! Who may use the server: decided by the API key, the `Host` header and the `Origin` header.
//!
//! Every page in a browser on this machine can reach a server on loopback. A page of another origin cannot read the answers, but it can make the server work.
//! And if it resolves its own name to 127.0.0.1 (DNS rebinding), it becomes the same origin. So a server on loopback refuses hosts that are not loopback names,
//! and every server refuses other origins, unless they are allowed.

use std::net::Ipv4Addr;

use anyhow::{Result, ensure};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Version, header};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use crate::http::context::IGNORED_HEADER;
use crate::http::error::ApiError;

/// API keys. Only their digests are kept.
#[derive(Clone, Debug, Default)]
pub struct Keys(Vec<blake3::Hash>);

impl Keys {
    /// Digests of these keys.
    ///
    /// # Errors
    /// A key that a header cannot carry.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Result<Keys> {
        let one = |key: &str| {
            let is_fit = !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic());
            ensure!(is_fit, "a key must consist of printable ASCII characters without spaces");
            Ok(blake3::hash(key.as_bytes()))
        };
        Ok(Keys(keys.into_iter().map(one).collect::<Result<_>>()?))
    }

    /// These keys and `more`.
    #[must_use]
    pub fn merge(mut self, more: Keys) -> Keys {
        self.0.extend(more.0);
        self
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes the same time for every key: all digests are compared, each in constant time.
    fn contains(&self, key: &str) -> bool {
        let given = blake3::hash(key.as_bytes());
        self.0.iter().fold(false, |found, key| found | (*key == given))
    }
}

/// Who may use the server.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Accepted keys; if there are none, no key is needed.
    pub keys: Keys,
    /// Accepted host names, besides loopback's.
    pub hosts: Vec<String>,
    /// Origins of pages that may use the server: `https://example.org`, or `*` for all.
    pub origins: Vec<String>,
}

/// What a browser sends for a page without an origin.
const NO_ORIGIN: &str = "null";

impl Access {
    /// The CORS layer; `None` if no other origin is allowed.
    ///
    /// # Errors
    /// An invalid origin.
    pub fn cors(&self) -> Result<Option<CorsLayer>> {
        if self.origins.is_empty() {
            return Ok(None);
        }
        let origin = if self.takes_all_origins() {
            AllowOrigin::any()
        } else {
            let one = |origin: &String| {
                let is_fit = origin.contains("://") && !origin.ends_with('/');
                ensure!(
                    origin != NO_ORIGIN,
                    "--cors-origin {NO_ORIGIN}: all pages without an origin send this, such as local files; only '*' allows them"
                );
                ensure!(is_fit, "--cors-origin {origin}: an origin looks like https://example.org; use * for all");
                Ok(HeaderValue::from_str(origin)?)
            };
            AllowOrigin::list(self.origins.iter().map(one).collect::<Result<Vec<_>>>()?)
        };
        // `*` would not include `authorization`.
        let (methods, headers) = (AllowMethods::mirror_request(), AllowHeaders::mirror_request());
        let layer = CorsLayer::new().allow_origin(origin).allow_methods(methods).allow_headers(headers);
        let exposed = ["x-request-id", "request-id", IGNORED_HEADER, "retry-after"];
        Ok(Some(layer.expose_headers(exposed.map(|name| name.parse().expect("a header's name")))))
    }

    fn takes_all_origins(&self) -> bool {
        self.origins.iter().any(|o| o == "*")
    }

    /// Checks a request. `on_loopback`: the server is reached over TCP, and only from this machine.
    ///
    /// # Errors
    /// Why the request is refused.
    pub fn check(&self, request: &Request, on_loopback: bool) -> Result<(), ApiError> {
        let headers = request.headers();
        let text = |name| headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or("\u{fffd}"));
        // 1. The host
        let hosts = headers.get_all(header::HOST).iter().count();
        if hosts > 1 || hosts == 0 && request.version() == Version::HTTP_11 {
            return Err(ApiError::invalid("", format!("a request must have one Host header; this one has {hosts}")));
        }
        let host = request.uri().authority().map(|a| a.as_str()).or_else(|| text(header::HOST));
        if on_loopback
            && let Some(host) = host.map(host_name)
            && !(is_loopback(host) || self.hosts.iter().any(|h| h.eq_ignore_ascii_case(host)))
        {
            let message = format!(
                "the host {host} is not allowed: use localhost, 127.0.0.1 or [::1], or start the server with --allowed-host NAME"
            );
            return Err(ApiError::forbidden(message));
        }
        // 2. The origin, which browsers send
        if let Some(origin) = text(header::ORIGIN) {
            let own = origin.split_once("://").map(|(_, authority)| authority);
            let is_own = own.is_some() && own == host;
            if !is_own && !self.takes_all_origins() && !self.origins.iter().any(|o| o == origin) {
                let message = if origin == NO_ORIGIN {
                    "pages without an origin, such as local files, may not use this server: start it with --cors-origin '*'"
                        .to_owned()
                } else {
                    format!("pages of {origin} may not use this server: start it with --cors-origin {origin}")
                };
                return Err(ApiError::forbidden(message));
            }
        }
        // 3. The key
        if self.keys.is_empty() || needs_no_key(request.uri().path()) {
            return Ok(());
        }
        match api_key(headers) {
            Some(key) if self.keys.contains(key) => Ok(()),
            Some(_) => Err(ApiError::unauthorized("the API key is not valid")),
            None => Err(ApiError::unauthorized(
                "an API key is needed: send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`",
            )),
        }
    }
}

/// Whether a path is open to all: the page must load before it can be given a key.
fn needs_no_key(path: &str) -> bool {
    path == "/health" || path == "/" || path.starts_with("/page/")
}

/// The host without user and port.
fn host_name(authority: &str) -> &str {
    let name = authority.rsplit_once('@').map_or(authority, |(_, name)| name);
    match name.strip_prefix('[').and_then(|v6| v6.split_once(']')) {
        Some((v6, _)) => v6,
        None => name.rsplit_once(':').map_or(name, |(name, _)| name),
    }
}

fn is_loopback(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost") || name == "::1" || name.parse().is_ok_and(|a: Ipv4Addr| a.is_loopback())
}

/// The key as OpenAI's clients send it, or Anthropic's.
fn api_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    let own = || headers.get("x-api-key").and_then(|value| value.to_str().ok()).map(str::trim);
    bearer.filter(|key| !key.is_empty()).or_else(own)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn status(access: &Access, uri: &str, headers: &[(&str, &str)]) -> u16 {
        let mut request = Request::builder().uri(uri);
        if headers.iter().all(|(name, _)| *name != "host") {
            request = request.header("host", "localhost");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::empty()).unwrap();
        access.check(&request, true).map_or_else(|e| e.status.as_u16(), |()| 200)
    }

    #[test]
    fn on_loopback_only_its_own_names_are_answered() {
        let access = Access { hosts: vec!["box.lan".into()], ..Access::default() };
        for host in ["localhost", "LOCALHOST:1", "127.0.0.1:8080", "127.0.1.1", "[::1]:80", "[::1]", "box.lan:9"] {
            assert_eq!(status(&access, "/", &[("host", host)]), 200, "{host}");
        }
        for host in
            ["evil.example", "localhost.evil.example:8080", "10.0.0.1", "[::2]:80", "", "127.0.0.1.evil.example"]
        {
            assert_eq!(status(&access, "/", &[("host", host)]), 403, "{host}");
        }
        // The host in the request line takes precedence.
        assert_eq!(status(&access, "http://evil.example/", &[("host", "localhost")]), 403);
    }

    #[test]
    fn a_request_has_one_name_of_the_server() {
        let access = Access::default();
        let status = |request: axum::http::request::Builder| {
            let request = request.body(Body::empty()).unwrap();
            access.check(&request, true).map_or_else(|e| e.status.as_u16(), |()| 200)
        };
        assert_eq!(status(Request::builder().uri("/")), 400);
        assert_eq!(status(Request::builder().uri("/").header("host", "localhost").header("host", "localhost")), 400);
        assert_eq!(status(Request::builder().uri("/").version(Version::HTTP_10)), 200);
    }

    #[test]
    fn pages_of_other_origins_are_named_or_refused() {
        let asked = |access: &Access, origin| status(access, "/", &[("host", "localhost:8080"), ("origin", origin)]);
        let access = Access::default();
        assert_eq!(asked(&access, "http://localhost:8080"), 200);
        for origin in ["http://localhost:3000", "https://evil.example", "null"] {
            assert_eq!(asked(&access, origin), 403, "{origin}");
        }
        let access = Access { origins: vec!["http://localhost:3000".into()], ..Access::default() };
        assert_eq!(asked(&access, "http://localhost:3000"), 200);
        assert_eq!(asked(&access, "https://evil.example"), 403);
        assert_eq!(asked(&Access { origins: vec!["*".into()], ..Access::default() }, "null"), 200);
        assert!(Access { origins: vec!["example.org".into()], ..Access::default() }.cors().is_err());
        // Whatever a refusal tells the user to start the server with is accepted.
        let null = Access { origins: vec!["null".into()], ..Access::default() }.cors().unwrap_err().to_string();
        assert!(null.contains("only '*'"), "{null}");
        let request = Request::builder().uri("/").header("host", "localhost").header("origin", "null");
        let refused = Access::default().check(&request.body(Body::empty()).unwrap(), true).unwrap_err();
        assert!(refused.message.ends_with("start it with --cors-origin '*'"), "{}", refused.message);
    }

    #[test]
    fn one_of_the_keys_opens_all_but_the_question_whether_it_lives() {
        let access = Access { keys: Keys::new(["first", "second"]).unwrap(), ..Access::default() };
        for (name, value) in
            [("authorization", "Bearer first"), ("authorization", "bearer second"), ("x-api-key", "second")]
        {
            assert_eq!(status(&access, "/v1/models", &[(name, value)]), 200, "{value}");
        }
        for (name, value) in
            [("authorization", "Bearer firs"), ("authorization", "Basic first"), ("x-api-key", ""), ("x", "first")]
        {
            assert_eq!(status(&access, "/v1/models", &[(name, value)]), 401, "{value}");
        }
        assert_eq!(status(&access, "/health", &[]), 200);
        assert!(Keys::new(["a b"]).is_err() && Keys::new([""]).is_err());
    }
}
