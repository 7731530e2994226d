//! What an MTP head (multi-token prediction) takes: memory, and bytes read per token.

use anyhow::Result;
use serde_json::{Value, json};
use sluice_model::{Config, Description, ModelTensors, Options};

use super::estimate::Precision;
use crate::units;

/// Keys of configs that say how many MTP heads there are.
const COUNTS: [&str; 2] = ["num_nextn_predict_layers", "mtp_num_hidden_layers"];
/// `pack` gives an MTP head at least so many bits.
const LEAST_BITS: u64 = 8;

/// The sizes of an MTP head.
pub struct Mtp {
    parameters: u64,
    /// At the width that the checkpoint has, or `pack` would give it.
    bytes: u64,
    bits: u64,
    /// Bytes of keys and values for each token of a conversation, at two bytes an element.
    kv_bytes: u64,
}

impl Mtp {
    /// The MTP head of the model `described`, if its checkpoint has one. Without a checkpoint the config says whether there is one.
    ///
    /// # Errors
    /// Those of describing a model.
    pub fn of(
        config: &Config,
        tensors: Option<&ModelTensors>,
        described: &Description,
        precision: Precision,
    ) -> Result<Option<Mtp>> {
        let options = Options { mtp: true, ..Options::default() };
        let with = match tensors {
            Some(tensors) => sluice_model::describe_stored(tensors, &options)?,
            None if COUNTS.iter().any(|key| config.get(key).and_then(Value::as_u64).is_some_and(|n| n > 0)) => {
                sluice_model::describe(config, &options)?
            }
            None => return Ok(None),
        };
        if with.mtp.is_none() {
            return Ok(None);
        }
        let parameters = with.layer_weights(described.layers.len()).iter().map(|w| w.elements()).sum();
        let precision = Precision { bits: precision.bits.max(LEAST_BITS), ..precision };
        let (bytes, bits) = (precision.bytes(parameters), precision.bits);
        let kv_bytes = 2 * (with.kv_elements() - described.kv_elements()) as u64;
        Ok(Some(Mtp { parameters, bytes, bits, kv_bytes }))
    }

    pub fn text(&self) -> String {
        format!(
            "{} parameters, {} at {} bits, and {} for each token of conversation: in memory with --draft mtp or auto",
            units::count(self.parameters),
            units::bytes(self.bytes),
            self.bits,
            units::bytes(self.kv_bytes),
        )
    }

    pub fn to_json(&self) -> Value {
        json!({"parameters": self.parameters, "bytes": self.bytes, "bits": self.bits, "kv_bytes_per_token": self.kv_bytes})
    }
}
