//! Flags for how many requests a server takes, and how long it waits for clients.

use std::time::Duration;

use clap::{Args, value_parser};
use sluice_server::Limits;

use crate::engine_args::bytes_arg;

/// Connections besides those of running and waiting requests, for monitors and idle clients.
const MORE_CONNECTIONS: usize = 64;

#[derive(Args)]
pub struct ConnectionArgs {
    /// Requests that may wait in the queue; more are refused with 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue: usize,
    /// Connections that may be open; more are refused with 503 (default: 64 more than requests may run and wait)
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1 << 20))]
    connections: Option<u32>,
    /// Memory in bytes for request bodies, and the largest body (default: twice the largest body that the context allows)
    #[arg(long, value_name = "BYTES", value_parser = bytes_arg)]
    body_memory: Option<u64>,
    /// Seconds for a request's headers to arrive; an idle connection is closed after the same time
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = value_parser!(u64).range(1..=86_400))]
    header_timeout: u64,
    /// Seconds after which a client that reads nothing of its answer is disconnected
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = value_parser!(u64).range(1..=86_400))]
    write_timeout: u64,
    /// Seconds for running requests to finish when the server is told to stop
    #[arg(long, value_name = "SECONDS", default_value_t = 240, value_parser = value_parser!(u64).range(0..=86_400))]
    grace: u64,
}

impl ConnectionArgs {
    /// `parallel`: requests computed at once.
    pub fn limits(&self, parallel: usize) -> Limits {
        let as_many_as_needed = self.queue.saturating_add(parallel + MORE_CONNECTIONS);
        Limits {
            queue: self.queue,
            connections: self.connections.map_or(as_many_as_needed, |n| n as usize).min(1 << 20),
            bodies: self.body_memory.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
            header_time: Duration::from_secs(self.header_timeout),
            write_time: Duration::from_secs(self.write_timeout),
            grace: Duration::from_secs(self.grace),
        }
    }
}
