//! Tests of the store over its public interface, as one program.

mod bundle;
mod checkpoint;
mod header;
mod readers;
