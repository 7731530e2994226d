//! Some layers of a model, for a machine that has no others: a stage of a pipeline. Hidden rows go in and come out; the first stage takes tokens, and the last gives
//! logits or tokens. Keys, values and states stay with their layers. A row has the bits that it has in one engine with all layers, wherever the model is cut, since
//! the residual stream is f32 in memory and on its way.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use sluice_backend::{Outcome, SequenceInput, Wanted};
use sluice_cache::SequenceBlocks;
use sluice_model::{LayerRange, ModelSource};

use super::Engine;
use super::role::{MakeBackend, Role};
use crate::options::Options;
use crate::sampling::{History, SampleError, Sampler, SamplingParams};

/// New tokens of one sequence, in a step of a stage.
#[derive(Clone, Debug)]
pub struct StagePiece<'a> {
    /// The caller's number of the sequence.
    pub sequence: u64,
    /// The position of the first of `tokens`. They follow what the stage has of the sequence; at 0 it begins anew.
    pub position: usize,
    /// The tokens. A later stage needs them to count them, and for penalties.
    pub tokens: &'a [u32],
    /// What the last stage gives of it.
    pub wanted: StageWanted,
    /// The tokens are of the answer, and not of the prompt. Penalties count them otherwise.
    pub is_answer: bool,
}

/// What the last stage gives of a piece.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum StageWanted {
    /// Nothing: more of the prompt follows.
    #[default]
    Nothing,
    /// The logits after the last token.
    Logits,
    /// The logits after each token.
    AllLogits,
    /// A token, drawn by these parameters.
    Token(SamplingParams),
}

/// What a step puts out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageOutput {
    /// Unless it is the last stage: the rows for the next one, `[tokens of all pieces, hidden]`.
    pub hidden: Vec<f32>,
    /// Of the last stage: wanted logits, `[rows, vocabulary]`, piece after piece.
    pub logits: Vec<f32>,
    /// Of the last stage: for each piece that wanted one, the token that was drawn, or why none can be.
    pub tokens: Vec<Option<Result<u32, SampleError>>>,
}

/// A sequence in a stage.
struct Held {
    blocks: SequenceBlocks,
    computed: usize,
    history: History,
}

/// Layers of a model, with the keys, values and states that sequences have in them.
pub struct Stage {
    engine: Engine,
    held: HashMap<u64, Held>,
    sampler: Option<Sampler>,
    /// A step failed half-way: what sequences hold is not what they should.
    broken: Option<String>,
}

impl Stage {
    /// Opens these layers of a checkpoint on the backend that `make` makes.
    ///
    /// # Errors
    /// Those of [`Engine::open_source`]; a model that cannot be cut; options that need all of it.
    pub fn open(
        source: &Arc<dyn ModelSource>,
        options: Options,
        layers: LayerRange,
        make: MakeBackend,
    ) -> Result<Stage> {
        let needs_all = [
            ("a prompt cache", options.prompt_cache.is_some()),
            ("keys and values in host memory", options.kv_spill > 0),
            ("a model that drafts", options.draft_model.is_some()),
        ];
        if let Some((what, _)) = needs_all.iter().find(|(_, asked)| *asked) {
            bail!("a stage of a pipeline has no {}", what.trim_start_matches("a "));
        }
        let drafts = options.drafts.off();
        let options = Options { layers: Some(layers), prefix_cache: false, snapshots: 0, drafts, ..options };
        let engine = Engine::open_as(Role::Answers, source, options, make)?;
        let sampler = engine.model.ends().then(|| Sampler::new(engine.options.isa, engine.model.vocabulary));
        Ok(Stage { engine, held: HashMap::new(), sampler, broken: None })
    }

    /// The engine with these layers, for its memory and settings.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Whether it takes tokens.
    pub fn is_first(&self) -> bool {
        self.engine.model.begins()
    }

    /// Whether it gives logits and tokens.
    pub fn is_last(&self) -> bool {
        self.engine.model.ends()
    }

    /// Elements of a hidden row.
    pub fn hidden_len(&self) -> usize {
        self.engine.model.hidden
    }

    /// Tokens that one step takes, of all sequences.
    pub fn max_tokens(&self) -> usize {
        self.engine.scheduler.max_tokens
    }

    /// Sequences that it can hold.
    pub fn max_sequences(&self) -> usize {
        self.engine.options.max_sequences
    }

    /// Positions of a sequence, at most.
    pub fn max_context(&self) -> usize {
        self.engine.setup.max_context
    }

    /// Forgets a sequence. Unknown ones are forgotten already.
    pub fn release(&mut self, sequence: u64) {
        if let Some(mut held) = self.held.remove(&sequence) {
            self.engine.cache.release(&mut held.blocks);
        }
    }

    /// How many tokens of a sequence there are.
    pub fn computed(&self, sequence: u64) -> usize {
        self.held.get(&sequence).map_or(0, |held| held.computed)
    }

    /// Takes pieces of sequences through the layers. `hidden`: what the stage before put out for the same pieces; empty for the first.
    ///
    /// # Errors
    /// Pieces that do not fit or do not follow what is there: then nothing has changed. Weights that cannot be read: then this stage cannot be used any more.
    pub fn step(&mut self, pieces: &[StagePiece], hidden: &[f32]) -> Result<StageOutput> {
        if let Some(why) = &self.broken {
            bail!("{why}");
        }
        let rows = self.check(pieces, hidden)?;
        if rows == 0 {
            return Ok(StageOutput::default());
        }
        let done = self.run(pieces, hidden, rows);
        if let Err(e) = &done
            && self.broken.is_none()
            && e.downcast_ref::<NoRoom>().is_none()
        {
            self.broken = Some(format!("{e:#}"));
        }
        done
    }

    /// Checks pieces against what there is. Returns their rows.
    fn check(&self, pieces: &[StagePiece], hidden: &[f32]) -> Result<usize> {
        let rows: usize = pieces.iter().map(|piece| piece.tokens.len()).sum();
        let most = self.max_tokens();
        ensure!(rows <= most, "{rows} tokens in a step of at most {most}");
        ensure!(pieces.len() <= self.max_sequences(), "{} sequences of at most {}", pieces.len(), self.max_sequences());
        let wanted = if self.is_first() { 0 } else { rows * self.hidden_len() };
        ensure!(hidden.len() == wanted, "{} elements of hidden rows, expected {wanted}", hidden.len());
        for (i, piece) in pieces.iter().enumerate() {
            let (id, at, computed) = (piece.sequence, piece.position, self.computed(piece.sequence));
            ensure!(!piece.tokens.is_empty(), "sequence {id}: no tokens");
            ensure!(pieces[..i].iter().all(|other| other.sequence != id), "sequence {id} is there twice");
            ensure!(at == 0 || at == computed, "sequence {id} has {computed} tokens here, and goes on at {at}");
            let end = at.checked_add(piece.tokens.len());
            let fits = end.is_some_and(|end| end <= self.max_context());
            ensure!(fits, "sequence {id}: more than {} positions", self.max_context());
            let vocabulary = self.engine.model.vocabulary;
            let strange = piece.tokens.iter().find(|token| **token as usize >= vocabulary);
            ensure!(strange.is_none(), "sequence {id}: token {strange:?} of a vocabulary of {vocabulary}");
            if let StageWanted::Token(params) = &piece.wanted {
                params.validate().with_context(|| format!("sequence {id}"))?;
            }
        }
        Ok(rows)
    }

    fn run(&mut self, pieces: &[StagePiece], hidden: &[f32], rows: usize) -> Result<StageOutput> {
        // 1. Blocks for the new tokens
        for piece in pieces {
            if piece.position == 0 {
                self.release(piece.sequence);
            }
            let held = self.held.entry(piece.sequence).or_insert_with(|| Held {
                blocks: self.engine.cache.new_sequence(),
                computed: 0,
                history: History::default(),
            });
            let grown = self.engine.cache.grow(&mut held.blocks, piece.position + piece.tokens.len());
            grown.map_err(|_| NoRoom(piece.sequence))?;
        }
        let engine = &mut self.engine;
        engine.tiers.prepare_blocks(&mut engine.cache, &mut engine.runner.blocks())?;
        // 2. The layers
        let is_last = engine.model.ends();
        let wanted = |piece: &StagePiece| match &piece.wanted {
            _ if !is_last => Wanted::None,
            StageWanted::Nothing => Wanted::None,
            StageWanted::AllLogits => Wanted::All,
            StageWanted::Logits | StageWanted::Token(_) => Wanted::Last,
        };
        let held = &self.held;
        let inputs = pieces.iter().map(|piece| {
            let blocks = &held[&piece.sequence].blocks;
            SequenceInput {
                tokens: piece.tokens,
                position: piece.position,
                state: blocks.state.unwrap_or(0),
                tables: &blocks.tables,
                wanted: wanted(piece),
            }
        });
        let Outcome { logits, failed, .. } = engine.runner.stage_step(inputs, hidden);
        if let Some(loading) = &engine.loading {
            loading.check()?;
        }
        if let Some(failed) = failed.first() {
            return Err(anyhow!("{:#}", failed.why));
        }
        // 3. What it puts out
        let mut output = StageOutput::default();
        let mut all = Vec::new();
        if is_last {
            all.extend_from_slice(engine.runner.backend.read_logits(logits));
        } else {
            output.hidden.resize(rows * engine.model.hidden, 0.0);
            engine.runner.residual(rows, &mut output.hidden);
        }
        let vocabulary = logits.vocabulary.max(1);
        let mut left = all.chunks_exact(vocabulary);
        for piece in pieces {
            let held = self.held.get_mut(&piece.sequence).expect("it was made above");
            held.computed = piece.position + piece.tokens.len();
            engine.cache.drop_before_window(&mut held.blocks, held.computed);
            if !is_last {
                continue;
            }
            if piece.is_answer {
                piece.tokens.iter().for_each(|token| held.history.add_generated(*token));
            } else {
                held.history.add_prompt(piece.tokens);
            }
            let rows = match wanted(piece) {
                Wanted::None => 0,
                Wanted::Last => 1,
                Wanted::All => piece.tokens.len(),
            };
            let mut token = None;
            for row in left.by_ref().take(rows) {
                match &piece.wanted {
                    StageWanted::Token(params) => {
                        let sampler = self.sampler.as_mut().expect("of the last stage");
                        let position = held.computed as u64;
                        token = Some(sampler.sample(params, row, Some(&held.history), None, position));
                    }
                    _ => output.logits.extend_from_slice(row),
                }
            }
            output.tokens.push(token);
        }
        Ok(output)
    }
}

/// There is no block left for a sequence.
#[derive(Debug, thiserror::Error)]
#[error("no room for the keys and values of sequence {0}")]
struct NoRoom(u64);
