//! A stage of a pipeline: some layers of a model, in this process. Rows of hidden states go in and out as bytes of f32, which any transport takes.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use sluice_engine::sampling::SamplingParams;
use sluice_engine::{Stage as Layers, StageOutput, StagePiece, StageWanted, source};
use sluice_model::{LayerRange, describe};

use crate::errors::{self, EngineError, RequestError};
use crate::options::{Fields, Setup};
use crate::stream::check_process;
use crate::waiting::{detached, on_thread};

/// New tokens of one sequence.
struct Piece {
    sequence: u64,
    position: usize,
    tokens: Vec<u32>,
    wanted: StageWanted,
    is_answer: bool,
}

/// A token, why there is none, or `None`.
#[derive(IntoPyObject)]
enum Drawn {
    None(Option<u32>),
    Token(u32),
    Failed(String),
}

const PARAMS: [&str; 8] =
    ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"];

fn wanted(value: &Bound<'_, PyAny>) -> PyResult<StageWanted> {
    if value.is_none() {
        return Ok(StageWanted::Nothing);
    }
    if let Ok(params) = value.cast::<PyDict>() {
        let fields = Fields(params);
        fields.known(&PARAMS)?;
        let default = SamplingParams::default();
        return Ok(StageWanted::Token(SamplingParams {
            temperature: fields.get("temperature")?.unwrap_or(default.temperature),
            top_k: fields.get("top_k")?.unwrap_or(default.top_k),
            top_p: fields.get("top_p")?.unwrap_or(default.top_p),
            min_p: fields.get("min_p")?.unwrap_or(default.min_p),
            repetition_penalty: fields.get("repetition_penalty")?.unwrap_or(default.repetition_penalty),
            presence_penalty: fields.get("presence_penalty")?.unwrap_or(default.presence_penalty),
            frequency_penalty: fields.get("frequency_penalty")?.unwrap_or(default.frequency_penalty),
            seed: fields.get("seed")?.unwrap_or(default.seed),
        }));
    }
    match value.extract::<String>().as_deref() {
        Ok("logits") => Ok(StageWanted::Logits),
        Ok("all") => Ok(StageWanted::AllLogits),
        _ => Err(RequestError::new_err("wanted must be None, \"logits\", \"all\" or parameters of sampling")),
    }
}

fn rows(bytes: &[u8]) -> Result<Vec<f32>> {
    let (rows, rest) = bytes.as_chunks::<4>();
    ensure!(rest.is_empty(), "{} bytes are no rows of f32", bytes.len());
    Ok(rows.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

fn bytes_of<'py>(py: Python<'py>, rows: &[f32]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, size_of_val(rows), |out| {
        out.as_chunks_mut::<4>().0.iter_mut().zip(rows).for_each(|(to, x)| *to = x.to_le_bytes());
        Ok(())
    })
}

/// Some layers of a model in memory.
#[pyclass(frozen, module = "sluice._sluice")]
pub struct Stage {
    /// `None` once it is closed.
    layers: Arc<Mutex<Option<Layers>>>,
    process: u32,
    /// Whether it takes tokens.
    #[pyo3(get)]
    is_first: bool,
    /// Whether it gives logits and tokens.
    #[pyo3(get)]
    is_last: bool,
    /// Elements of a hidden row.
    #[pyo3(get)]
    hidden: usize,
    /// Tokens of a step, at most.
    #[pyo3(get)]
    max_tokens: usize,
    /// Sequences, at most.
    #[pyo3(get)]
    max_sequences: usize,
    /// Positions of a sequence, at most.
    #[pyo3(get)]
    max_context: usize,
}

impl Stage {
    fn with<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut Layers) -> Result<T> + Send) -> PyResult<T> {
        check_process(self.process)?;
        detached(py, || {
            let mut layers = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
            let layers = layers.as_mut().ok_or_else(|| EngineError::new_err("the stage is closed"))?;
            work(layers).map_err(|e| errors::engine(&e))
        })
    }
}

#[pymethods]
impl Stage {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, first: usize, end: usize, options: &Bound<'_, PyDict>) -> PyResult<Stage> {
        let setup = Setup::read(options)?;
        let open = move || -> Result<Layers> {
            let source = source::open(&path)?;
            let range = LayerRange { from: first, to: end };
            let device = setup.device.chosen(&|_| ());
            let make = |options: &sluice_engine::Options| device.backend(options);
            Layers::open(&source, setup.engine.clone(), range, &make)
        };
        let layers = on_thread(py, "sluice-stage", move || open().map_err(|e| errors::model(&e)), || ())?;
        Ok(Stage {
            is_first: layers.is_first(),
            is_last: layers.is_last(),
            hidden: layers.hidden_len(),
            max_tokens: layers.max_tokens(),
            max_sequences: layers.max_sequences(),
            max_context: layers.max_context(),
            layers: Arc::new(Mutex::new(Some(layers))),
            process: std::process::id(),
        })
    }

    /// Takes pieces, each (sequence, position, tokens, wanted, whether they are of the answer), through the layers. Returns rows for the next stage, logits and tokens.
    fn step<'py>(
        &self,
        py: Python<'py>,
        pieces: Vec<Bound<'py, PyTuple>>,
        hidden: Option<Vec<u8>>,
    ) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>, Vec<Drawn>)> {
        let read = |piece: &Bound<'py, PyTuple>| -> PyResult<Piece> {
            Ok(Piece {
                sequence: piece.get_item(0)?.extract()?,
                position: piece.get_item(1)?.extract()?,
                tokens: piece.get_item(2)?.extract()?,
                wanted: wanted(&piece.get_item(3)?)?,
                is_answer: piece.get_item(4)?.extract()?,
            })
        };
        let pieces: Vec<Piece> = pieces.iter().map(read).collect::<PyResult<_>>()?;
        let StageOutput { hidden, logits, tokens } = self.with(py, move |layers| {
            let pieces: Vec<StagePiece> = pieces
                .iter()
                .map(|Piece { sequence, position, tokens, wanted, is_answer }| StagePiece {
                    sequence: *sequence,
                    position: *position,
                    tokens,
                    wanted: wanted.clone(),
                    is_answer: *is_answer,
                })
                .collect();
            layers.step(&pieces, &rows(hidden.as_deref().unwrap_or_default())?)
        })?;
        let drawn = |token: Option<Result<u32, _>>| match token {
            None => Drawn::None(None),
            Some(Ok(token)) => Drawn::Token(token),
            Some(Err(why)) => Drawn::Failed(format!("{why}")),
        };
        Ok((bytes_of(py, &hidden)?, bytes_of(py, &logits)?, tokens.into_iter().map(drawn).collect()))
    }

    /// Forgets a sequence.
    fn release(&self, py: Python<'_>, sequence: u64) -> PyResult<()> {
        self.with(py, |layers| {
            layers.release(sequence);
            Ok(())
        })
    }

    /// Tokens that there are of a sequence.
    fn computed(&self, py: Python<'_>, sequence: u64) -> PyResult<usize> {
        self.with(py, |layers| Ok(layers.computed(sequence)))
    }

    /// Frees the memory.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        detached(py, || {
            drop(self.layers.lock().unwrap_or_else(PoisonError::into_inner).take());
            Ok(())
        })
    }
}

/// How many layers a model has.
#[pyfunction]
pub fn layer_count(py: Python<'_>, path: PathBuf) -> PyResult<usize> {
    detached(py, || {
        let count = || -> Result<usize> {
            let source = source::open(&path)?;
            let described = describe(source.config(), &Default::default());
            Ok(described.with_context(|| path.display().to_string())?.layers.len())
        };
        count().map_err(|e| errors::model(&e))
    })
}
