//! The page at `/`: a chat in the browser. Its files are in `crates/server/page` and are compiled in, so it works without a network. It loads nothing from
//! elsewhere, and its content security policy makes the browser enforce that: text of a model can neither run as a script nor reach another server.

use std::hash::{DefaultHasher, Hash, Hasher};

use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::http::error::ApiError;
use crate::http::extract::PathName;
use crate::http::openapi::{Error, PublicErrors};

/// The content security policy. There is no inline script or style, and scripts can turn text into HTML only through DOMPurify's policy.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify";

const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    // Browsers may cache but must revalidate: another version of the server may run at the same address.
    (header::CACHE_CONTROL, "no-cache"),
];

struct PageFile {
    /// Path in `crates/server/page`, and below `/page/`.
    name: &'static str,
    bytes: &'static [u8],
}

macro_rules! files {
    ($($name:literal)*) => {
        [$(PageFile { name: $name, bytes: include_bytes!(concat!("../../page/", $name)) }),*]
    };
}

static INDEX: [PageFile; 1] = files!["index.html"];

static FILES: [PageFile; 26] = files![
    "answers.js" "chat.js" "composer.js" "conversations.js" "favicon.svg" "html.js" "log.js" "main.js" "markdown.js" "metrics.js" "settings.js" "sidebar.js"
    "storage.js" "style.css" "theme.js" "thinking.js" "tiers.js"
    "vendor/LICENSE-dompurify.txt" "vendor/LICENSE-htm.txt" "vendor/LICENSE-marked.txt" "vendor/LICENSE-preact.txt"
    "vendor/hooks.js" "vendor/htm.js" "vendor/marked.js" "vendor/preact.js" "vendor/purify.js"
];

/// The chat page.
#[utoipa::path(get, path = "/", tag = "page", security(()), responses(
    (status = 200, description = "HTML.", body = String, content_type = "text/html"),
    (status = 304, description = "`if-none-match` names the current version."), PublicErrors,
))]
pub async fn index(headers: HeaderMap) -> Response {
    INDEX[0].response(&headers)
}

/// A file of the chat page.
#[utoipa::path(get, path = "/page/{*name}", tag = "page", security(()),
    params(("name" = String, Path, description = "The file's name, which may contain slashes.")),
    responses(
        (status = 200, description = "The file.", content((String = "text/css"), (String = "text/javascript"), (String = "image/svg+xml"), (String = "text/html"), (String = "text/plain"))),
        (status = 304, description = "`if-none-match` names the current version."),
        (status = 400, description = "The name is not valid UTF-8.", body = Error),
        (status = 404, description = "No file has this name.", body = Error), PublicErrors,
    ),
)]
pub async fn named(PathName(name): PathName, headers: HeaderMap) -> Result<Response, ApiError> {
    let found = FILES.iter().find(|file| file.name == name);
    found.map(|file| file.response(&headers)).ok_or_else(|| ApiError::not_found(&format!("/page/{name}")))
}

impl PageFile {
    fn content_type(&self) -> &'static str {
        match self.name.rsplit('.').next() {
            Some("html") => "text/html; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            Some("svg") => "image/svg+xml",
            _ => "text/plain; charset=utf-8",
        }
    }

    /// The ETag: equal for equal bytes, in every process of this build.
    fn etag(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.bytes.hash(&mut hasher);
        format!("\"{:016x}\"", hasher.finish())
    }

    fn response(&self, request: &HeaderMap) -> Response {
        let tag = self.etag();
        let known = request.get_all(header::IF_NONE_MATCH).iter().filter_map(|v| v.to_str().ok());
        // A proxy that compresses adds `W/`; the content is the same.
        let is_known = known
            .flat_map(|v| v.split(','))
            .any(|v| matches!(v.trim(), "*") || v.trim().trim_start_matches("W/") == tag);
        let headers = (HEADERS, [(header::ETAG, tag)]);
        if is_known {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
        (headers, [(header::CONTENT_TYPE, self.content_type())], self.bytes).into_response()
    }
}
