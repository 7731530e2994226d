//! Requests to the hub and to the hosts that it redirects to. ureq with rustls over ring: blocking and small, and the workspace builds both it and ring already.
//!
//! Redirects are followed here and not by ureq, since the token must reach the hub and nobody else.

use std::env;
use std::fs;
use std::io::Read;
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ureq::http::{HeaderMap, Response};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy};

use crate::error::{Error, Result};
use crate::settings::Settings;
use crate::url::Url;

const REDIRECTS: usize = 10;
const CONNECT: Duration = Duration::from_secs(15);
/// The longest pause between two tries, if the server asks for none.
const LONGEST_PAUSE: Duration = Duration::from_secs(20);
/// The longest pause that a server may ask for.
const MAX_PAUSE: Duration = Duration::from_secs(300);
/// Bytes of a body that says what went wrong.
const MAX_MESSAGE: u64 = 4096;
/// Files of certificates that distributions have.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Sends requests.
pub struct Client {
    settings: Settings,
    http: Agent,
    https: OnceLock<Agent>,
}

/// An answer, and where it came from after redirects.
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Body,
    /// The last address.
    pub url: Url,
}

/// Why a request failed.
#[derive(Debug)]
pub enum Failure {
    /// Another try may do: after so long, if the server says.
    Again(Error, Option<Duration>),
    /// None will.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(e: Error) -> Failure {
        Failure::Final(e)
    }
}

impl Client {
    /// A client for the hub of `settings`.
    pub fn new(settings: Settings) -> Client {
        let http = agent(&settings, proxy(&["HTTP_PROXY", "http_proxy"]), None);
        Client { settings, http, https: OnceLock::new() }
    }

    /// What it was made with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The hub's address of `path`, which begins with a slash and is encoded.
    pub fn at(&self, path: &str) -> Url {
        let endpoint = &self.settings.endpoint;
        Url { path: format!("{}{path}", endpoint.path), ..endpoint.clone() }
    }

    /// Whether an address is one of the hub's own.
    pub fn is_hub(&self, url: &Url) -> bool {
        url.is_same_server(&self.settings.endpoint)
    }

    fn agent(&self, url: &Url) -> &Agent {
        match url.scheme.as_str() {
            "http" => &self.http,
            _ => self.https.get_or_init(|| {
                let proxy = proxy(&["HTTPS_PROXY", "https_proxy"]);
                agent(&self.settings, proxy, Some(tls()))
            }),
        }
    }

    /// Sends a GET, of the bytes `[range.0, range.1)` if they are given, and follows redirects.
    pub fn get(&self, url: &Url, range: Option<(u64, u64)>) -> Result<Answer, Failure> {
        let mut url = url.clone();
        for _ in 0..REDIRECTS {
            let answer = self.send(&url, false, range)?;
            match location(&answer.headers, answer.status) {
                Some(to) => url = self.redirected(&url, to)?,
                None => return Ok(Answer { url, ..answer }),
            }
        }
        Err(Error::Answer { url: url.shown(), what: "too many redirects".to_owned() }.into())
    }

    /// Sends a HEAD, and follows redirects of the hub to itself. The hub's own answer describes the file, not that of the host which has the bytes.
    pub fn head(&self, url: &Url) -> Result<Answer, Failure> {
        let mut url = url.clone();
        for _ in 0..REDIRECTS {
            let answer = self.send(&url, true, None)?;
            match location(&answer.headers, answer.status).map(|to| self.redirected(&url, to)).transpose()? {
                Some(to) if self.is_hub(&to) && !answer.headers.contains_key("x-linked-etag") => url = to,
                _ => return Ok(Answer { url, ..answer }),
            }
        }
        Err(Error::Answer { url: url.shown(), what: "too many redirects".to_owned() }.into())
    }

    /// Where a redirect leads; never from `https` to `http`.
    pub fn redirected(&self, from: &Url, location: &str) -> Result<Url, Failure> {
        let wrong = |what: String| Failure::Final(Error::Answer { url: from.shown(), what });
        let to = from.join(location).map_err(|_| wrong("redirects to what is no URL".to_owned()))?;
        if from.scheme == "https" && to.scheme != "https" {
            return Err(wrong(format!("redirects to {}, which is not encrypted", to.shown())));
        }
        Ok(to)
    }

    fn send(&self, url: &Url, is_head: bool, range: Option<(u64, u64)>) -> Result<Answer, Failure> {
        let agent = self.agent(url);
        let text = url.to_string();
        let mut request = if is_head { agent.head(&text) } else { agent.get(&text) };
        // Compressed bytes would not be those that are summed.
        request = request.header("accept-encoding", "identity");
        if let Some(token) = self.settings.token.as_ref().filter(|_| self.is_hub(url)) {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if let Some((begin, end)) = range {
            request = request.header("range", format!("bytes={begin}-{}", end - 1));
        }
        let response: Response<Body> = request.call().map_err(|e| self.unreachable(url, &e.to_string()))?;
        let (parts, body) = response.into_parts();
        Ok(Answer { status: parts.status.as_u16(), headers: parts.headers, body, url: url.clone() })
    }

    /// The failure of a connection.
    pub fn unreachable(&self, url: &Url, cause: &str) -> Failure {
        Failure::Again(
            Error::Unreachable { host: url.authority.clone(), cause: cause.trim_start_matches("io: ").to_owned() },
            None,
        )
    }

    /// What a status other than 2xx means. `what` is the repository or file that was asked for.
    pub fn refused(&self, answer: Answer, repo: &str, what: &str) -> Failure {
        let Answer { status, headers, body, url } = answer;
        let header =
            |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
        let host = self.settings.host();
        let page = format!("{}/{repo}", self.settings.endpoint);
        let token = match &self.settings.token {
            Some(_) => "the token (HF_TOKEN, or the one of `hf auth login`) does not open it",
            None => "set HF_TOKEN to a token of an account that may read it",
        };
        let code = header("x-error-code");
        let final_ = match (status, &*code) {
            (401 | 403, "GatedRepo") => Error::Denied(match &self.settings.token {
                Some(_) => format!("{repo}: gated: ask for access at {page} with the account of your token"),
                None => format!(
                    "{repo}: gated: accept its terms at {page}, and set HF_TOKEN to a token of that account ({host}/settings/tokens)"
                ),
            }),
            (404, "RevisionNotFound") => Error::NotFound(format!("{repo}: no such revision ({what})")),
            (404, "EntryNotFound") => Error::NotFound(format!("{repo}: no such file ({what})")),
            (401 | 404, _) if header("x-error-message").starts_with("Invalid credentials") => {
                Error::Denied(format!("{host} does not know the token in HF_TOKEN, or the one of `hf auth login`"))
            }
            (401 | 404, _) => Error::NotFound(format!("{repo}: no such model at {host}, or a private one: {token}")),
            (403, _) => Error::Denied(format!("{repo}: {host} refuses it: {token}")),
            (429, _) | (500..=599, _) | (408, _) => {
                let reason = match status {
                    429 => "too many requests: a token (HF_TOKEN) raises the limit",
                    408 => "timed out",
                    _ => "the server has a fault",
                };
                let asked = header("retry-after").trim().parse().ok().map(Duration::from_secs);
                let error = Error::Busy { host: url.authority.clone(), status, reason: reason.to_owned() };
                return if asked.is_some_and(|asked| asked > MAX_PAUSE) {
                    Failure::Final(error)
                } else {
                    Failure::Again(error, asked)
                };
            }
            _ => {
                let mut message = String::new();
                let _ = body.into_reader().take(MAX_MESSAGE).read_to_string(&mut message);
                let line = message.lines().next().unwrap_or_default().chars().take(200).collect::<String>();
                Error::Answer { url: url.shown(), what: format!("status {status}, {line:?}") }
            }
        };
        Failure::Final(final_)
    }

    /// Tries something until it succeeds, fails for good, has failed too often, or is to stop. `waits` hears of pauses.
    pub fn trying<T>(
        &self,
        is_stopped: &dyn Fn() -> bool,
        waits: &dyn Fn(&Error, Duration),
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T> {
        let mut tries = 0;
        loop {
            let (error, asked) = match attempt() {
                Ok(done) => return Ok(done),
                Err(Failure::Final(e)) => return Err(e),
                Err(Failure::Again(e, asked)) => (e, asked),
            };
            tries += 1;
            // Whoever has no network shall not wait for long.
            let all = self.settings.tries;
            let most = if matches!(error, Error::Unreachable { .. }) { all.div_ceil(2) } else { all };
            if tries >= most {
                return Err(error);
            }
            let pause = self.pause(tries, asked);
            waits(&error, pause);
            let until = Instant::now() + pause;
            while Instant::now() < until {
                if is_stopped() {
                    return Err(Error::Stopped);
                }
                std::thread::sleep(Duration::from_millis(50).min(pause));
            }
        }
    }

    /// How long to wait after so many tries.
    pub fn pause(&self, tries: u32, asked: Option<Duration>) -> Duration {
        // Not all of a crowd at the same time.
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.subsec_nanos());
        let jitter = self.settings.pause.mul_f64(f64::from(nanos % 1000) / 4000.0);
        let doubled = self.settings.pause.saturating_mul(1 << (tries.saturating_sub(1)).min(10)).min(LONGEST_PAUSE);
        asked.unwrap_or(doubled + jitter)
    }
}

/// Where an answer leads, if it is a redirect.
pub fn location(headers: &HeaderMap, status: u16) -> Option<&str> {
    let is_redirect = [301, 302, 303, 307, 308].contains(&status);
    headers.get("location").filter(|_| is_redirect)?.to_str().ok()
}

fn agent(settings: &Settings, proxy: Option<Proxy>, tls: Option<TlsConfig>) -> Agent {
    let mut config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .proxy(proxy)
        .user_agent(concat!("sluice/", env!("CARGO_PKG_VERSION")))
        .timeout_connect(Some(CONNECT))
        .timeout_per_read(Some(settings.patience))
        .timeout_per_write(Some(settings.patience))
        .timeout_recv_response(Some(settings.patience))
        .input_buffer_size(256 << 10)
        .max_idle_connections(2 * settings.connections)
        .max_idle_connections_per_host(settings.connections);
    if let Some(tls) = tls {
        config = config.tls_config(tls);
    }
    config.build().into()
}

/// The proxy of a scheme; NO_PROXY is obeyed by ureq.
fn proxy(names: &[&str]) -> Option<Proxy> {
    let all = names.iter().chain(&["ALL_PROXY", "all_proxy"]);
    let named = all.filter_map(|name| env::var(name).ok()).find(|value| !value.is_empty())?;
    // ureq reads exclusions from the environment only with the proxy.
    let url = named.clone();
    let exclusions = ["NO_PROXY", "no_proxy"].iter().find_map(|name| env::var(name).ok()).unwrap_or_default();
    let rest = url.split_once("://").map_or(&*url, |(_, rest)| rest).trim_end_matches('/');
    let protocol = match url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase()) {
        Some(scheme) if scheme == "https" => ureq::ProxyProtocol::Https,
        _ => ureq::ProxyProtocol::Http,
    };
    let (user, place) = rest.rsplit_once('@').map_or((None, rest), |(user, place)| (Some(user), place));
    let (host, port) = match place.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?))) {
        Some((host, port)) => (host, Some(port)),
        None => (place, None),
    };
    let mut builder = Proxy::builder(protocol).host(host);
    if let Some(port) = port {
        builder = builder.port(port);
    }
    if let Some((name, password)) = user.map(|user| user.split_once(':').unwrap_or((user, ""))) {
        let plain = |text: &str| crate::url::decoded(text).unwrap_or_else(|| text.to_owned());
        builder = builder.username(&plain(name)).password(&plain(password));
    }
    for one in exclusions.split(',').map(str::trim).filter(|one| !one.is_empty()) {
        builder = builder.no_proxy(one);
    }
    builder.build().ok()
}

/// Certificates of this machine, which its owner may have added to; or else Mozilla's.
fn tls() -> TlsConfig {
    let named = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"].iter().filter_map(env::var_os).map(std::path::PathBuf::from);
    let files = named.chain(BUNDLES.iter().map(Into::into));
    let certificates = files.filter_map(|file| fs::read(file).ok()).find_map(|pem| {
        let all = parse_pem(&pem).filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        });
        let all: Vec<Certificate<'static>> = all.collect();
        (!all.is_empty()).then_some(all)
    });
    let roots = certificates.map_or(RootCerts::WebPki, |all| RootCerts::Specific(Arc::new(all)));
    TlsConfig::builder().root_certs(roots).build()
}
