//! `/v1/responses`, for clients that keep their conversations themselves: the server stores nothing, and each request has the whole conversation.

pub mod encoder;
pub mod endpoints;
pub mod input;
pub mod request;
pub mod schema;
pub mod thoughts;
pub mod tools;
