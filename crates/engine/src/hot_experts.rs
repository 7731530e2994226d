//! The most used experts as a file, which `--pin` reads to keep them in memory.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

/// The most used experts of a model.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub struct HotExperts {
    /// Layers that have experts.
    pub layers: usize,
    /// Experts of each.
    pub experts: usize,
    /// Tokens that were counted.
    pub tokens: usize,
    /// (layer, expert, share of the tokens that use it), the most used first. Only layers with experts are counted, from 0.
    pub hottest: Vec<(usize, usize, f64)>,
}

impl HotExperts {
    /// From `uses[layer][expert]` of `tokens` tokens. Unused experts are left out.
    pub fn new(uses: &[Vec<u64>], tokens: usize) -> HotExperts {
        let all = uses.iter().enumerate().flat_map(|(l, uses)| uses.iter().enumerate().map(move |(e, n)| (*n, l, e)));
        let mut order: Vec<(u64, usize, usize)> = all.filter(|u| u.0 > 0).collect();
        order.sort_by_key(|&(n, layer, expert)| (std::cmp::Reverse(n), layer, expert));
        let share = |n: u64| (n as f64 / tokens as f64 * 1e6).round() / 1e6;
        HotExperts {
            layers: uses.len(),
            experts: uses.iter().map(Vec::len).max().unwrap_or(0),
            tokens,
            hottest: order.into_iter().map(|(n, layer, expert)| (layer, expert, share(n))).collect(),
        }
    }

    /// Reads what [`HotExperts::to_text`] wrote.
    ///
    /// # Errors
    /// Invalid JSON, a field that is missing or of the wrong type, or an expert beyond the file's own numbers of layers and experts.
    pub fn parse(json: &[u8]) -> Result<HotExperts> {
        let hot: HotExperts = serde_json::from_slice(json)?;
        let (layers, experts) = (hot.layers, hot.experts);
        if let Some((l, e, _)) = hot.hottest.iter().find(|(l, e, _)| *l >= layers || *e >= experts) {
            bail!("hottest: expert {e} of layer {l}, but there are {layers} layers of {experts} experts");
        }
        Ok(hot)
    }

    /// JSON, an expert per line.
    pub fn to_text(&self) -> String {
        let rows: Vec<String> = self.hottest.iter().map(|(l, e, share)| format!("[{l}, {e}, {share}]")).collect();
        let HotExperts { layers, experts, tokens, .. } = self;
        let head = format!("\"layers\": {layers}, \"experts\": {experts}, \"tokens\": {tokens}");
        format!("{{{head}, \"hottest\": [\n{}\n]}}\n", rows.join(",\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_used_come_first_and_unused_ones_are_left_out() {
        let hot = HotExperts::new(&[vec![1, 0, 3], vec![3, 4, 0]], 4);
        assert_eq!(hot.hottest, [(1, 1, 1.0), (0, 2, 0.75), (1, 0, 0.75), (0, 0, 0.25)]);
        assert_eq!(HotExperts::parse(hot.to_text().as_bytes()).unwrap(), hot);
        let none = HotExperts::new(&[vec![0]], 1);
        assert_eq!(serde_json::from_str::<HotExperts>(&none.to_text()).unwrap(), none);
    }
}
