//! A long prompt that arrives while other answers are streamed: how long those wait for their next token, and how long the prompt takes.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::client::Client;
use super::workload::{Call, RequestTemplate};
use crate::bench::figures::Figures;

/// Tokens that each stream has had before the prompt arrives, so that its usual gap is known.
const BEFORE: usize = 32;
/// Tokens of a stream: more than it will reach, since it is cancelled when the prompt is done.
const ENDLESS: usize = 2048;
/// How often streams are polled.
const LOOK: Duration = Duration::from_millis(5);

/// Gaps between tokens of a stream, in milliseconds.
struct StreamGaps {
    usual: f64,
    largest: f64,
}

/// Measures the prompt of `long` tokens, alone and then among `streams` answers to prompts of `template.input` tokens.
pub async fn run(client: &Client, template: &RequestTemplate, streams: usize, long: usize) -> Result<Value> {
    let prompt = |number| Call { prompt: template.spelling.prompt(template.seed, number, 0, long), output: 1 };
    let [alone, among] = [0, 1].map(|n| prompt(u64::MAX - n));
    // 1. The prompt alone
    let alone = client.stream("/v1/completions", template.completion(&alone), |_| {}).await?.ttft();
    // 2. Start the streams, and wait until all have tokens
    let came: Vec<Arc<Mutex<Vec<Instant>>>> = (0..streams).map(|_| Arc::default()).collect();
    let mut running = JoinSet::new();
    for (number, came) in came.iter().enumerate() {
        let prompt = template.spelling.prompt(template.seed, number as u64, 0, template.input);
        let body = template.completion(&Call { prompt, output: ENDLESS });
        let (client, came) = (client.clone(), Arc::clone(came));
        running.spawn(async move {
            client.stream("/v1/completions", body, |at| came.lock().expect("no holder panics").push(at)).await
        });
    }
    let parts = |came: &Mutex<Vec<Instant>>| came.lock().expect("no holder panics").clone();
    let mut all_going = None::<Instant>;
    loop {
        if let Some(over) = running.try_join_next() {
            match over? {
                Ok(_) => bail!("a stream ended before the prompt came: its tokens are too few"),
                Err(e) => return Err(e.context("a stream")),
            }
        }
        if all_going.is_none() && came.iter().all(|c| !parts(c).is_empty()) {
            all_going = Some(Instant::now());
        }
        let since = |from: Instant| came.iter().all(|c| parts(c).iter().filter(|at| **at > from).count() > BEFORE);
        if all_going.is_some_and(since) {
            break;
        }
        sleep(LOOK).await;
    }
    // 3. The prompt among the streams, which are cancelled at its first token
    let from = all_going.expect("set above");
    let answer = client.stream("/v1/completions", template.completion(&among), |_| {}).await?;
    let until = answer.parts[0];
    let ended = running.len() < streams || running.try_join_next().is_some();
    running.abort_all();
    let measured: Vec<StreamGaps> = came.iter().map(|c| stream(&parts(c), from, answer.sent, until)).collect();
    let ratios = || measured.iter().map(|s| s.largest / s.usual).collect::<Figures>();
    Ok(json!({
        "streams": streams, "long_tokens": long,
        "alone_ms": alone, "among_ms": answer.ttft(), "among_over_alone": answer.ttft() / alone,
        "usual_gap_ms": measured.iter().map(|s| s.usual).collect::<Figures>().median(),
        "largest_gap_ms": measured.iter().map(|s| s.largest).collect::<Figures>().high(),
        "largest_gap_over_usual": ratios().high(),
        "a_stream_ended_early": ended,
    }))
}

/// A stream's usual gap before the prompt was sent, and its largest from then until the prompt's first token. A stream without any token in that time has waited for all of it.
fn stream(parts: &[Instant], from: Instant, sent: Instant, until: Instant) -> StreamGaps {
    let gap = |a: Instant, b: Instant| 1e3 * (b - a).as_secs_f64();
    let usual = parts.windows(2).filter(|w| w[0] >= from && w[1] <= sent).map(|w| gap(w[0], w[1]));
    let meanwhile = parts.windows(2).filter(|w| w[1] > sent && w[0] < until).map(|w| gap(w[0], w[1]));
    let last = parts.last().filter(|last| **last < until).map(|last| gap(*last, until));
    StreamGaps { usual: usual.collect::<Figures>().median(), largest: meanwhile.chain(last).fold(0.0, f64::max) }
}

/// Prints a report as text.
pub fn print(report: &Value) {
    let number = |name: &str| report[name].as_f64().unwrap_or(f64::NAN);
    println!("prompt of {} tokens alone {:>14.0} ms", report["long_tokens"], number("alone_ms"));
    println!(
        "among {} streams {:>21.0} ms, {:.2} times as long",
        report["streams"],
        number("among_ms"),
        number("among_over_alone")
    );
    println!(
        "usual gap of a stream {:>17.1} ms, the largest {:.1} ms, {:.2} times its own usual one",
        number("usual_gap_ms"),
        number("largest_gap_ms"),
        number("largest_gap_over_usual")
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_waits_has_its_whole_wait_counted() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        let parts: Vec<Instant> = [0, 10, 20, 30, 75, 85].map(at).into();
        // The prompt is sent at 35 and has its first token at 80.
        let s = stream(&parts, at(0), at(35), at(80));
        assert!((s.usual - 10.0).abs() < 1e-9 && (s.largest - 45.0).abs() < 1e-9);
        // No token came until the end.
        let s = stream(&parts[..4], at(0), at(35), at(130));
        assert!((s.largest - 100.0).abs() < 1e-9);
    }
}
