//! `sluice bench kv`: memory of keys and values committed as needed, compared with memory that is resident from the start. Every case is a process of its own, so that
//! its peak of memory is its own.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::{Value, json};
use sluice_engine::MemoryClass;

use super::case::{self, figure};
use super::figures::Figures;
use super::subject::{token, tokens};
use crate::engine_args::{EngineArgs, model_or_demo};
use crate::load;
use sluice_front::machine;

#[derive(Args, Debug)]
pub struct KvArgs {
    /// Folder of the model (config.json and safetensors) [default: the demo model]
    model: Option<PathBuf>,
    /// Tokens to reserve, one number or several; dynamic allocation is measured as well
    #[arg(long, value_delimiter = ',', default_value = "2048,4096", value_name = "N,..")]
    reserve: Vec<usize>,
    /// Number of measurements; the median counts
    #[arg(long, default_value_t = 5, value_name = "N")]
    rounds: usize,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 34, value_name = "N")]
    prompt: usize,
    /// Tokens to generate
    #[arg(long, default_value_t = 200, value_name = "N")]
    tokens: usize,
    /// Print one line of JSON for each case
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
    #[arg(long, hide = true)]
    case: Option<String>,
}

/// Runs the benchmark and prints a row for each case.
pub fn run(args: &KvArgs) -> Result<()> {
    if let Some(case) = &args.case {
        return run_case(args, case);
    }
    ensure!(args.rounds > 0 && args.prompt > 0 && args.tokens > 0, "rounds, prompt and tokens must be at least 1");
    let cases: Vec<usize> = std::iter::once(0).chain(args.reserve.iter().copied()).collect();
    let mut rows: Vec<Vec<Value>> = vec![Vec::new(); cases.len()];
    for round in 0..args.rounds {
        // The order rotates, so that no case always follows the same other one.
        for i in (0..cases.len()).map(|i| (i + round) % cases.len()) {
            rows[i].push(case::run(&cases[i].to_string())?.0);
        }
    }
    let of = |row: &[Value], name: &str| -> Figures { row.iter().map(|v| figure(v, name)).collect() };
    let folder = model_or_demo(args.model.as_deref())?;
    let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
    const NAMES: [&str; 6] = [
        "first_token_seconds",
        "prompt_tokens_per_second",
        "generation_tokens_per_second",
        "peak_memory",
        "kv_growth",
        "anonymous_growth",
    ];
    if !args.json {
        println!("{name}: {} tokens of prompt, {} generated", args.prompt, args.tokens);
        println!(
            "{:<14}{:>24}{:>22}{:>22}{:>10}{:>15}{:>20}{:>20}",
            "kv",
            "first token ms",
            "prompt tok/s",
            "gen tok/s",
            "peak GB",
            "difference GB",
            "KV grew by",
            "anonymous grew by"
        );
    }
    for (reserve, row) in cases.iter().zip(&rows) {
        let mode = if *reserve == 0 { "dynamic".to_owned() } else { format!("reserve={reserve}") };
        let [first, prompt, generation, peak, kv, anonymous] = NAMES.map(|n| of(row, n));
        let dynamic = of(&rows[0], "peak_memory");
        if args.json {
            let mut line =
                json!({"bench": "kv", "model": name, "kv": mode, "prompt": args.prompt, "tokens": args.tokens});
            for (name, figures) in NAMES.iter().zip([&first, &prompt, &generation, &peak, &kv, &anonymous]) {
                line[*name] = figures.to_json();
                let over = figures.over(&of(&rows[0], name));
                if !matches!(*name, "kv_growth" | "anonymous_growth") {
                    line[format!("{name}_over_dynamic")] = over.to_json();
                }
            }
            println!("{line}");
        } else {
            println!(
                "{mode:<14}{:>24}{:>22}{:>22}{:>10.3}{:>+15.3}{:>20}{:>20}",
                first.map(|t| t * 1e3).to_text(2),
                prompt.to_text(1),
                generation.to_text(1),
                peak.median() / 1e9,
                (peak.median() - dynamic.median()) / 1e9,
                format!("{} B", kv.high()),
                format!("{} B", anonymous.high()),
            );
        }
    }
    Ok(())
}

/// One case: the number of tokens to reserve; 0 for none.
fn run_case(args: &KvArgs, case: &str) -> Result<()> {
    let folder = model_or_demo(args.model.as_deref())?;
    let mut options = args.engine.options()?;
    let reserve: usize = case.parse()?;
    options.kv_reserve = (reserve > 0).then_some(reserve);
    options
        .max_context
        .get_or_insert(args.reserve.iter().copied().max().unwrap_or(0).max(args.prompt + args.tokens + 1));
    let mut engine = load::engine(&folder, &args.engine, options)?;
    load::finish(&mut engine)?;
    let vocabulary = engine.model().vocabulary;
    // Touch weights and scratch before measuring, in a sequence that leaves one block.
    let id = engine.add_sequence();
    engine.feed(id, &tokens(0, args.prompt.min(8), vocabulary), false, |_, _| Ok(()))?;
    engine.remove_sequence(id);

    let id = engine.add_sequence();
    let prompt = tokens(0, args.prompt, vocabulary);
    let begun = Instant::now();
    engine.feed(id, &prompt, false, |_, _| Ok(()))?;
    let first = begun.elapsed().as_secs_f64();
    let before = (engine.memory(MemoryClass::Kv), machine::own_memory("RssAnon").unwrap_or(0));
    let begun = Instant::now();
    for i in args.prompt..args.prompt + args.tokens {
        engine.feed(id, &[token(i, vocabulary)], false, |_, _| Ok(()))?;
    }
    let generation = args.tokens as f64 / begun.elapsed().as_secs_f64();
    let after = (engine.memory(MemoryClass::Kv), machine::own_memory("RssAnon").unwrap_or(0));
    let found = json!({
        "first_token_seconds": first,
        "prompt_tokens_per_second": args.prompt as f64 / first,
        "generation_tokens_per_second": generation,
        "peak_memory": machine::own_memory("VmHWM"),
        "kv_growth": after.0 - before.0,
        "anonymous_growth": after.1 as i64 - before.1 as i64,
    });
    println!("{found}");
    Ok(())
}
