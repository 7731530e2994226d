//! Who may ask: by key, by the name that the server is called by, and by the page that asks.
//!
//! A server on loopback is reached by every page of a browser on the same machine. A page of another origin cannot read answers, but it can make the
//! server work, and by giving its own name the address 127.0.0.1 (DNS rebinding) it becomes the same origin. So names that are not loopback's
//! are refused there, and pages of other origins everywhere, unless they are named.

use std::net::Ipv4Addr;
use std::sync::Arc;

use anyhow::{Result, ensure};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use crate::app::App;
use crate::context::IGNORED;
use crate::error::ApiError;
use crate::page;

/// Keys of which a request must have one. Only their digests are kept.
#[derive(Clone, Debug, Default)]
pub struct Keys(Vec<blake3::Hash>);

impl Keys {
    /// # Errors
    /// A key that no header could carry.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Result<Keys> {
        let one = |key: &str| {
            let is_fit = !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic());
            ensure!(is_fit, "a key must be letters, digits and signs of ASCII, without spaces");
            Ok(blake3::hash(key.as_bytes()))
        };
        Ok(Keys(keys.into_iter().map(one).collect::<Result<_>>()?))
    }

    /// These and others.
    pub fn and(mut self, more: Keys) -> Keys {
        self.0.extend(more.0);
        self
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes the same time whatever the key and wherever it differs: digests are compared in constant time, and all of them.
    fn has(&self, key: &str) -> bool {
        let given = blake3::hash(key.as_bytes());
        self.0.iter().fold(false, |found, key| found | (*key == given))
    }
}

/// Who may ask.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// None: everybody.
    pub keys: Keys,
    /// Names of the server in requests, beside those of loopback.
    pub hosts: Vec<String>,
    /// Pages whose scripts may ask and read the answers: `https://example.org`, or `*` for all.
    pub origins: Vec<String>,
}

/// What a browser says of a page that has no origin of its own.
const NO_ORIGIN: &str = "null";

impl Access {
    /// What browsers are told, where any page of another origin may ask.
    ///
    /// # Errors
    /// An origin that is none.
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
                    "--cors-origin {NO_ORIGIN}: that is what all pages without an origin say, such as files; only '*' lets them ask"
                );
                ensure!(is_fit, "--cors-origin {origin}: an origin is like https://example.org, or * for all");
                Ok(HeaderValue::from_str(origin)?)
            };
            AllowOrigin::list(self.origins.iter().map(one).collect::<Result<Vec<_>>>()?)
        };
        // `*` would leave out `authorization`.
        let (methods, headers) = (AllowMethods::mirror_request(), AllowHeaders::mirror_request());
        let layer = CorsLayer::new().allow_origin(origin).allow_methods(methods).allow_headers(headers);
        let exposed = ["x-request-id", "request-id", IGNORED, "retry-after"];
        Ok(Some(layer.expose_headers(exposed.map(|name| name.parse().expect("a header's name")))))
    }

    fn takes_all_origins(&self) -> bool {
        self.origins.iter().any(|o| o == "*")
    }

    /// `on_loopback`: the server can be reached from this machine alone, over TCP.
    fn check(&self, request: &Request, on_loopback: bool) -> Result<(), ApiError> {
        let headers = request.headers();
        let text = |name| headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or("\u{fffd}"));
        // 1. The name that the server was asked by
        let hosts = headers.get_all(header::HOST).iter().count();
        if hosts > 1 || hosts == 0 && request.version() == Version::HTTP_11 {
            return Err(ApiError::invalid("", format!("a request has one Host header; this one has {hosts}")));
        }
        let host = request.uri().authority().map(|a| a.as_str()).or_else(|| text(header::HOST));
        if on_loopback
            && let Some(host) = host.map(name_of)
            && !(is_loopback(host) || self.hosts.iter().any(|h| h.eq_ignore_ascii_case(host)))
        {
            let message = format!(
                "this server is not called {host}: ask localhost, 127.0.0.1 or [::1], or start it with --allowed-host NAME"
            );
            return Err(ApiError::forbidden(message));
        }
        // 2. The page that asks; browsers say so
        if let Some(origin) = text(header::ORIGIN) {
            let own = origin.split_once("://").map(|(_, authority)| authority);
            let is_own = own.is_some() && own == host;
            if !is_own && !self.takes_all_origins() && !self.origins.iter().any(|o| o == origin) {
                let message = if origin == NO_ORIGIN {
                    "pages without an origin, such as files, may not ask this server: start it with --cors-origin '*'"
                        .to_owned()
                } else {
                    format!("pages of {origin} may not ask this server: start it with --cors-origin {origin}")
                };
                return Err(ApiError::forbidden(message));
            }
        }
        // 3. The key; whether the server is there may be asked without, and the page must be there to be given one
        let path = request.uri().path();
        if self.keys.is_empty() || path == "/health" || page::serves(path) {
            return Ok(());
        }
        match key(headers) {
            Some(key) if self.keys.has(key) => Ok(()),
            Some(_) => Err(ApiError::unauthorized("the API key is not one of this server's")),
            None => Err(ApiError::unauthorized(
                "an API key is needed: send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`",
            )),
        }
    }
}

/// Without its port.
fn name_of(authority: &str) -> &str {
    let name = authority.rsplit_once('@').map_or(authority, |(_, name)| name);
    match name.strip_prefix('[').and_then(|v6| v6.split_once(']')) {
        Some((v6, _)) => v6,
        None => name.rsplit_once(':').map_or(name, |(name, _)| name),
    }
}

fn is_loopback(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost") || name == "::1" || name.parse().is_ok_and(|a: Ipv4Addr| a.is_loopback())
}

/// As OpenAI's clients send it, or Anthropic's.
fn key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    let own = || headers.get("x-api-key").and_then(|value| value.to_str().ok()).map(str::trim);
    bearer.filter(|key| !key.is_empty()).or_else(own)
}

/// Bodies are taken as they are.
fn check_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    let plain = |value: &HeaderValue| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity");
    match headers.get_all(header::CONTENT_ENCODING).iter().find(|value| !plain(value)) {
        None => Ok(()),
        Some(value) => {
            let name: String = String::from_utf8_lossy(value.as_bytes()).chars().take(40).collect();
            let message = format!("a body with content-encoding {name} is not taken: send it uncompressed");
            Err(ApiError { status: StatusCode::UNSUPPORTED_MEDIA_TYPE, ..ApiError::invalid("", message) })
        }
    }
}

/// Lets through who may ask.
pub async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let allowed = app.settings().access.check(&request, app.is_on_loopback());
    match allowed.and_then(|()| check_encoding(request.headers())) {
        Ok(()) => next.run(request).await,
        Err(error) => {
            let needs_key = error.status == StatusCode::UNAUTHORIZED;
            let mut response = error.into_response();
            if response.status() == StatusCode::UNSUPPORTED_MEDIA_TYPE {
                response.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            }
            if needs_key {
                response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            response
        }
    }
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
        // The name in the request line is the one that counts.
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
    fn bodies_are_taken_as_they_are() {
        let found = |values: &[&'static str]| {
            let name = |value: &&'static str| (header::CONTENT_ENCODING, HeaderValue::from_static(value));
            check_encoding(&values.iter().map(name).collect()).map_or_else(|e| e.status.as_u16(), |()| 200)
        };
        assert_eq!([found(&[]), found(&["identity"]), found(&[" Identity"])], [200; 3]);
        assert_eq!([found(&["gzip"]), found(&["identity, br"]), found(&[""])], [415; 3]);
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
        // Whatever a refusal says to start the server with can be given.
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
