//! Tests of the server over its public interface, as one program.

mod engine_ends;
mod loading;
mod page;
mod unix_socket;
