//! Embeddings, for any dialect. Each input is a submission of its own, computed together with everything else.

use std::sync::Arc;

use futures_util::stream::{StreamExt, TryStreamExt, iter};
use serde::Deserialize;
use sluice_engine::text::Prompt;
use sluice_engine::{Generation, Pooling};
use utoipa::ToSchema;

use crate::api::pending::Pending;
use crate::api::sampling::SamplingFields;
use crate::http::context;
use crate::http::error::ApiError;
use crate::models::loaded::LoadedModel;

/// Most inputs of one request, and how many of them the engine computes at once.
const MAX_INPUTS: usize = 2048;
const CONCURRENT: usize = 8;

/// A text or its token ids, or a list of either.
#[derive(Deserialize, ToSchema)]
#[schema(as = EmbeddingInput)]
#[serde(untagged)]
pub enum EmbeddingInput {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

/// Options of a request for embeddings.
#[derive(Clone, Copy, Debug, Default)]
pub struct EmbeddingOptions {
    /// Keep only this many elements, the first.
    pub dimensions: Option<usize>,
    /// Truncate inputs that do not fit the context.
    pub truncate: bool,
    /// Scale to length 1 even if the model's folder does not ask for it.
    pub normalise: bool,
}

/// The embeddings of one request.
pub struct Embeddings {
    /// One vector per input, each of `[dimensions]` or `[hidden]`.
    pub vectors: Vec<Vec<f32>>,
    /// Number of tokens of all inputs.
    pub tokens: usize,
}

enum SingleInput {
    Text(String),
    Tokens(Vec<u32>),
}

impl EmbeddingInput {
    fn all(self) -> Vec<SingleInput> {
        match self {
            EmbeddingInput::Text(text) => vec![SingleInput::Text(text)],
            EmbeddingInput::Tokens(tokens) => vec![SingleInput::Tokens(tokens)],
            EmbeddingInput::Texts(all) => all.into_iter().map(SingleInput::Text).collect(),
            EmbeddingInput::TokenLists(all) => all.into_iter().map(SingleInput::Tokens).collect(),
        }
    }

    /// Whether there is no input at all.
    pub fn is_empty(&self) -> bool {
        match self {
            EmbeddingInput::Text(text) => text.is_empty(),
            EmbeddingInput::Tokens(tokens) => tokens.is_empty(),
            EmbeddingInput::Texts(all) => all.is_empty(),
            EmbeddingInput::TokenLists(all) => all.is_empty(),
        }
    }
}

/// Computes the embeddings of all inputs, in order. Dropping the future cancels them.
///
/// # Errors
/// An input that is empty or too long; too many dimensions; a model whose folder asks for pooling that is not supported; a full queue.
pub async fn embed(
    model: &Arc<LoadedModel>,
    input: EmbeddingInput,
    options: EmbeddingOptions,
) -> Result<Embeddings, ApiError> {
    let embedding = model.text.embedding.clone().map_err(|e| ApiError::invalid("model", e))?;
    if let Some(wanted) = options.dimensions.filter(|d| *d == 0 || *d > model.hidden) {
        let message = format!("dimensions is {wanted}; this model's vectors have {}", model.hidden);
        return Err(ApiError::invalid("dimensions", message));
    }
    let inputs = input.all();
    if inputs.is_empty() || inputs.len() > MAX_INPUTS {
        let message = format!("input has {} elements; it must have 1 to {MAX_INPUTS}", inputs.len());
        return Err(ApiError::invalid("input", message));
    }
    // 1. Tokenize, on a blocking thread
    let (own, truncate) = (Arc::clone(model), options.truncate);
    let encoded = move || inputs.into_iter().map(|one| tokens(&own, one, truncate)).collect::<Result<Vec<_>, _>>();
    let prompts = tokio::task::spawn_blocking(encoded).await.map_err(|e| ApiError::internal(e.to_string()))??;
    let tokens = prompts.iter().map(Vec::len).sum();
    // 2. Compute
    let one = |prompt| embed_one(Arc::clone(model), prompt, embedding.pooling);
    let vectors: Vec<Vec<f32>> = iter(prompts).map(one).buffered(CONCURRENT).try_collect().await?;
    if let Some(context) = context::current() {
        context.add_usage(tokens, 0, 0);
    }
    let normalised = embedding.normalised || options.normalise;
    let vectors = vectors.into_iter().map(|vector| finished(vector, options.dimensions, normalised)).collect();
    Ok(Embeddings { vectors, tokens })
}

fn tokens(model: &LoadedModel, one: SingleInput, truncate: bool) -> Result<Vec<u32>, ApiError> {
    let wrong = |e: anyhow::Error| ApiError::invalid("input", format!("{e:#}"));
    let tokenizer = &model.text.tokenizer;
    let mut tokens = match &one {
        SingleInput::Text(text) if text.is_empty() => {
            return Err(ApiError::invalid("input", "input must not be an empty string"));
        }
        SingleInput::Text(text) => tokenizer.encode_prompt(&Prompt::from(text.clone()), true).map_err(wrong)?,
        SingleInput::Tokens(tokens) => tokens.clone(),
    };
    if tokens.is_empty() {
        return Err(ApiError::invalid("input", "input has no tokens"));
    }
    let context = model.context;
    if tokens.len() > context {
        if !truncate {
            return Err(ApiError::input_too_long(tokens.len(), context));
        }
        // Tokens that the tokenizer appends to every text stay: some models are trained to embed at them.
        let (a, ab) = (tokenizer.encode("a", true).map_err(wrong)?, tokenizer.encode("b", true).map_err(wrong)?);
        let same = a.iter().rev().zip(ab.iter().rev()).take_while(|(a, b)| a == b).count();
        let suffix = if matches!(one, SingleInput::Text(_)) { same.min(context - 1) } else { 0 };
        tokens.drain(context - suffix..tokens.len() - suffix);
    }
    Ok(tokens)
}

/// Computes one input.
async fn embed_one(model: Arc<LoadedModel>, prompt: Vec<u32>, pooling: Pooling) -> Result<Vec<f32>, ApiError> {
    let generation = Generation { pooling: Some(pooling), ..Generation::default() };
    let mut pending = Pending::submit(&model, prompt, generation, &SamplingFields::default())?;
    while pending.next().await?.is_some() {}
    pending.answer.embedding.take().ok_or_else(|| ApiError::internal("the engine has returned no embedding"))
}

/// Keeps the first `dimensions` elements, and scales to length 1. Sums are in f64, in ascending order.
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
        let read = |json: &str| -> EmbeddingInput { serde_json::from_str(json).unwrap() };
        assert!(matches!(read("\"a\""), EmbeddingInput::Text(_)));
        assert!(matches!(read("[1, 2]"), EmbeddingInput::Tokens(_)));
        assert!(matches!(read("[\"a\", \"b\"]"), EmbeddingInput::Texts(_)));
        assert!(matches!(read("[[1], [2, 3]]"), EmbeddingInput::TokenLists(_)));
        assert!(read("[]").is_empty() && read("\"\"").is_empty() && !read("[\"\"]").is_empty());
    }
}
