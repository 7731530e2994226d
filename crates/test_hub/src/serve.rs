//! The two servers.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::content::{Content, git_sha1, sha256};
use crate::faults::Faults;
use crate::http::{self, Request};

/// Bytes that are written at once.
const PIECE: usize = 64 << 10;
/// The same where nothing is wrong.
const LARGE_PIECE: usize = 1 << 20;

#[derive(Clone)]
struct File {
    content: Content,
    sum: String,
    is_large: bool,
}

#[derive(Clone)]
struct Commit {
    id: String,
    files: BTreeMap<String, File>,
}

#[derive(Default)]
struct State {
    /// By repository; the last commit is that of `main`.
    repos: BTreeMap<String, Vec<Commit>>,
    faults: Faults,
    requests: Vec<Request>,
    /// Uses of a signed address that are left.
    signatures: Vec<Option<u32>>,
    /// Bytes that were sent for signed addresses.
    sent: u64,
    /// When the next of them may be sent, if there is a bandwidth.
    next: Option<Instant>,
}

/// A running hub.
pub struct TestHub {
    hub: SocketAddr,
    state: Arc<Mutex<State>>,
    is_over: Arc<AtomicBool>,
    servers: [SocketAddr; 2],
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(|e| e.into_inner())
}

impl TestHub {
    /// Starts both servers, on ports of this machine.
    pub fn start() -> TestHub {
        TestHub::at("127.0.0.1:0")
    }

    /// The same, with the hub on a given address.
    pub fn at(address: &str) -> TestHub {
        let (state, is_over) = (Arc::new(Mutex::new(State::default())), Arc::new(AtomicBool::new(false)));
        let listeners = [address, "127.0.0.1:0"].map(|address| TcpListener::bind(address).expect("a free port"));
        let servers = listeners.each_ref().map(|listener| listener.local_addr().expect("an address"));
        for (listener, is_for_bytes) in listeners.into_iter().zip([false, true]) {
            let (state, is_over) = (Arc::clone(&state), Arc::clone(&is_over));
            thread::spawn(move || {
                for stream in listener.incoming() {
                    if is_over.load(Ordering::Acquire) {
                        return;
                    }
                    let (Ok(stream), state) = (stream, Arc::clone(&state)) else { continue };
                    let bytes = servers[1];
                    let is_over = Arc::clone(&is_over);
                    thread::spawn(move || Connection { state, stream, bytes, is_for_bytes, is_over }.serve());
                }
            });
        }
        TestHub { hub: servers[0], state, is_over, servers }
    }

    /// Its address, for `HF_ENDPOINT`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.hub)
    }

    /// Adds a commit to a repository. Returns its id.
    pub fn commit(&self, repo: &str, files: &[(&str, Content)]) -> String {
        let mut state = locked(&self.state);
        let commits = state.repos.entry(repo.to_owned()).or_default();
        let mut all = commits.last().map(|commit| commit.files.clone()).unwrap_or_default();
        for (name, content) in files {
            let is_large = [".safetensors", ".gguf", ".bin", "tokenizer.json"].iter().any(|end| name.ends_with(end));
            let sum = if is_large { sha256(content) } else { git_sha1(content) };
            all.insert((*name).to_owned(), File { content: content.clone(), sum, is_large });
        }
        let listed: String = all.iter().map(|(name, file)| format!("{name} {}\n", file.sum)).collect();
        let id = git_sha1(&format!("{repo} {} {listed}", commits.len()).as_str().into());
        commits.push(Commit { id: id.clone(), files: all });
        id
    }

    /// Changes what is wrong.
    pub fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut locked(&self.state).faults);
    }

    /// Bytes of large files that were sent.
    pub fn sent(&self) -> u64 {
        locked(&self.state).sent
    }

    /// The requests since the last call.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut locked(&self.state).requests)
    }
}

impl Drop for TestHub {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        for server in self.servers {
            let _ = TcpStream::connect(server);
        }
    }
}

struct Connection {
    state: Arc<Mutex<State>>,
    stream: TcpStream,
    /// The server that has the bytes.
    bytes: SocketAddr,
    is_for_bytes: bool,
    is_over: Arc<AtomicBool>,
}

/// What an answer says beside its bytes.
type Headers = Vec<(String, String)>;

fn headers(all: &[(&str, &str)]) -> Headers {
    all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

impl Connection {
    /// Answers until the connection ends.
    fn serve(mut self) {
        let _ = self.stream.set_nodelay(true);
        let Ok(copy) = self.stream.try_clone() else { return };
        let mut reader = BufReader::new(copy);
        while let Ok(Some(request)) = http::read(&mut reader, self.is_for_bytes) {
            locked(&self.state).requests.push(request.clone());
            // As a proxy it knows the way to both servers, since it is both.
            if request.method == "CONNECT" {
                self.is_for_bytes = request.path == self.bytes.to_string();
                if self.stream.write_all(b"HTTP/1.1 200 Connected\r\n\r\n").is_err() {
                    break;
                }
                continue;
            }
            let answered = if self.is_for_bytes { self.send_blob(&request) } else { self.answer(&request) };
            if !matches!(answered, Ok(true)) {
                break;
            }
        }
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn simple(&mut self, request: &Request, status: u16, more: Headers, text: &str) -> io::Result<bool> {
        http::head(&mut self.stream, status, &more, text.len() as u64)?;
        if request.method != "HEAD" {
            self.stream.write_all(text.as_bytes())?;
        }
        Ok(true)
    }

    fn refuse(&mut self, request: &Request, status: u16, after: Option<u64>) -> io::Result<bool> {
        let after = after.map(|seconds| ("retry-after".to_owned(), seconds.to_string()));
        self.simple(request, status, after.into_iter().collect(), "refused by the test")
    }

    /// The hub: lists, and redirects to bytes.
    fn answer(&mut self, request: &Request) -> io::Result<bool> {
        let path = request.path.split('?').next().unwrap_or_default().to_owned();
        let path = path.replace("%2F", "/").replace("%20", " ");
        let faults = locked(&self.state).faults.clone();
        if let Some((old, new)) = &faults.renamed
            && path.contains(old.as_str())
        {
            let to = request.path.replacen(old, new, 1);
            return self.simple(request, 307, headers(&[("location", &to)]), "");
        }
        let authorized =
            faults.token.as_ref().map(|token| request.authorization.as_deref() == Some(&format!("Bearer {token}")));
        if authorized == Some(false) {
            let status = if request.authorization.is_some() && faults.gated { 403 } else { 401 };
            let code = if faults.gated { "GatedRepo" } else { "RepoNotFound" };
            return self.simple(request, status, headers(&[("x-error-code", code)]), "no");
        }
        match path.strip_prefix("/api/models/") {
            Some(rest) => self.list(request, rest),
            None => self.resolve(request, &path),
        }
    }

    fn find(&self, repo: &str, revision: &str) -> Result<Commit, &'static str> {
        let state = locked(&self.state);
        let commits = state.repos.get(repo).ok_or("RepoNotFound")?;
        let named = commits.iter().find(|commit| commit.id == revision);
        named.or(commits.last().filter(|_| revision == "main")).cloned().ok_or("RevisionNotFound")
    }

    fn list(&mut self, request: &Request, rest: &str) -> io::Result<bool> {
        let refusal = Faults::take(&mut locked(&self.state).faults.list_status);
        if let Some((status, after)) = refusal {
            return self.refuse(request, status, after);
        }
        let (repo, revision) = rest.split_once("/revision/").unwrap_or((rest, "main"));
        let commit = match self.find(repo, revision) {
            Ok(commit) => commit,
            Err(code) => return self.simple(request, 404, headers(&[("x-error-code", code)]), "{}"),
        };
        let faults = locked(&self.state).faults.clone();
        let sibling = |(name, file): (&String, &File)| {
            let size = file.content.size() + if file.is_large { faults.larger } else { 0 };
            let mut one = json!({"rfilename": name});
            if !faults.bare_list {
                one["size"] = size.into();
                one["blobId"] = git_sha1(&name.as_str().into()).into();
                if file.is_large {
                    one["lfs"] = json!({"sha256": file.sum, "size": size, "pointerSize": 135});
                } else {
                    one["blobId"] = file.sum.clone().into();
                }
            }
            one
        };
        let mut siblings: Vec<_> = commit.files.iter().map(sibling).collect();
        siblings.extend(
            faults.extra_names.iter().map(|name| json!({"rfilename": name, "size": 3, "blobId": "a".repeat(40)})),
        );
        let body = json!({"id": repo, "sha": commit.id, "private": false, "siblings": siblings}).to_string();
        self.simple(request, 200, headers(&[("content-type", "application/json")]), &body)
    }

    fn resolve(&mut self, request: &Request, path: &str) -> io::Result<bool> {
        let parts: Vec<&str> = path.trim_start_matches('/').splitn(5, '/').collect();
        let [org, name, "resolve", revision, file] = parts[..] else {
            return self.simple(request, 404, headers(&[("x-error-code", "EntryNotFound")]), "no such page");
        };
        let found = self.find(&format!("{org}/{name}"), revision);
        let found = found.and_then(|commit| Ok((commit.files.get(file).cloned().ok_or("EntryNotFound")?, commit.id)));
        let (file, commit) = match found {
            Ok(found) => found,
            Err(code) => return self.simple(request, 404, headers(&[("x-error-code", code)]), "Entry not found"),
        };
        let (faults, is_head) = (locked(&self.state).faults.clone(), request.method == "HEAD");
        let etag = if faults.odd_etags { "\"5-odd\"".to_owned() } else { format!("\"{}\"", file.sum) };
        let mut all = headers(&[("x-repo-commit", &commit), ("accept-ranges", "bytes")]);
        if !file.is_large {
            all.push(("etag".to_owned(), etag));
            let bytes = file.content.bytes();
            http::head(&mut self.stream, 200, &all, bytes.len() as u64)?;
            if !is_head {
                self.stream.write_all(&bytes)?;
            }
            return Ok(true);
        }
        let signature = {
            let mut state = locked(&self.state);
            state.signatures.push(faults.signature_uses);
            state.signatures.len() - 1
        };
        let size = file.content.size() + faults.larger;
        all.extend(headers(&[
            ("x-linked-etag", &etag),
            ("x-linked-size", &size.to_string()),
            ("x-xet-hash", &file.sum),
        ]));
        all.push(("location".to_owned(), format!("http://{}/blobs/{}?signature={signature}", self.bytes, file.sum)));
        self.simple(request, 302, all, "redirecting")
    }

    /// The other server: bytes of a signed address.
    fn send_blob(&mut self, request: &Request) -> io::Result<bool> {
        let refusal = Faults::take(&mut locked(&self.state).faults.bytes_status);
        if let Some((status, after)) = refusal {
            return self.refuse(request, status, after);
        }
        let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
        let sum = path.trim_start_matches("/blobs/");
        let (content, faults) = {
            let mut state = locked(&self.state);
            let number: Option<usize> = query.strip_prefix("signature=").and_then(|n| n.parse().ok());
            let is_signed = match number.and_then(|n| state.signatures.get_mut(n)) {
                Some(Some(0)) | None => false,
                Some(Some(left)) => {
                    *left -= 1;
                    true
                }
                Some(None) => true,
            };
            let all = state.repos.values().flatten().flat_map(|commit| commit.files.values());
            let found = all.filter(|_| is_signed).find(|file| file.sum == sum).map(|file| file.content.clone());
            (found, state.faults.clone())
        };
        let Some(content) = content else { return self.refuse(request, 403, None) };
        let size = content.size();
        let (first, last) = match request.range.filter(|_| !faults.no_ranges) {
            Some((first, last)) => (first, last.min(size.saturating_sub(1))),
            None => (0, size.saturating_sub(1)),
        };
        if first >= size {
            let range = format!("bytes */{size}");
            return self.simple(request, 416, headers(&[("content-range", &range)]), "");
        }
        let is_range = request.range.is_some() && !faults.no_ranges;
        let shift = u64::from(faults.wrong_ranges);
        let range = format!("bytes {}-{}/{size}", first + shift, last);
        let more = if is_range { headers(&[("content-range", &range)]) } else { Vec::new() };
        http::head(&mut self.stream, if is_range { 206 } else { 200 }, &more, last + 1 - first)?;
        self.send(&content, first, last + 1, &faults)
    }

    /// Sends bytes, with what is to be wrong about it. Whether the connection goes on.
    fn send(&mut self, content: &Content, mut at: u64, end: u64, faults: &Faults) -> io::Result<bool> {
        let begin = at;
        // Looked for anew with each piece, since a fault may come while all that is missing is on its way.
        let mut is_wrong = false;
        let cut =
            faults.cut_after.filter(|_| faults.cuts.is_none() || self.counted(|faults| faults.cuts.get_or_insert(0)));
        let stall =
            faults.stall_after.filter(|_| self.counted(|faults| &mut faults.stall_after.get_or_insert((0, 0)).1));
        let is_paced = faults.bandwidth.is_some() || faults.hold_after.is_some();
        let is_even = cut.is_none() && stall.is_none() && faults.slow.is_none() && !is_paced;
        let mut buffer = vec![0; if is_even { LARGE_PIECE } else { PIECE }];
        while at < end {
            let wanted = (end - at).min(buffer.len() as u64) as usize;
            let mut n = content.read(&mut buffer[..wanted], at)?;
            if let Some(limit) = cut {
                n = n.min((begin + limit - at) as usize);
            }
            if !is_wrong && n > 0 && self.counted(|faults| &mut faults.wrong_bytes) {
                is_wrong = true;
                // The first, which is sent whatever a bandwidth leaves of the piece.
                buffer[0] ^= 1;
            }
            if is_paced {
                n = self.may_send(n);
                if n == 0 {
                    return Ok(false);
                }
            } else {
                let mut state = locked(&self.state);
                if state.faults.ends {
                    return Ok(false);
                }
                state.sent += n as u64;
            }
            self.stream.write_all(&buffer[..n])?;
            at += n as u64;
            if cut.is_some_and(|limit| at - begin >= limit) && at < end {
                return Ok(false);
            }
            if stall.is_some_and(|(limit, _)| at - begin >= limit) && at < end {
                thread::sleep(Duration::from_secs(30));
                return Ok(false);
            }
            if let Some(pause) = faults.slow {
                thread::sleep(pause);
            }
        }
        Ok(true)
    }

    /// How many of the next `n` bytes may be sent, once any may; 0 when no more will be.
    fn may_send(&self, n: usize) -> usize {
        loop {
            let wait = {
                let mut state = locked(&self.state);
                if state.faults.ends {
                    return 0;
                }
                let now = Instant::now();
                let left = state.faults.hold_after.map_or(u64::MAX, |hold| hold.saturating_sub(state.sent));
                let next = state.next.filter(|_| state.faults.bandwidth.is_some()).unwrap_or(now);
                let n = (n as u64).min(left);
                if n > 0 && next <= now {
                    state.sent += n;
                    // Time that nobody used is lost, but for a moment.
                    let from = next.max(now.checked_sub(Duration::from_millis(20)).unwrap_or(now));
                    state.next = state.faults.bandwidth.map(|b| from + Duration::from_secs_f64(n as f64 / b as f64));
                    return n as usize;
                }
                if left == 0 { Duration::from_millis(5) } else { next - now }
            };
            if self.is_over.load(Ordering::Acquire) {
                return 0;
            }
            thread::sleep(wait);
        }
    }

    /// Takes one from a number of faults that are left; whether there was one.
    fn counted(&self, of: impl FnOnce(&mut Faults) -> &mut u32) -> bool {
        let mut state = locked(&self.state);
        let left = of(&mut state.faults);
        let had = *left > 0;
        *left = left.saturating_sub(1);
        had
    }
}
