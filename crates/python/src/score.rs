//! Logits, hidden states and log-probabilities of given tokens. Each runs on the engine's thread, between the steps of other requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};

use anyhow::{Result, bail, ensure};
use pyo3::prelude::*;
use sluice_engine::Engine;
use sluice_engine::sampling::Logprobs;

use crate::arrays::Array;
use crate::errors::{self, EngineError};
use crate::waiting::{LOOK, detached};

/// A token's log-probability, and the likeliest tokens with theirs.
pub type Scored = (f64, Vec<(u32, f64)>);
/// Passes work to an engine's thread.
pub type RunOn<'a> = &'a (dyn Fn(Box<dyn FnOnce(&mut Engine) + Send>) -> PyResult<()> + Sync);

/// Has `work` done with an engine, and looks for signals meanwhile. After one, the flag that it gets is set.
///
/// # Errors
/// Those of `work`; a signal's exception; an engine that has ended.
fn on_engine<T: Send + 'static>(
    py: Python<'_>,
    run: RunOn,
    work: impl FnOnce(&mut Engine, &AtomicBool) -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let (sender, mut receiver) = channel();
    run(Box::new(move |engine| _ = sender.send(work(engine, &stopped))))?;
    loop {
        let waiting = &mut receiver;
        match detached(py, move || Ok(waiting.recv_timeout(LOOK)))? {
            Ok(done) => return done.map_err(|e| errors::request(&e)),
            Err(RecvTimeoutError::Disconnected) => return Err(EngineError::new_err("the engine has ended")),
            Err(RecvTimeoutError::Timeout) => {
                if let Err(interrupted) = py.check_signals() {
                    stop.store(true, Ordering::Relaxed);
                    return Err(interrupted);
                }
            }
        }
    }
}

fn check(stop: &AtomicBool) -> Result<()> {
    ensure!(!stop.load(Ordering::Relaxed), "interrupted");
    Ok(())
}

/// Memory for rows of floats, if there is any.
fn room(rows: usize, columns: usize) -> Result<Vec<AtomicU32>> {
    let mut bits = Vec::new();
    let Some(count) = rows.checked_mul(columns) else { bail!("{rows} rows of {columns} numbers are too many") };
    bits.try_reserve_exact(count)?;
    Ok(bits)
}

fn append(bits: &mut Vec<AtomicU32>, row: &[f32]) {
    bits.extend(row.iter().map(|x| AtomicU32::new(x.to_bits())));
}

/// The logits behind each of the tokens, `[tokens, vocabulary]`, or behind the last alone, `[1, vocabulary]`.
///
/// # Errors
/// Tokens that cannot be computed.
pub fn logits(py: Python<'_>, run: RunOn, tokens: Vec<u32>, all: bool) -> PyResult<Array> {
    on_engine(py, run, move |engine, stop| {
        let (rows, columns) = (if all { tokens.len() } else { 1 }, engine.model().vocabulary);
        let mut bits = room(rows, columns)?;
        engine.score(&tokens, all, |_, row| {
            append(&mut bits, row);
            check(stop)
        })?;
        Ok(Array::of_bits(vec![rows, columns], bits))
    })
}

/// The final hidden state of each of the tokens, which is the head's input: `[tokens, hidden]`.
///
/// # Errors
/// Tokens that cannot be computed.
pub fn states(py: Python<'_>, run: RunOn, tokens: Vec<u32>) -> PyResult<Array> {
    on_engine(py, run, move |engine, _| {
        let columns = engine.model().hidden;
        let mut bits = room(tokens.len(), columns)?;
        engine.states(&tokens, |_, row| append(&mut bits, row))?;
        Ok(Array::of_bits(vec![tokens.len(), columns], bits))
    })
}

/// The log-probability of each token from `from` (at least 1) on, given those before it, with the `top` likeliest.
///
/// # Errors
/// Tokens that cannot be computed.
pub fn logprobs(py: Python<'_>, run: RunOn, tokens: Vec<u32>, from: usize, top: usize) -> PyResult<Vec<Scored>> {
    on_engine(py, run, move |engine, stop| {
        ensure!((1..=tokens.len()).contains(&from), "from must be between 1 and the number of tokens, found {from}");
        let isa = engine.options().isa;
        let mut scored = Vec::with_capacity(tokens.len() - from);
        let id = engine.add_sequence();
        let (before, behind) = tokens[..tokens.len() - 1].split_at(from - 1);
        let mut compute = || -> Result<()> {
            if !before.is_empty() {
                engine.advance(id, before)?;
            }
            if behind.is_empty() {
                return Ok(());
            }
            engine.feed(id, behind, true, |position, row| {
                let found = Logprobs::new(isa, row, tokens[position + 1], top.min(row.len()));
                scored.push((found.chosen, found.top));
                check(stop)
            })
        };
        let done = compute();
        engine.remove_sequence(id);
        done?;
        Ok(scored)
    })
}
