//! OpenAI's dialect: `/v1/completions`, `/v1/chat/completions`, `/v1/models`.

mod chat;
mod completions;
mod fields;
mod reply;
pub mod sessions;

pub use chat::chat;
pub use completions::completions;
pub use fields::Common;
pub use reply::{Pending, now};
