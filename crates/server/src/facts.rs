//! What a model's folder says of the model, for those who list models.

/// Nothing is known by default; whoever offers a model says what it can.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// `model_type` of its config.
    pub architecture: String,
    pub parameters: u64,
    /// Width of its hidden states.
    pub hidden: usize,
    pub layers: usize,
    /// Bytes of its weights' files.
    pub bytes: u64,
    /// When it was last changed, in seconds since 1970.
    pub modified: u64,
    /// 64 hexadecimal digits that change when its files do.
    pub digest: String,
    /// How its weights are stored: `BF16`, `4-bit`.
    pub stored: String,
}

impl Facts {
    /// A digest of what is said of its files.
    pub fn digest_of(files: &str) -> String {
        blake3::hash(files.as_bytes()).to_hex().to_string()
    }
}
