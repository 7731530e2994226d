//! `sluice bench serve`: sends a workload to any server with OpenAI's API, and measures what its users would notice. Answers are streamed and always of full length. Times
//! are those of vLLM's `bench serve`: TTFT from sending a request (waiting because of `--concurrency` does not count), TPOT the mean over an answer's tokens after its
//! first, ITL each gap between parts.

mod arrival;
mod client;
mod conversation;
mod report;
mod workload;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use fastrand::Rng;
use serde_json::{Value, json};
use tokio::runtime;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::sleep_until;

use self::client::Client;
use self::conversation::Thinking;
use self::report::ServeReport;
use self::workload::{Call, RequestTemplate, Spelling, around, arrivals, mixed};
use crate::terminal;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Workload {
    /// Prompts of one length that have nothing in common
    Random,
    /// Prompts that begin with the same --shared tokens
    SharedPrefix,
    /// Prompts and answers of random lengths, around --input and --output
    Lengths,
    /// One conversation with tools, replayed turn by turn: shows what is computed again
    Conversation,
    /// A prompt of --long tokens that arrives among --streams answers: shows how long those wait
    Arrival,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Prompts {
    /// Token ids if the server takes them
    Auto,
    /// Token ids: lengths are exact
    Ids,
    /// Words, about a token each
    Text,
}

#[derive(Args, Debug)]
pub struct ServeBenchArgs {
    /// The server: http://HOST:PORT or unix:PATH
    #[arg(long, value_name = "ADDRESS", default_value = "http://127.0.0.1:8080")]
    base_url: String,
    /// The model to request [default: the first in the server's list]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// What to send
    #[arg(long, value_enum, default_value = "random")]
    workload: Workload,
    /// Tokens per prompt
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = positive())]
    input: u64,
    /// Tokens per answer
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = positive())]
    output: u64,
    /// Number of requests
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = positive())]
    requests: u64,
    /// Requests that arrive per second, at random times; 0: all at once
    #[arg(long, value_name = "N", default_value_t = 10.0)]
    rate: f64,
    /// Requests in flight at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = positive())]
    concurrency: u64,
    /// Warm-up requests, which do not count
    #[arg(long, value_name = "N", default_value_t = 5)]
    warmups: u64,
    /// Tokens that all prompts of shared-prefix share at their start
    #[arg(long, value_name = "N", default_value_t = 900)]
    shared: u64,
    /// Requests in the conversation
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = positive())]
    turns: u64,
    /// What happens to thoughts in the conversation's earlier turns
    #[arg(long, value_enum, default_value = "kept")]
    thinking: Thinking,
    /// Answers in progress when the prompt of arrival comes
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = positive())]
    streams: u64,
    /// Tokens of the prompt of arrival
    #[arg(long, value_name = "N", default_value_t = 4000, value_parser = positive())]
    long: u64,
    /// How to send prompts
    #[arg(long, value_enum, default_value = "auto")]
    prompts: Prompts,
    /// Token ids stay below this one
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..))]
    vocabulary: u32,
    /// Sampling temperature; 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
    /// Seed of the workload
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Seconds after which a request counts as failed
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = positive())]
    timeout: u64,
    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

fn positive() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..1 << 32)
}

/// Runs the benchmark and prints its report.
pub fn run(args: &ServeBenchArgs) -> Result<()> {
    ensure!(args.rate.is_finite() && args.rate >= 0.0, "--rate must be 0 or above");
    ensure!(args.temperature.is_finite() && args.temperature >= 0.0, "--temperature must be 0 or above");
    if args.workload == Workload::SharedPrefix {
        ensure!(args.shared < args.input, "--shared {} leaves nothing of --input {}", args.shared, args.input);
    }
    // One thread: a server on the same machine needs the others.
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(measure(args))
}

async fn measure(args: &ServeBenchArgs) -> Result<()> {
    let client = Client::new(&args.base_url, Duration::from_secs(args.timeout))?;
    let model = match &args.model {
        Some(name) => name.clone(),
        None => client.model().await.with_context(|| args.base_url.clone())?,
    };
    let (input, output) = (args.input as usize, args.output as usize);
    let spelling = Spelling::Ids(args.vocabulary);
    let mut template =
        RequestTemplate { model, spelling, seed: args.seed, input, output, temperature: args.temperature };
    if args.workload != Workload::Conversation {
        template.spelling = spelling_of(&client, args, &template).await.with_context(|| args.base_url.clone())?;
    }
    let result = match args.workload {
        Workload::Conversation => conversation::run(&client, &template, args.turns as usize, args.thinking).await?,
        Workload::Arrival => arrival::run(&client, &template, args.streams as usize, args.long as usize).await?,
        _ => {
            let report = many(&client, args, &template).await?;
            if !args.json {
                print_head(args, &template);
                report.print();
            }
            let failed = report.failures.first().cloned().unwrap_or_default();
            ensure!(!report.answers.is_empty(), "no request was answered: {failed}");
            report.to_json()
        }
    };
    if args.json {
        println!("{}", with_head(args, &template, result));
    } else if args.workload == Workload::Conversation {
        print_head(args, &template);
        conversation::print(&result);
    } else if args.workload == Workload::Arrival {
        print_head(args, &template);
        arrival::print(&result);
    }
    Ok(())
}

/// How to send prompts. One request finds out whether the server takes ids.
async fn spelling_of(client: &Client, args: &ServeBenchArgs, template: &RequestTemplate) -> Result<Spelling> {
    let ids = Spelling::Ids(args.vocabulary);
    if args.prompts == Prompts::Text {
        return Ok(Spelling::Words);
    }
    let few = 8;
    let call = Call { prompt: ids.prompt(template.seed, u64::MAX, 0, few), output: 1 };
    let answer = client.stream("/v1/completions", template.completion(&call), |_| {}).await;
    match (args.prompts, answer) {
        (_, Ok(answer)) if answer.prompt_tokens.is_none_or(|n| n == few) => Ok(ids),
        (Prompts::Ids, Ok(answer)) => {
            anyhow::bail!("{few} token ids became {} tokens", answer.prompt_tokens.unwrap_or_default())
        }
        (Prompts::Ids, Err(e)) => Err(e),
        (_, Ok(_)) => Ok(Spelling::Words),
        (_, Err(e)) => {
            terminal::note(&format!("prompts are sent as text, since ids are not taken ({e:#})"));
            Ok(Spelling::Words)
        }
    }
}

/// The requests from number `from` on.
fn calls(args: &ServeBenchArgs, template: &RequestTemplate, from: u64, n: u64) -> Vec<Call> {
    let one = |number: u64| {
        let (mut shared, mut own, mut output) = (0, template.input, template.output);
        match args.workload {
            Workload::SharedPrefix => {
                shared = args.shared as usize;
                own -= shared;
            }
            Workload::Lengths => {
                let mut rng = Rng::with_seed(mixed(!template.seed, number));
                (own, output) = (around(&mut rng, template.input), around(&mut rng, template.output));
            }
            _ => {}
        }
        Call { prompt: template.spelling.prompt(template.seed, number, shared, own), output }
    };
    (from..from + n).map(one).collect()
}

/// Runs the workloads of many requests.
async fn many(client: &Client, args: &ServeBenchArgs, template: &RequestTemplate) -> Result<ServeReport> {
    let warm = send(client, args, template, calls(args, template, args.requests, args.warmups), None).await?;
    if let Some(failed) = warm.failures.first().filter(|_| warm.answers.is_empty()) {
        anyhow::bail!("{}: {failed}", args.base_url);
    }
    let rate = Some(args.rate).filter(|rate| *rate > 0.0);
    send(client, args, template, calls(args, template, 0, args.requests), rate).await
}

async fn send(
    client: &Client,
    args: &ServeBenchArgs,
    template: &RequestTemplate,
    calls: Vec<Call>,
    rate: Option<f64>,
) -> Result<ServeReport> {
    let places = Arc::new(Semaphore::new(args.concurrency as usize));
    let times = arrivals(args.seed, calls.len(), rate);
    // Made before the first request is sent, so that this time is not measured.
    let bodies: Vec<Value> = calls.iter().map(|call| template.completion(call)).collect();
    let begun = Instant::now();
    let mut running = JoinSet::new();
    for (body, at) in bodies.into_iter().zip(times) {
        let (client, places) = (client.clone(), Arc::clone(&places));
        running.spawn(async move {
            sleep_until((begun + Duration::from_secs_f64(at)).into()).await;
            let _place = places.acquire().await?;
            client.stream("/v1/completions", body, |_| {}).await
        });
    }
    let mut report = ServeReport { places: args.concurrency as usize, ..ServeReport::default() };
    let mut end = begun;
    while let Some(done) = running.join_next().await {
        match done? {
            Ok(answer) => {
                end = end.max(answer.done);
                report.answers.push(answer);
            }
            Err(e) => report.failures.push(format!("{e:#}")),
        }
    }
    report.seconds = (end - begun).as_secs_f64();
    Ok(report)
}

fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().expect("none is hidden").get_name().to_owned()
}

/// The result with the settings in front of it.
fn with_head(args: &ServeBenchArgs, template: &RequestTemplate, result: Value) -> Value {
    let mut all = json!({
        "bench": "serve", "base_url": args.base_url, "model": template.model, "workload": name(&args.workload), "seed": args.seed,
        "input": args.input, "output": args.output,
    });
    let more = match args.workload {
        Workload::Conversation => json!({"thinking": name(&args.thinking)}),
        Workload::Arrival => json!({}),
        _ => json!({
            "rate": args.rate, "concurrency": args.concurrency, "warmups": args.warmups,
            "shared": (args.workload == Workload::SharedPrefix).then_some(args.shared),
            "prompts": if template.spelling == Spelling::Words { "text" } else { "ids" },
        }),
    };
    for part in [more, result] {
        all.as_object_mut().expect("made above").extend(part.as_object().cloned().unwrap_or_default());
    }
    all
}

fn print_head(args: &ServeBenchArgs, template: &RequestTemplate) {
    let what = match args.workload {
        Workload::Conversation => {
            format!("{} turns, thinking {}, answers of {} tokens", args.turns, name(&args.thinking), args.output)
        }
        Workload::Arrival => format!("streams behind prompts of {} tokens", args.input),
        _ => {
            let rate = if args.rate > 0.0 { format!("{} a second", args.rate) } else { "all at once".to_owned() };
            let spelled = if template.spelling == Spelling::Words { ", sent as text" } else { "" };
            format!("{} tokens in{spelled}, {} out, {rate}, {} under way", args.input, args.output, args.concurrency)
        }
    };
    println!("{} at {}, {}: {what}", terminal::shown(&template.model), args.base_url, name(&args.workload));
}
