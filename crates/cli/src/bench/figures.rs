//! Repeated measurements of one quantity: their median and range.

use serde_json::{Value, json};

/// Measurements of one quantity.
#[derive(Clone, Debug, Default)]
pub struct Figures(Vec<f64>);

impl Figures {
    /// Adds a measurement.
    pub fn push(&mut self, x: f64) {
        self.0.push(x);
    }

    /// Whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn sorted(&self) -> Vec<f64> {
        let mut all = self.0.clone();
        all.sort_by(f64::total_cmp);
        all
    }

    /// The median.
    pub fn median(&self) -> f64 {
        let all = self.sorted();
        let n = all.len();
        (all[(n - 1) / 2] + all[n / 2]) / 2.0
    }

    /// The smallest measurement; there must be one.
    pub fn low(&self) -> f64 {
        self.sorted()[0]
    }

    /// The largest measurement; there must be one.
    pub fn high(&self) -> f64 {
        self.sorted()[self.0.len() - 1]
    }

    /// The mean; `NaN` without measurements.
    pub fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }

    /// The given percentile, interpolated.
    pub fn percentile(&self, percent: f64) -> f64 {
        let all = self.sorted();
        let at = percent / 100.0 * (all.len() - 1) as f64;
        let (below, above) = (all[at.floor() as usize], all[at.ceil() as usize]);
        below + (above - below) * at.fract()
    }

    /// Each measurement divided by the one of `other` from the same round.
    pub fn over(&self, other: &Figures) -> Figures {
        Figures(self.0.iter().zip(&other.0).map(|(a, b)| a / b).collect())
    }

    /// Applies a function to each measurement.
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Figures {
        Figures(self.0.iter().map(|x| f(*x)).collect())
    }

    /// Median, range and all values in order; `null` without measurements.
    pub fn to_json(&self) -> Value {
        if self.is_empty() {
            return Value::Null;
        }
        json!({"median": self.median(), "low": self.low(), "high": self.high(), "all": self.0})
    }

    /// `75.6 (74.1-76.0)`, or `-` without measurements.
    pub fn to_text(&self, digits: usize) -> String {
        if self.is_empty() {
            return "-".into();
        }
        if self.0.len() == 1 {
            return format!("{:.digits$}", self.0[0]);
        }
        format!("{:.digits$} ({:.digits$}-{:.digits$})", self.median(), self.low(), self.high())
    }
}

impl FromIterator<f64> for Figures {
    fn from_iter<I: IntoIterator<Item = f64>>(iter: I) -> Figures {
        Figures(iter.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        let f: Figures = [3.0, 1.0, 2.0].into_iter().collect();
        assert_eq!((f.median(), f.low(), f.high()), (2.0, 1.0, 3.0));
        let even: Figures = [4.0, 1.0, 2.0, 3.0].into_iter().collect();
        assert_eq!(even.median(), 2.5);
        assert_eq!(even.over(&even).median(), 1.0);
        assert_eq!(f.to_text(1), "2.0 (1.0-3.0)");
        assert_eq!((even.mean(), even.percentile(75.0), even.percentile(100.0)), (2.5, 3.25, 4.0));
        assert_eq!((f.percentile(50.0), f.percentile(0.0)), (f.median(), f.low()));
        assert_eq!(Figures::default().to_json(), Value::Null);
    }
}
