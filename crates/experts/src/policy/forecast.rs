//! How likely each expert of a layer is to be wanted at the layer's next visit, learned online from the routing of the visits so far.
//!
//! One logistic regression per layer, shared by its experts, weighs how often an expert was wanted lately and for long; on top of it, each expert
//! that the present visit wants adds what it says about each that may follow. Both are updated at every visit by the error of the forecast.
//! What experts of *other* layers say was tried as well: it predicts the present token better, but not the later ones for which a slot is kept.
//!
//! A visit of E experts of which K are wanted takes O(K E); E² numbers per layer are kept, where there is room for them.

/// Tokens after which a use counts half, one for each average.
const HALF_LIVES: [f32; 4] = [1.0, 8.0, 64.0, 512.0];
/// A constant, and the logarithm of each average.
const FEATURES: usize = HALF_LIVES.len() + 1;
/// Added to averages, so that what was never wanted has a logarithm: a use in a hundred tokens.
const LEAST: f32 = 0.01;
/// The steps of learning: of the weights of averages, as a part of the gradient's usual size; of what experts say about each other.
const STEP: f32 = 0.002;
const STEP_FOLLOWS: f32 = 0.02;

/// The forecasts of all layers.
#[derive(Debug)]
pub(crate) struct Forecast {
    layers: Vec<LayerForecast>,
    /// For each expert in the present visit: the share of its tokens that want it, and how far the forecast was above that.
    wanted: Vec<f32>,
    excess: Vec<f32>,
}

#[derive(Debug)]
struct LayerForecast {
    experts: usize,
    /// `[HALF_LIVES, experts]`: share of the tokens that wanted it, averaged.
    averages: Vec<f32>,
    /// `[FEATURES - 1, experts]`: logarithms of those, as the last forecast used them.
    logarithms: Vec<f32>,
    weights: [f32; FEATURES],
    /// Mean square of each weight's gradient.
    power: [f32; FEATURES],
    /// `[experts, experts]`: what one that is wanted adds to the log-odds of each at the next visit; empty where that would take too much memory.
    follows: Vec<f32>,
    /// What the last visit wanted: (expert, share of its tokens).
    before: Vec<(u32, f32)>,
    /// By expert: log-odds at the next visit, from averages alone, and with what the last visit wanted.
    alone: Vec<f32>,
    together: Vec<f32>,
}

impl Forecast {
    /// A forecast for layers of so many experts. What experts say about each other is learned if it takes at most `pairs` bytes
    /// ([`Forecast::pair_bytes`]): the number of experts comes from a file that may be hostile.
    pub fn new(experts: &[usize], pairs: u64) -> Forecast {
        let paired = Forecast::pair_bytes(experts) <= pairs;
        let widest = experts.iter().copied().max().unwrap_or(0);
        Forecast {
            layers: experts.iter().map(|n| LayerForecast::new(*n, paired)).collect(),
            wanted: vec![0.0; widest],
            excess: vec![0.0; widest],
        }
    }

    /// Bytes for each expert at most, without what experts say about each other.
    pub const BYTES_PER_EXPERT: usize = 4 * (2 * HALF_LIVES.len() + 4 + 2);

    /// Bytes of what experts say about each other.
    pub fn pair_bytes(experts: &[usize]) -> u64 {
        let of_layer = |n: &usize| 4u64.saturating_mul(*n as u64).saturating_mul(*n as u64);
        experts.iter().map(of_layer).fold(0, u64::saturating_add)
    }

    /// Whether nothing is forecast.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        let floats = |l: &LayerForecast| {
            l.averages.len() + l.logarithms.len() + l.follows.len() + l.alone.len() + l.together.len() + 2 * l.experts
        };
        4 * (self.layers.iter().map(floats).sum::<usize>() + self.wanted.len() + self.excess.len())
    }

    /// What a visit of `n` tokens wanted. Gives for each expert of the layer the probability that a token of the next visit wants it, and that one of
    /// a later visit does, if the next does not.
    pub fn visit(&mut self, layer: usize, wanted: &[u32], tokens: &[u32], n: f32, soon: &mut [f32], later: &mut [f32]) {
        let layer = &mut self.layers[layer];
        let (shares, excess) = (&mut self.wanted[..layer.experts], &mut self.excess[..layer.experts]);
        shares.fill(0.0);
        wanted.iter().zip(tokens).for_each(|(expert, uses)| shares[*expert as usize] = (*uses as f32 / n).min(1.0));
        layer.learn(shares, excess);
        layer.average(shares, n);
        layer.before.clear();
        layer.before.extend(wanted.iter().map(|e| (*e, shares[*e as usize])));
        layer.predict();
        for (i, (soon, later)) in soon.iter_mut().zip(later).enumerate() {
            *soon = probability(layer.together[i]);
            // What the last visit wanted says less about each visit that comes later.
            *later = (*soon + probability(layer.alone[i])) / 2.0;
        }
    }
}

impl LayerForecast {
    fn new(experts: usize, paired: bool) -> LayerForecast {
        // The geometric mean of the averages, until it is known better.
        let mut weights = [1.0 / HALF_LIVES.len() as f32; FEATURES];
        weights[0] = 0.3;
        LayerForecast {
            experts,
            averages: vec![0.0; HALF_LIVES.len() * experts],
            logarithms: vec![logarithm(LEAST); HALF_LIVES.len() * experts],
            weights,
            power: [1.0; FEATURES],
            follows: if paired { vec![0.0; experts * experts] } else { Vec::new() },
            before: Vec::with_capacity(experts),
            alone: vec![0.0; experts],
            together: vec![0.0; experts],
        }
    }

    /// Corrects the weights by what the last forecast was wrong about. `excess`: `[experts]`, overwritten.
    fn learn(&mut self, wanted: &[f32], excess: &mut [f32]) {
        // 1. the weights of averages, by the forecast from them alone
        let errors = excess.iter_mut().zip(&self.alone).zip(wanted);
        errors.for_each(|((excess, odds), share)| *excess = probability(*odds) - share);
        let mut gradient = [0.0; FEATURES];
        gradient[0] = excess.iter().sum();
        for (g, logarithms) in gradient[1..].iter_mut().zip(self.logarithms.chunks_exact(self.experts)) {
            *g = logarithms.iter().zip(&*excess).map(|(x, e)| x * e).sum();
        }
        for ((weight, power), g) in self.weights.iter_mut().zip(&mut self.power).zip(gradient) {
            *power += (g * g - *power) * 0.0005;
            *weight -= STEP * g / (power.sqrt() + 1e-3);
        }
        // 2. what experts say about each other, by the whole forecast
        if self.follows.is_empty() {
            return;
        }
        let errors = excess.iter_mut().zip(&self.together).zip(wanted);
        errors.for_each(|((excess, odds), share)| *excess = probability(*odds) - share);
        for &(expert, share) in &self.before {
            let row = &mut self.follows[expert as usize * self.experts..][..self.experts];
            row.iter_mut().zip(&*excess).for_each(|(w, e)| *w -= STEP_FOLLOWS * share * e);
        }
    }

    /// Takes the visit's `n` tokens into the averages.
    fn average(&mut self, wanted: &[f32], n: f32) {
        for (half_life, averages) in HALF_LIVES.iter().zip(self.averages.chunks_exact_mut(self.experts)) {
            let part = 1.0 - (-n / half_life).exp2();
            averages.iter_mut().zip(wanted).for_each(|(a, share)| *a += part * (share - *a));
        }
        let logarithms = self.logarithms.iter_mut().zip(&self.averages);
        logarithms.for_each(|(l, a)| *l = logarithm(*a + LEAST));
    }

    /// Log-odds of each expert at the next visit.
    fn predict(&mut self) {
        self.alone.fill(self.weights[0]);
        for (weight, logarithms) in self.weights[1..].iter().zip(self.logarithms.chunks_exact(self.experts)) {
            self.alone.iter_mut().zip(logarithms).for_each(|(odds, l)| *odds += weight * l);
        }
        self.together.copy_from_slice(&self.alone);
        for &(expert, share) in self.before.iter().filter(|_| !self.follows.is_empty()) {
            let row = &self.follows[expert as usize * self.experts..][..self.experts];
            self.together.iter_mut().zip(row).for_each(|(odds, w)| *odds += share * w);
        }
    }
}

/// Natural logarithm of a positive number, to three hundredths: exponent and mantissa, read as one number, are close to it.
fn logarithm(x: f32) -> f32 {
    (x.to_bits() as f32 / (1 << 23) as f32 - 126.94) * std::f32::consts::LN_2
}

/// The probability for log-odds; never zero.
fn probability(odds: f32) -> f32 {
    1.0 / (1.0 + (-odds.clamp(-15.0, 15.0)).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_close() {
        for x in [0.01f32, 0.02, 0.1, 0.5, 0.75, 1.01] {
            assert!((logarithm(x) - x.ln()).abs() < 0.05, "{x}");
        }
    }

    /// The probabilities after these visits of one token each, to a single layer.
    fn after(experts: usize, visits: impl Iterator<Item = Vec<u32>>) -> (Vec<f32>, Vec<f32>) {
        let mut forecast = Forecast::new(&[experts], u64::MAX);
        let (mut soon, mut later) = (vec![0.0; experts], vec![0.0; experts]);
        visits.for_each(|w| forecast.visit(0, &w, &vec![1; w.len()], 1.0, &mut soon, &mut later));
        (soon, later)
    }

    #[test]
    fn frequent_experts_are_likelier() {
        // 0 every time, 1 every second, 2 every eighth, 3 never
        let mut state = 1u32;
        let mut random = move |of: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % of
        };
        let visits =
            (0..2000).map(|_| [1, 2, 8].into_iter().zip(0..).filter(|(of, _)| random(*of) == 0).map(|w| w.1).collect());
        let (soon, later) = after(4, visits);
        assert!(soon[0] > 0.8 && soon[3] < 0.1, "{soon:?}");
        assert!(later[0] > later[1] && later[1] > later[2] && later[2] > later[3], "{later:?}");
    }

    #[test]
    fn who_follows_whom_is_learned() {
        // 0 1 2 3 0 1 2 3 ..: how often says nothing.
        let (soon, _) = after(4, (0..3000).map(|t| vec![t % 4]));
        assert!(soon[0] > 0.7 && soon[1] < 0.2 && soon[2] < 0.2, "{soon:?}");
    }

    #[test]
    fn a_prefill_counts_by_its_tokens() {
        let mut forecast = Forecast::new(&[3], u64::MAX);
        let (mut soon, mut later) = ([0.0; 3], [0.0; 3]);
        forecast.visit(0, &[0, 1, 2], &[512, 100, 1], 512.0, &mut soon, &mut later);
        assert!(soon[0] > soon[1] && soon[1] > soon[2] && soon[2] > 0.0, "{soon:?}");
    }
}
