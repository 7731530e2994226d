//! How a server is set up: its limits, and the memory that they amount to.

use std::time::Duration;

use crate::http::access::Access;

/// The largest body in bytes is `BODY + BODY_PER_TOKEN * context`: several times what text or token ids take.
const BODY: usize = 1 << 20;
const BODY_PER_TOKEN: usize = 64;
/// Default upper bound for the bytes of all bodies held at once.
const MAX_BODIES: usize = 64 << 20;
/// Bytes that one permit for body memory stands for.
const BYTES_PER_PERMIT: usize = 1 << 10;
/// Memory allowances in bytes: for the idle server, for each request that runs or waits, and for each connection. `cli/tests/program/serve_crowd.rs` checks that
/// they suffice for 64 connections.
const IDLE: u64 = 8 << 20;
const REQUEST: u64 = 32 << 10;
const CONNECTION: u64 = 16 << 10;
/// Bytes of answers that may wait to be sent: a base, and more for each request that may wait.
const ANSWERS: usize = 1 << 20;
const ANSWERS_PER_REQUEST: usize = 16 << 10;
/// Bytes of log-probabilities that may be kept until answers are complete, likewise.
const KEPT: usize = 1 << 20;
const KEPT_PER_REQUEST: usize = 64 << 10;

/// Upper bounds for what clients may occupy, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests that may wait for their turn; more are refused.
    pub queue: usize,
    /// Connections that may be open; more are refused.
    pub connections: usize,
    /// Bytes of all bodies that are being read or worked on, and so the largest single body. `None`: enough for two of the largest.
    pub bodies: Option<usize>,
    /// Time for a request's line and headers, from the start of the connection or the end of the answer before.
    pub header_time: Duration,
    /// Time within which a client must read something of what is sent to it.
    pub write_time: Duration,
    /// Time for running requests to finish when the server is told to stop.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            queue: 256,
            connections: 512,
            bodies: None,
            header_time: Duration::from_secs(30),
            write_time: Duration::from_secs(60),
            grace: Duration::from_secs(240),
        }
    }
}

impl Limits {
    /// Bytes of all bodies that are held at once. `context`: the longest context of any model, in tokens.
    pub(crate) fn body_memory(&self, context: usize) -> usize {
        let default = max_body(context).saturating_mul(2).min(MAX_BODIES);
        self.bodies.unwrap_or(default).min(BYTES_PER_PERMIT << 30)
    }

    /// Bytes of answers that may wait to be sent to all clients together.
    pub(crate) fn send_budget(&self) -> usize {
        ANSWERS + ANSWERS_PER_REQUEST * self.queue
    }

    /// Bytes that may be kept until answers are complete, for all of them together.
    pub(crate) fn kept_budget(&self) -> usize {
        KEPT + KEPT_PER_REQUEST * self.queue
    }
}

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Upper bounds for what clients may occupy.
    pub limits: Limits,
    /// Who may use the server.
    pub access: Access,
    /// A request that takes longer than this is ended with an error.
    pub request_timeout: Option<Duration>,
    /// A model that no request has used for this long is dropped from memory.
    pub idle_unload: Option<Duration>,
    /// Whether to write one line to standard error for each finished request. The line has nothing of the prompt or the answer.
    pub log_requests: bool,
}

/// Bytes of the largest body that is accepted for a context of this many tokens.
pub(crate) fn max_body(context: usize) -> usize {
    BODY.saturating_add(BODY_PER_TOKEN.saturating_mul(context))
}

/// Permits that stand for this many bytes of a body.
pub(crate) fn permits(bytes: usize) -> usize {
    bytes.div_ceil(BYTES_PER_PERMIT)
}

/// Bytes of memory to reserve for a server. `parallel`: requests computed at once; `context`: the longest context of any model, in tokens.
pub fn memory(parallel: usize, limits: &Limits, context: usize) -> u64 {
    // A body, and as much again for what is parsed from it.
    let bodies = 2 * limits.body_memory(context) as u64;
    let each = REQUEST * (parallel + limits.queue) as u64 + CONNECTION * limits.connections as u64;
    IDLE + each + bodies + (limits.send_budget() + limits.kept_budget()) as u64
}
