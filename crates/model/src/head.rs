//! Which matrix is the output head. The config says whether it is the embedding; as in the reference, a stored head overrides it.

use anyhow::{Context, Result, ensure};
use sluice_store::{Checkpoint, Tensor};

use crate::description::Description;
use crate::source::ModelTensors;

/// Bytes of each matrix that are compared at a time.
const PIECE: usize = 1 << 20;

/// Corrects the description where `tensors` store a head that is not the embedding, and adds a note for the user.
///
/// # Errors
/// A checkpoint without an embedding, and a matrix that cannot be read.
pub(crate) fn settle(description: &mut Description, tensors: &ModelTensors) -> Result<()> {
    tensors.check_embedding()?;
    let (checkpoint, layout) = (tensors.checkpoint(), tensors.layout());
    if layout.shares_head() {
        ensure!(
            description.tied,
            "{}: no tensor `model.embed_tokens.weight`, and `tie_word_embeddings` is not true in config.json",
            checkpoint.named().display()
        );
        return Ok(());
    }
    let [embedding, head] = ["embed_tokens", "lm_head"].map(|part| layout.full(part));
    let is_stored = checkpoint.tensor(&format!("{head}.weight")).is_some();
    if description.tied && is_stored && !is_same(checkpoint, &embedding, &head)? {
        description.tied = false;
        // Of some architectures tied is the default.
        if tensors.config().tied_embeddings()? {
            description.notes.push(format!(
                "config.json has `tie_word_embeddings`, but {head}.weight is not the embedding: it is used as the output head"
            ));
        }
    }
    Ok(())
}

/// Whether two modules store the same matrix, to the last bit.
fn is_same(checkpoint: &Checkpoint, one: &str, other: &str) -> Result<bool> {
    for leaf in ["weight", "scales", "biases"] {
        let of = |module: &str| checkpoint.tensor(&format!("{module}.{leaf}"));
        let same = match (of(one), of(other)) {
            (None, None) => true,
            (Some(a), Some(b)) => has_same_bytes(&a, &b)?,
            _ => false,
        };
        if !same {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Reads the files itself, since a load may not have begun.
fn has_same_bytes(a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.dtype != b.dtype || a.shape != b.shape {
        return Ok(false);
    }
    let mut pieces = [vec![0; PIECE], vec![0; PIECE]];
    for start in (0..a.bytes.len()).step_by(PIECE) {
        let range = start..a.bytes.len().min(start + PIECE);
        for (t, piece) in [a, b].into_iter().zip(&mut pieces) {
            piece.truncate(range.len());
            let read = t.bytes.slice(range.clone()).read_now(piece);
            read.with_context(|| format!("tensor {:?}", t.name))?;
        }
        if pieces[0] != pieces[1] {
            return Ok(false);
        }
    }
    Ok(true)
}
