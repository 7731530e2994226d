//! The page at `/`: a chat in the browser. Its files lie in `crates/server/page` and are compiled in, so that it works without a network. Nothing on it comes
//! from elsewhere, and its content security policy has the browser enforce that: whatever a model writes, it cannot run as a script nor call home.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::app::App;
use crate::error::ApiError;

/// What a browser may do with the page. No script or style stands in the HTML itself, and scripts cannot turn text into HTML but through DOMPurify's policy.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify";

const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    // Kept by the browser, but asked for each time: another version of the server may run at the same address.
    (header::CACHE_CONTROL, "no-cache"),
];

struct File {
    /// In the folder, and behind `/page/`.
    name: &'static str,
    bytes: &'static [u8],
}

macro_rules! files {
    ($($name:literal)*) => {
        [$(File { name: $name, bytes: include_bytes!(concat!("../page/", $name)) }),*]
    };
}

static INDEX: [File; 1] = files!["index.html"];

static FILES: [File; 26] = files![
    "answers.js" "chat.js" "composer.js" "conversations.js" "favicon.svg" "html.js" "log.js" "main.js" "markdown.js" "metrics.js" "settings.js" "sidebar.js"
    "storage.js" "style.css" "theme.js" "thinking.js" "tiers.js"
    "vendor/LICENSE-dompurify.txt" "vendor/LICENSE-htm.txt" "vendor/LICENSE-marked.txt" "vendor/LICENSE-preact.txt"
    "vendor/hooks.js" "vendor/htm.js" "vendor/marked.js" "vendor/preact.js" "vendor/purify.js"
];

pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/", get(|headers: HeaderMap| async move { INDEX[0].answer(&headers) }))
        .route("/page/{*name}", get(named))
}

/// Whether a path is the page's.
pub fn serves(path: &str) -> bool {
    path == "/" || path.starts_with("/page/")
}

async fn named(Path(name): Path<String>, headers: HeaderMap) -> Result<Response, ApiError> {
    let found = FILES.iter().find(|file| file.name == name);
    found.map(|file| file.answer(&headers)).ok_or_else(|| ApiError::not_found(&format!("/page/{name}")))
}

impl File {
    fn kind(&self) -> &'static str {
        match self.name.rsplit('.').next() {
            Some("html") => "text/html; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            Some("svg") => "image/svg+xml",
            _ => "text/plain; charset=utf-8",
        }
    }

    /// The same for the same bytes, in every process of this build.
    fn tag(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.bytes.hash(&mut hasher);
        format!("\"{:016x}\"", hasher.finish())
    }

    fn answer(&self, asked: &HeaderMap) -> Response {
        let tag = self.tag();
        let known = asked.get_all(header::IF_NONE_MATCH).iter().filter_map(|v| v.to_str().ok());
        // `W/` says that somebody on the way has packed it: the content is the same.
        let is_known = known
            .flat_map(|v| v.split(','))
            .any(|v| matches!(v.trim(), "*") || v.trim().trim_start_matches("W/") == tag);
        let headers = (HEADERS, [(header::ETAG, tag)]);
        if is_known {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
        (headers, [(header::CONTENT_TYPE, self.kind())], self.bytes).into_response()
    }
}
