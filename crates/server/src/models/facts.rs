//! What is known of a model without loading it.

/// What a model's folder says about it, for lists of models.
#[derive(Clone, Debug, Default)]
pub struct ModelFacts {
    /// `model_type` of its config.
    pub architecture: String,
    /// Number of parameters.
    pub parameters: u64,
    /// Width of its hidden states.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Bytes of its weight files.
    pub bytes: u64,
    /// When it was last changed, in seconds since 1970.
    pub modified: u64,
    /// 64 hexadecimal digits that change when its files do.
    pub digest: String,
    /// Format of its weights, such as `BF16` or `4-bit`.
    pub stored: String,
}

impl ModelFacts {
    /// The digest for a text that describes the files.
    pub fn digest_of(files: &str) -> String {
        blake3::hash(files.as_bytes()).to_hex().to_string()
    }
}
