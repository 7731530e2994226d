//! OpenAI's dialect: `/v1/completions`, `/v1/chat/completions`, `/v1/responses`.

mod chat;
mod chat_fields;
mod completions;
mod fields;
mod reply;
mod responses;
pub mod sessions;

pub use chat::chat;
pub use completions::completions;
pub use fields::{Common, Stop};
pub use responses::responses;
