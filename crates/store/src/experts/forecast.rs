//! How likely each expert of a layer is to be wanted when the layer is visited next, from how often it was wanted before: lately, and for long.

/// Tokens after which a use counts half, one for each average.
const HALF_LIVES: [f64; 3] = [2.0, 16.0, 128.0];

/// Shares of each expert's uses, averaged over several spans.
#[derive(Debug)]
pub(super) struct Forecast {
    /// Each layer's first row in `shares`, and one more.
    first: Vec<usize>,
    /// By expert: `[HALF_LIVES]` averages of the share of tokens that wanted it.
    shares: Vec<[f64; HALF_LIVES.len()]>,
}

impl Forecast {
    /// For layers of so many experts.
    pub fn new(experts: &[usize]) -> Forecast {
        let mut first = vec![0];
        for n in experts {
            first.push(first[first.len() - 1] + n);
        }
        Forecast { shares: vec![[0.0; HALF_LIVES.len()]; first[experts.len()]], first }
    }

    /// What a visit of `n` tokens wanted; gives the probability for each expert of the layer to be wanted by a token of the next visit.
    pub fn visit(&mut self, layer: usize, wanted: &[u32], tokens: &[u32], n: f64, probabilities: &mut [f64]) {
        let shares = &mut self.shares[self.first[layer]..self.first[layer + 1]];
        let decays = HALF_LIVES.map(|h| (-n / h).exp2());
        for share in shares.iter_mut() {
            share.iter_mut().zip(decays).for_each(|(s, d)| *s *= d);
        }
        for (expert, uses) in wanted.iter().zip(tokens) {
            let share = &mut shares[*expert as usize];
            share.iter_mut().zip(decays).for_each(|(s, d)| *s += (1.0 - d) * f64::from(*uses) / n);
        }
        for (p, share) in probabilities.iter_mut().zip(shares) {
            *p = share.iter().sum::<f64>() / HALF_LIVES.len() as f64;
        }
    }
}
