//! Prompts of completions and sessions: strings or token ids.

use std::sync::Arc;

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::fields::TextsOrTokens;
use crate::api::prompt;
use crate::http::error::ApiError;
use crate::models::loaded::LoadedModel;

/// Most prompts of one request, counting each choice of each prompt.
pub const MAX_PROMPTS: usize = 128;

/// A string, a list of token ids, or a list of either. At most 128 prompts; their choices follow one another.
#[derive(ToSchema)]
#[schema(as = Prompt)]
#[serde(untagged)]
pub enum PromptField {
    /// A string.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Several strings.
    Texts(Vec<String>),
    /// Several prompts as token ids.
    TokenLists(Vec<Vec<u32>>),
}

impl<'de> Deserialize<'de> for PromptField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<PromptField, D::Error> {
        Ok(match TextsOrTokens::from_value(Value::deserialize(deserializer)?) {
            Some(TextsOrTokens::One(text)) => PromptField::Text(text),
            Some(TextsOrTokens::Many(all)) => PromptField::Texts(all),
            Some(TextsOrTokens::Tokens(tokens)) => PromptField::Tokens(tokens),
            Some(TextsOrTokens::TokenLists(all)) => PromptField::TokenLists(all),
            None => {
                return Err(D::Error::custom(
                    "must be a string, a list of strings, a list of token ids, or a list of such lists",
                ));
            }
        })
    }
}

impl PromptField {
    /// Splits it into single prompts.
    ///
    /// # Errors
    /// Too many prompts.
    pub fn split(self) -> Result<Vec<PromptField>, ApiError> {
        let all: Vec<PromptField> = match self {
            PromptField::Texts(all) => all.into_iter().map(PromptField::Text).collect(),
            PromptField::TokenLists(all) => all.into_iter().map(PromptField::Tokens).collect(),
            one => vec![one],
        };
        let too_many =
            |n: usize| ApiError::invalid("prompt", format!("{n} prompts; at most {MAX_PROMPTS} are accepted"));
        if all.len() > MAX_PROMPTS { Err(too_many(all.len())) } else { Ok(all) }
    }
}

/// The tokens of a single prompt.
///
/// # Errors
/// More than one prompt; a text that the tokenizer refuses.
pub async fn encode_one(model: &Arc<LoadedModel>, field: PromptField) -> Result<Vec<u32>, ApiError> {
    let many = |n: usize| ApiError::invalid("prompt", format!("prompt has {n} prompts; it must be one"));
    Ok(match field {
        PromptField::Text(text) => prompt::encode(model, text).await?,
        PromptField::Tokens(tokens) => tokens,
        PromptField::Texts(mut all) if all.len() == 1 => prompt::encode(model, all.remove(0)).await?,
        PromptField::TokenLists(mut all) if all.len() == 1 => all.remove(0),
        PromptField::Texts(all) => return Err(many(all.len())),
        PromptField::TokenLists(all) => return Err(many(all.len())),
    })
}
