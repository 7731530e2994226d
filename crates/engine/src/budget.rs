//! Whether a model fits a budget of memory, asked before its weights are read. The answer shows its arithmetic.

use anyhow::{Result, bail};

/// What a model needs, in bytes unless said otherwise.
pub(crate) struct Need {
    pub weights: usize,
    pub state: usize,
    pub scratch: usize,
    /// Slots of experts that stay on disk.
    pub experts: usize,
    /// A block of keys and values, of all cache groups, for each sequence.
    pub block: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Tokens whose keys and values are to be resident from the start.
    pub reserved: usize,
}

impl Need {
    /// Tokens of context that the budget has room for; as many as one likes where a token takes nothing.
    ///
    /// # Errors
    /// Where not even a block, or not what is to be reserved, fits beside the rest.
    pub fn context_within(&self, budget: u64) -> Result<usize> {
        let fixed = (self.weights + self.experts + self.state + self.scratch) as u64;
        let first = self.reserved.div_ceil(self.block_tokens).max(1);
        let kv = first as u64 * self.block as u64;
        if fixed + kv > budget {
            let tokens = first * self.block_tokens;
            let sum = format!(
                "weights {}{} + scratch {} + state {} + keys and values of {tokens} tokens {} = {}, {} more than the memory budget of {}",
                bytes(self.weights as u64),
                if self.experts > 0 { format!(" + experts {}", bytes(self.experts as u64)) } else { String::new() },
                bytes(self.scratch as u64),
                bytes(self.state as u64),
                bytes(kv),
                bytes(fixed + kv),
                bytes(fixed + kv - budget),
                bytes(budget)
            );
            if fixed <= budget && self.reserved > 0 {
                bail!("{sum}; reserve fewer tokens (--kv reserve=TOKENS) or none (--kv dynamic)");
            }
            bail!(
                "{sum}; a mixture's experts can be streamed from disk (--experts slots); else fewer bits (`sluice pack`) or a larger budget \
                 are what is left"
            );
        }
        let blocks = (budget - fixed).checked_div(self.block as u64).unwrap_or(u64::MAX);
        Ok(usize::try_from(blocks).unwrap_or(usize::MAX).saturating_mul(self.block_tokens))
    }
}

/// `4.294 GB`
fn bytes(n: u64) -> String {
    match n {
        0..1_000_000 => format!("{n} B"),
        1_000_000..1_000_000_000 => format!("{:.1} MB", n as f64 / 1e6),
        _ => format!("{:.3} GB", n as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEED: Need =
        Need { weights: 1000, state: 10, scratch: 90, experts: 0, block: 100, block_tokens: 32, reserved: 0 };

    #[test]
    fn what_is_left_of_a_budget_is_context() {
        assert_eq!(NEED.context_within(1200).unwrap(), 32);
        assert_eq!(NEED.context_within(1499).unwrap(), 96);
        assert_eq!(Need { block: 0, ..NEED }.context_within(1100).unwrap(), usize::MAX);
    }

    #[test]
    fn a_refusal_shows_its_arithmetic_and_what_else_there_is() {
        let refused = NEED.context_within(1199).unwrap_err().to_string();
        for part in ["weights 1000 B", "scratch 90 B", "= 1200 B", "1 B more", "budget of 1199 B", "streamed"] {
            assert!(refused.contains(part), "{part:?} is not in: {refused}");
        }
        let refused = Need { reserved: 64, ..NEED }.context_within(1250).unwrap_err().to_string();
        assert!(refused.contains("64 tokens 200 B") && refused.contains("--kv dynamic"), "{refused}");
    }
}
