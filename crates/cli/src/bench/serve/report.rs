//! Statistics of many answers: throughput, and the times that users notice.

use std::time::Instant;

use serde_json::{Value, json};

use super::client::StreamedAnswer;
use crate::bench::figures::Figures;

/// Many answers, and the errors of failed requests.
#[derive(Default)]
pub struct ServeReport {
    /// Complete answers.
    pub answers: Vec<StreamedAnswer>,
    /// Messages of failed requests.
    pub failures: Vec<String>,
    /// From the first request to the end of the last answer.
    pub seconds: f64,
    /// Requests that may be in flight at once.
    pub places: usize,
}

impl StreamedAnswer {
    /// Milliseconds to the first token.
    pub fn ttft(&self) -> f64 {
        1e3 * (self.parts[0] - self.sent).as_secs_f64()
    }

    /// Number of generated tokens, as the server counts them, or else of parts.
    pub fn generated(&self) -> usize {
        self.generated_tokens.unwrap_or(self.parts.len())
    }

    /// Milliseconds per token after the first; `None` if there was only one.
    fn tpot(&self) -> Option<f64> {
        let others = self.generated().checked_sub(1).filter(|n| *n > 0)?;
        Some(1e3 * (self.done - self.parts[0]).as_secs_f64() / others as f64)
    }

    /// Milliseconds between parts.
    fn gaps(&self) -> impl Iterator<Item = f64> {
        self.parts.windows(2).map(|w| 1e3 * (w[1] - w[0]).as_secs_f64())
    }
}

impl ServeReport {
    fn sum(&self, what: impl Fn(&StreamedAnswer) -> usize) -> usize {
        self.answers.iter().map(what).sum()
    }

    fn generated(&self) -> usize {
        self.sum(StreamedAnswer::generated)
    }

    fn prompts(&self) -> usize {
        self.sum(|a| a.prompt_tokens.unwrap_or(0))
    }

    /// Prompt tokens that the server had cached; `None` if it does not say.
    fn cached(&self) -> Option<usize> {
        self.answers.iter().map(|a| a.cached_tokens).sum()
    }

    fn per_second(&self, n: usize) -> f64 {
        n as f64 / self.seconds
    }

    /// Gaps during which all `places` were generating, so that no prompt was being computed.
    fn full_gaps(&self) -> Figures {
        let spans: Vec<_> = self.answers.iter().map(|a| (a.parts[0], a.parts[a.parts.len() - 1])).collect();
        let is_full = |w: &&[Instant]| spans.iter().filter(|s| s.0 <= w[0] && w[1] <= s.1).count() >= self.places;
        let gaps = self.answers.iter().flat_map(|a| a.parts.windows(2));
        gaps.filter(is_full).map(|w| 1e3 * (w[1] - w[0]).as_secs_f64()).collect()
    }

    /// Key, name and values in milliseconds of each kind of time.
    fn times(&self) -> [(&'static str, &'static str, Figures); 4] {
        [
            ("ttft_ms", "TTFT", self.answers.iter().map(StreamedAnswer::ttft).collect()),
            ("tpot_ms", "TPOT", self.answers.iter().filter_map(StreamedAnswer::tpot).collect()),
            ("itl_ms", "ITL", self.answers.iter().flat_map(StreamedAnswer::gaps).collect()),
            ("full_itl_ms", "ITL, all generating", self.full_gaps()),
        ]
    }

    /// The report as JSON.
    pub fn to_json(&self) -> Value {
        let mut value = json!({
            "requests": {"ok": self.answers.len(), "failed": self.failures.len()},
            "seconds": self.seconds,
            "prompt_tokens": self.prompts(),
            "output_tokens": self.generated(),
            "cached_tokens": self.cached(),
            "output_tokens_per_second": self.per_second(self.generated()),
            "total_tokens_per_second": self.per_second(self.generated() + self.prompts()),
            "requests_per_second": self.per_second(self.answers.len()),
        });
        for (name, _, figures) in self.times() {
            value[name] = match figures.is_empty() {
                true => Value::Null,
                false => {
                    json!({"mean": figures.mean(), "median": figures.median(), "p99": figures.percentile(99.0), "highest": figures.high()})
                }
            };
        }
        value["failures"] = json!(self.different_failures());
        value
    }

    /// Prints the report as text.
    pub fn print(&self) {
        let row = |name: &str, value: String| println!("{name:<22}{value}");
        row("requests", format!("{} ok, {} failed", self.answers.len(), self.failures.len()));
        row("duration", format!("{:.1} s", self.seconds));
        let cached =
            self.cached().map_or("the server does not report cached tokens".to_owned(), |n| format!("{n} cached"));
        row("prompt tokens", format!("{}, {cached}", self.prompts()));
        row("output tokens", self.generated().to_string());
        row("output tokens/s", format!("{:.2}", self.per_second(self.generated())));
        row("total tokens/s", format!("{:.2}", self.per_second(self.generated() + self.prompts())));
        row("requests/s", format!("{:.3}", self.per_second(self.answers.len())));
        println!("{:<22}{:>12}{:>12}{:>12}", "milliseconds", "mean", "median", "P99");
        for (_, name, figures) in self.times() {
            if !figures.is_empty() {
                let (mean, median, high) = (figures.mean(), figures.median(), figures.percentile(99.0));
                println!("{name:<22}{mean:>12.1}{median:>12.1}{high:>12.1}");
            }
        }
        for failure in self.different_failures() {
            crate::terminal::note(&failure);
        }
    }

    /// The first few of them, without duplicates.
    fn different_failures(&self) -> Vec<String> {
        let mut all = self.failures.clone();
        all.sort();
        all.dedup();
        all.truncate(5);
        all
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn answer(parts_ms: &[u64], done_ms: u64, tokens: usize) -> StreamedAnswer {
        let sent = Instant::now();
        let at = |ms: &u64| sent + Duration::from_millis(*ms);
        StreamedAnswer {
            sent,
            parts: parts_ms.iter().map(at).collect(),
            done: at(&done_ms),
            prompt_tokens: Some(100),
            generated_tokens: Some(tokens),
            cached_tokens: Some(30),
        }
    }

    #[test]
    fn a_report_has_the_times_as_vllms_benchmark_defines_them() {
        let answers = vec![answer(&[100, 150, 250], 250, 4), answer(&[300], 300, 1)];
        let report = ServeReport { answers, failures: vec!["no".into(), "no".into()], seconds: 2.0, places: 2 };
        let v = report.to_json();
        let near = |value: &Value, wanted: f64| assert!((value.as_f64().unwrap() - wanted).abs() < 1e-6, "{value}");
        assert_eq!((&v["requests"]["ok"], &v["requests"]["failed"]), (&json!(2), &json!(2)));
        assert_eq!(
            (&v["prompt_tokens"], &v["output_tokens"], &v["cached_tokens"]),
            (&json!(200), &json!(5), &json!(60))
        );
        near(&v["output_tokens_per_second"], 2.5);
        near(&v["total_tokens_per_second"], 102.5);
        near(&v["requests_per_second"], 1.0);
        near(&v["ttft_ms"]["mean"], 200.0);
        // Three tokens after the first in 150 ms; the other answer has none.
        near(&v["tpot_ms"]["mean"], 50.0);
        near(&v["itl_ms"]["median"], 75.0);
        near(&v["itl_ms"]["p99"], 99.5);
        assert_eq!(v["failures"], json!(["no"]));
    }

    #[test]
    fn gaps_while_all_generate_are_told_from_those_beside_prompts() {
        let sent = Instant::now();
        let parts = |ms: &[u64]| ms.iter().map(|ms| sent + Duration::from_millis(*ms)).collect::<Vec<_>>();
        let mut both = [answer(&[1], 1, 4), answer(&[1], 1, 3)];
        (both[0].parts, both[1].parts) = (parts(&[0, 90, 100, 110]), parts(&[90, 102, 125]));
        let report = ServeReport { answers: both.into(), failures: Vec::new(), seconds: 1.0, places: 2 };
        assert_eq!(report.to_json()["full_itl_ms"]["highest"], 12.0);
        assert_eq!(report.to_json()["full_itl_ms"]["median"], 10.0);
    }

    #[test]
    fn where_the_server_says_nothing_of_its_cache_neither_do_we() {
        let mut one = answer(&[1], 1, 1);
        one.cached_tokens = None;
        let report =
            ServeReport { answers: vec![one, answer(&[1], 1, 1)], failures: Vec::new(), seconds: 1.0, places: 1 };
        let v = report.to_json();
        assert_eq!((&v["cached_tokens"], &v["tpot_ms"], &v["itl_ms"]), (&Value::Null, &Value::Null, &Value::Null));
    }
}
