//! HTTP: connections, access, routing, and what every request carries from its arrival to its answer. Nothing here knows how a dialect reads a request; only
//! [`routes`] and [`middleware`] name the dialects at all.

pub mod access;
pub mod connections;
pub mod context;
pub mod error;
pub mod extract;
pub mod listen;
pub mod middleware;
pub mod openapi;
pub mod outbox;
pub mod page;
pub mod routes;
pub mod server;
pub mod settings;
pub mod state;
