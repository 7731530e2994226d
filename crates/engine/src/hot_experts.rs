//! The hottest experts as a file: what `--pin` keeps in memory.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

/// Experts by heat.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub struct HotExperts {
    /// Layers that have experts.
    pub layers: usize,
    /// Experts of each.
    pub experts: usize,
    /// Tokens that were counted.
    pub tokens: usize,
    /// (layer, expert, share of the tokens that want it), the hottest first. Layers are counted among those that have experts, from 0.
    pub hottest: Vec<(usize, usize, f64)>,
}

impl HotExperts {
    /// `uses[layer][expert]` of `tokens` tokens; experts that none wanted are left out.
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

    /// Reads what [`Pins::to_text`] wrote.
    ///
    /// # Errors
    /// No JSON, a field that is missing or of the wrong type, an expert beyond the numbers of layers and experts that the file states itself.
    pub fn parse(json: &[u8]) -> Result<HotExperts> {
        let pins: HotExperts = serde_json::from_slice(json)?;
        let (layers, experts) = (pins.layers, pins.experts);
        if let Some((l, e, _)) = pins.hottest.iter().find(|(l, e, _)| *l >= layers || *e >= experts) {
            bail!("hottest: expert {e} of layer {l}, but there are {layers} layers of {experts} experts");
        }
        Ok(pins)
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
    fn the_hottest_come_first_and_unused_ones_not_at_all() {
        let pins = HotExperts::new(&[vec![1, 0, 3], vec![3, 4, 0]], 4);
        assert_eq!(pins.hottest, [(1, 1, 1.0), (0, 2, 0.75), (1, 0, 0.75), (0, 0, 0.25)]);
        assert_eq!(HotExperts::parse(pins.to_text().as_bytes()).unwrap(), pins);
        let none = HotExperts::new(&[vec![0]], 1);
        assert_eq!(serde_json::from_str::<HotExperts>(&none.to_text()).unwrap(), none);
    }
}
