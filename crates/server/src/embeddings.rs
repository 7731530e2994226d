//! Vectors of texts, whatever the dialect that asks: each input goes through the engine beside all else that is computed.

use std::sync::Arc;

use futures_util::stream::{StreamExt, TryStreamExt, iter};
use serde::Deserialize;
use sluice_engine::text::Prompt;
use sluice_engine::{Generation, Pooling};
use utoipa::ToSchema;

use crate::app::LoadedModel;
use crate::context;
use crate::error::ApiError;
use crate::openai::SamplingFields;

/// Inputs of one request at most, and those of them that the engine has at once.
const MOST_INPUTS: usize = 2048;
const AT_ONCE: usize = 8;

/// A text or its tokens, or several of either.
#[derive(Deserialize, ToSchema)]
#[schema(as = EmbeddingInput)]
#[serde(untagged)]
pub enum Input {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

/// How vectors are wanted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wish {
    /// So many elements, the first.
    pub dimensions: Option<usize>,
    /// What does not fit the context is cut off.
    pub truncates: bool,
    /// Length 1, whatever the model's folder says.
    pub normalised: bool,
}

/// The vectors of one request, and the tokens of its inputs.
pub struct Vectors {
    pub all: Vec<Vec<f32>>,
    pub tokens: usize,
}

enum One {
    Text(String),
    Tokens(Vec<u32>),
}

impl Input {
    fn all(self) -> Vec<One> {
        match self {
            Input::Text(text) => vec![One::Text(text)],
            Input::Tokens(tokens) => vec![One::Tokens(tokens)],
            Input::Texts(all) => all.into_iter().map(One::Text).collect(),
            Input::TokenLists(all) => all.into_iter().map(One::Tokens).collect(),
        }
    }

    /// Whether there is nothing to be made a vector of.
    pub fn is_empty(&self) -> bool {
        match self {
            Input::Text(text) => text.is_empty(),
            Input::Tokens(tokens) => tokens.is_empty(),
            Input::Texts(all) => all.is_empty(),
            Input::TokenLists(all) => all.is_empty(),
        }
    }
}

/// The vectors of all inputs, in their order. Who drops this ends what is computed of them.
///
/// # Errors
/// An input that is empty or too long, more dimensions than there are, a folder that asks for what is not done here; a queue that is full.
pub async fn vectors(ready: &Arc<LoadedModel>, input: Input, wish: Wish) -> Result<Vectors, ApiError> {
    let embedding = ready.text.embedding.clone().map_err(|e| ApiError::invalid("model", e))?;
    if let Some(asked) = wish.dimensions.filter(|d| *d == 0 || *d > ready.hidden) {
        let message = format!("dimensions is {asked}; this model's vectors have {}", ready.hidden);
        return Err(ApiError::invalid("dimensions", message));
    }
    let inputs = input.all();
    if inputs.is_empty() || inputs.len() > MOST_INPUTS {
        let message = format!("input has {} elements; it must have 1 to {MOST_INPUTS}", inputs.len());
        return Err(ApiError::invalid("input", message));
    }
    // 1. Tokens, by a thread that may take its time
    let (own, truncates) = (Arc::clone(ready), wish.truncates);
    let encoded = move || inputs.into_iter().map(|one| tokens(&own, one, truncates)).collect::<Result<Vec<_>, _>>();
    let prompts = tokio::task::spawn_blocking(encoded).await.map_err(|e| ApiError::internal(e.to_string()))??;
    let tokens = prompts.iter().map(Vec::len).sum();
    // 2. Vectors
    let one = |prompt| state(Arc::clone(ready), prompt, embedding.pooling);
    let all: Vec<Vec<f32>> = iter(prompts).map(one).buffered(AT_ONCE).try_collect().await?;
    if let Some(exchange) = context::current() {
        exchange.counted(tokens, 0, 0);
    }
    let normalised = embedding.normalised || wish.normalised;
    let all = all.into_iter().map(|vector| finished(vector, wish.dimensions, normalised)).collect();
    Ok(Vectors { all, tokens })
}

fn tokens(ready: &LoadedModel, one: One, truncates: bool) -> Result<Vec<u32>, ApiError> {
    let wrong = |e: anyhow::Error| ApiError::invalid("input", format!("{e:#}"));
    let tokenizer = &ready.text.tokenizer;
    let mut tokens = match &one {
        One::Text(text) if text.is_empty() => return Err(ApiError::invalid("input", "input cannot be an empty text")),
        One::Text(text) => tokenizer.encode_prompt(&Prompt::from(text.clone()), true).map_err(wrong)?,
        One::Tokens(tokens) => tokens.clone(),
    };
    if tokens.is_empty() {
        return Err(ApiError::invalid("input", "input has no tokens"));
    }
    let context = ready.context;
    if tokens.len() > context {
        if !truncates {
            return Err(ApiError::input_too_long(tokens.len(), context));
        }
        // What the tokenizer puts behind every text is not cut off: some models speak through it.
        let (a, ab) = (tokenizer.encode("a", true).map_err(wrong)?, tokenizer.encode("b", true).map_err(wrong)?);
        let same = a.iter().rev().zip(ab.iter().rev()).take_while(|(a, b)| a == b).count();
        let behind = if matches!(one, One::Text(_)) { same.min(context - 1) } else { 0 };
        tokens.drain(context - behind..tokens.len() - behind);
    }
    Ok(tokens)
}

/// One input through the engine.
async fn state(ready: Arc<LoadedModel>, prompt: Vec<u32>, pooling: Pooling) -> Result<Vec<f32>, ApiError> {
    let generation = Generation { pooling: Some(pooling), ..Generation::default() };
    let mut pending = ready.submit(prompt, generation, &SamplingFields::default())?;
    while pending.next().await?.is_some() {}
    pending.answer.embedding.take().ok_or_else(|| ApiError::internal("the engine has given no vector"))
}

/// The first of its elements that are wanted, and scaled to length 1: sums are of f64, in ascending place.
fn finished(mut vector: Vec<f32>, dimensions: Option<usize>, normalised: bool) -> Vec<f32> {
    vector.truncate(dimensions.unwrap_or(usize::MAX));
    let squares: f64 = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    if normalised && squares > 0.0 {
        let length = squares.sqrt();
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    vector
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_cut_and_then_scaled() {
        assert_eq!(finished(vec![3.0, 4.0], None, true), [0.6, 0.8]);
        assert_eq!(finished(vec![3.0, 4.0, 12.0], Some(2), true), [0.6, 0.8]);
        assert_eq!(finished(vec![3.0, 4.0, 12.0], Some(2), false), [3.0, 4.0]);
        assert_eq!(finished(vec![0.0, 0.0], None, true), [0.0, 0.0]);
    }

    #[test]
    fn inputs_are_texts_or_tokens() {
        let read = |json: &str| -> Input { serde_json::from_str(json).unwrap() };
        assert!(matches!(read("\"a\""), Input::Text(_)));
        assert!(matches!(read("[1, 2]"), Input::Tokens(_)));
        assert!(matches!(read("[\"a\", \"b\"]"), Input::Texts(_)));
        assert!(matches!(read("[[1], [2, 3]]"), Input::TokenLists(_)));
        assert!(read("[]").is_empty() && read("\"\"").is_empty() && !read("[\"\"]").is_empty());
    }
}
