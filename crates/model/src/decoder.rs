//! A decoder-only transformer: embedding, layers of a token mixer and a feed-forward part, head. Every model is one of these, made from its description and
//! its weights.

use std::ops::Range;

use anyhow::Result;
use sluice_backend::{
    Backend, CacheLayer, Elementwise, Linear, MatrixId, Norm, Operations, Projection, RotaryFrequencies, Routing,
    StepInputs, Tensor,
};

use crate::description::{
    AttentionDescription, AttentionVariant, Description, EmbeddingScale, JOIN, MixerDescription, MtpDescription, NORMS,
};
use crate::layers::{
    Attention, AttentionScratch, ChannelDelta, ChannelDeltaScratch, CompressedAttention, CompressedScratch, DeltaNet,
    DeltaScratch, FeedForward, FeedForwardScratch, LastMixture, LatentAttention, LatentScratch, NgramScratch, Ngrams,
    PerLayer, PerLayerBlock, StateSpace, StateSpaceScratch, StreamBlock, Streams,
};
use crate::weights::Weights;

/// What mixes tokens in a layer.
enum Mixer {
    Attention(Box<Attention>),
    Latent(Box<LatentAttention>),
    Compressed(Box<CompressedAttention>),
    DeltaNet(Box<DeltaNet>),
    ChannelDelta(Box<ChannelDelta>),
    StateSpace(Box<StateSpace>),
    /// The layer has none.
    None,
}

impl Mixer {
    /// `out += mixer(norm(x))`
    fn forward(&self, backend: &mut dyn Operations, x: Tensor, out: Tensor) {
        match self {
            Mixer::Attention(attention) => attention.forward(backend, x, out),
            Mixer::Latent(latent) => latent.forward(backend, x, out),
            Mixer::Compressed(compressed) => compressed.forward(backend, x, out),
            Mixer::DeltaNet(delta_net) => delta_net.forward(backend, x, out),
            Mixer::ChannelDelta(delta) => delta.forward(backend, x, out),
            Mixer::StateSpace(state_space) => state_space.forward(backend, x, out),
            Mixer::None => {}
        }
    }
}

pub(crate) struct Layer {
    /// What comes before its first half.
    ngrams: Option<Ngrams>,
    mixer: Mixer,
    feed_forward: FeedForward,
    per_layer: Option<PerLayerBlock>,
    /// What is around both halves, where there are several residual streams. The residual stream `x` of the methods is not used then.
    streams: Option<[StreamBlock; 2]>,
    /// What all of it is multiplied by at the end.
    scale: Option<f32>,
}

impl Layer {
    /// `x += mixer(norm(x))`, then `x += feed_forward(norm(x))` and what comes behind it.
    fn forward(&self, backend: &mut dyn Operations, per_layer: Option<&PerLayer>, x: Tensor) {
        self.mix(backend, x);
        self.finish(backend, per_layer, x);
    }

    /// Its token mixer.
    fn mix(&self, backend: &mut dyn Operations, x: Tensor) {
        if let Some(ngrams) = &self.ngrams {
            ngrams.forward(backend, x.rows);
        }
        match &self.streams {
            Some([block, _]) => block.forward(backend, x.rows, |backend, x, out| self.mixer.forward(backend, x, out)),
            None => self.mixer.forward(backend, x, x),
        }
    }

    /// What comes after the token mixer.
    fn finish(&self, backend: &mut dyn Operations, per_layer: Option<&PerLayer>, x: Tensor) {
        match &self.streams {
            Some([_, block]) => {
                block.forward(backend, x.rows, |backend, x, out| self.feed_forward.forward(backend, x, out));
            }
            None => self.feed_forward.forward(backend, x, x),
        }
        if let Some(per_layer) = per_layer {
            per_layer.embed(backend, x.rows);
        }
        if let Some(block) = &self.per_layer {
            block.forward(backend, x);
        }
        if let Some(by) = self.scale {
            backend.elementwise(&Elementwise::Scale { x, by });
        }
    }
}

/// An MTP head: see [`MtpDescription`].
struct Mtp {
    /// Embeddings of tokens, and beside each the state of the token before: `[max_tokens, 2 * hidden]`.
    input: Tensor,
    /// The norms of embeddings and of states.
    norms: [Norm; 2],
    join: Linear,
    layer: Layer,
    norm: Norm,
    passes_normed: bool,
}

impl Mtp {
    /// `at`: the number of its layer.
    fn load(w: &mut Weights, d: &MtpDescription, (at, hidden): (usize, usize), layer: Layer) -> Result<Mtp> {
        let input = w.scratch(2 * hidden)?;
        let [of_embedding, of_state, norm] = NORMS;
        let norms = [w.norm(at, of_embedding)?, w.norm(at, of_state)?];
        let (join, norm) = (w.linear(at, JOIN)?, w.norm(at, norm)?);
        Ok(Mtp { input, norms, join, layer, norm, passes_normed: d.passes_normed })
    }

    /// `[max_tokens, hidden]`
    fn embeddings(&self) -> Tensor {
        self.input.columns(0..self.input.cols / 2)
    }

    /// `[max_tokens, hidden]`
    fn states(&self) -> Tensor {
        self.input.columns(self.input.cols / 2..self.input.cols)
    }

    /// `x = join([norm(embedding) | norm(state)])`
    fn join(&self, backend: &mut dyn Operations, x: Tensor) {
        for (part, norm) in [self.embeddings(), self.states()].into_iter().zip(self.norms) {
            backend.elementwise(&Elementwise::Norm { x: part.first_rows(x.rows), norm, out: part.first_rows(x.rows) });
        }
        backend.project(self.input.first_rows(x.rows), None, &[Projection { linear: self.join.clone(), out: x }]);
    }
}

/// What makes logits of the residual stream.
#[derive(Clone, Copy)]
struct Head {
    norm: Option<Norm>,
    /// The same with what logits are multiplied by.
    scaled_norm: Option<Norm>,
    matrix: MatrixId,
}

/// A loaded model.
pub struct Decoder {
    /// The residual stream: `[max_tokens, hidden]`. Where there are several, what is made of them at the end of a step.
    x: Tensor,
    streams: Option<Streams>,
    /// What makes the head's input of several streams.
    last: Option<LastMixture>,
    /// `None`: other layers come first, whose residual stream is this one's input.
    embedding: Option<MatrixId>,
    /// What its rows are multiplied by.
    scale: Option<f32>,
    per_layer: Option<PerLayer>,
    layers: Vec<Layer>,
    /// `None`: other layers follow, whose input is this one's residual stream.
    head: Option<Head>,
    /// Of the logits.
    softcap: Option<f32>,
    /// The MTP head, if there is one.
    mtp: Option<Mtp>,
}

impl Decoder {
    /// Loads what `d` describes, for positions below `positions`.
    pub(crate) fn load(w: &mut Weights, d: &Description, positions: usize) -> Result<Decoder> {
        d.check_operations()?;
        let x = w.scratch(d.hidden)?;
        let rotary = w.backend().rotary(&d.rotary, positions)?;
        let of_windows = match &d.window_rotary {
            Some(frequencies) => w.backend().rotary(frequencies, positions)?,
            None => rotary,
        };
        let needs_none = |a: &AttentionDescription| !a.rotated || d.rotary_dim(a) == 0;
        let unrotated = match !d.attention_layers().any(needs_none) {
            true => rotary,
            false => w.backend().rotary(&RotaryFrequencies { inv_freq: vec![0.0], scaling: 1.0 }, positions)?,
        };
        let needs_branch = d.output_norms || d.per_layer.is_some();
        let scratch = if needs_branch { Some(w.scratch(d.hidden)?) } else { None };
        let branch = scratch.filter(|_| d.output_norms);
        let per_layer = d.per_layer.map(|own| PerLayer::load(w, d, own)).transpose()?;
        let streams = Streams::alloc(w, d)?;
        let ngrams = match (&d.ngrams, &streams) {
            (Some(own), Some(streams)) => {
                let all = streams.all();
                Some((NgramScratch::alloc(w, own, (d.hidden, all.cols))?, all))
            }
            _ => None,
        };
        let inner = FeedForwardScratch::alloc(w, d)?;
        let has_attention = d.attention_layers().any(|a| a.variant == AttentionVariant::Grouped);
        let latent = LatentScratch::alloc(w, d)?;
        let compressed = CompressedScratch::alloc(w, d)?;
        let attention = has_attention.then(|| AttentionScratch::alloc(w, d)).transpose()?;
        let (mut delta, mut channel_delta, mut state_space) = (None, None, None);
        for mixer in d.recurrent_layers() {
            match mixer {
                MixerDescription::DeltaNet(of) if delta.is_none() => delta = Some(DeltaScratch::alloc(w, of)?),
                MixerDescription::ChannelDelta(of) if channel_delta.is_none() => {
                    channel_delta = Some(ChannelDeltaScratch::alloc(w, of)?);
                }
                MixerDescription::StateSpace(of) if state_space.is_none() => {
                    state_space = Some(StateSpaceScratch::alloc(w, of)?);
                }
                _ => {}
            }
        }
        let mut of_group = vec![0; d.groups().len()];
        let mut recurrent = 0;
        let mut layers: Vec<Layer> = Vec::with_capacity(d.stored_layers());
        for (i, layer) in (0..d.stored_layers()).filter_map(|i| Some((i, d.layer(i)?))) {
            let mixer = match &layer.mixer {
                MixerDescription::Attention(a) if let AttentionVariant::Compressed(sizes) = a.variant => {
                    let slot = |own| {
                        let group = d.number_of_group(&own);
                        of_group[group] += 1;
                        CacheLayer { group, layer: of_group[group] - 1 }
                    };
                    let slots: Vec<CacheLayer> = a.cache_groups().into_iter().map(slot).collect();
                    let rotary = if a.has_window_rotary() { of_windows } else { rotary };
                    let scratch = compressed.as_ref().expect("of this layer");
                    let attention = CompressedAttention::load(w, (a, sizes), scratch, rotary, i, &slots)?;
                    Mixer::Compressed(Box::new(attention))
                }
                MixerDescription::Attention(a) => {
                    let group = d.group_of(a);
                    of_group[group] += usize::from(!a.shared);
                    let slot = (group, of_group[group] - 1);
                    let rotary = match a.window {
                        _ if !a.rotated => unrotated,
                        Some(_) => of_windows,
                        None => rotary,
                    };
                    let index = d.index_group_of(a).map(|group| {
                        of_group[group] += 1;
                        (group, of_group[group] - 1)
                    });
                    if let AttentionVariant::Latent(sizes) = a.variant {
                        let scratch = latent.as_ref().expect("of this layer");
                        let latent =
                            LatentAttention::load(w, (a, sizes), scratch, (rotary, unrotated), i, slot, index)?;
                        Mixer::Latent(Box::new(latent))
                    } else {
                        let (scratch, rotary) = (attention.as_ref().expect("of this layer"), (rotary, d.rotary_dim(a)));
                        let place = (i, d.input_norms);
                        let attention = Attention::load(w, a, (scratch, branch), rotary, place, slot, index)?;
                        Mixer::Attention(Box::new(attention))
                    }
                }
                MixerDescription::DeltaNet(delta_net) => {
                    recurrent += 1;
                    let scratch = delta.as_ref().expect("of this layer");
                    Mixer::DeltaNet(Box::new(DeltaNet::load(w, delta_net, scratch, (i, d.input_norms), recurrent - 1)?))
                }
                MixerDescription::ChannelDelta(of) => {
                    recurrent += 1;
                    let scratch = channel_delta.as_ref().expect("of this layer");
                    Mixer::ChannelDelta(Box::new(ChannelDelta::load(w, of, scratch, i, recurrent - 1)?))
                }
                MixerDescription::StateSpace(of) => {
                    recurrent += 1;
                    let scratch = state_space.as_ref().expect("of this layer");
                    Mixer::StateSpace(Box::new(StateSpace::load(w, of, scratch, i, recurrent - 1)?))
                }
                MixerDescription::None => Mixer::None,
            };
            // A step of the head that predicts one token more has no other layer. Layers of one block may be between two mixtures.
            let mut behind = layers.iter().rev().filter(|l| !matches!(l.feed_forward, FeedForward::None));
            let before = behind.next().filter(|_| i < d.layers.len()).and_then(|l| l.feed_forward.moe());
            let feed_forward = FeedForward::load(w, d, (inner, branch), i, before)?;
            let of_layer = per_layer.as_ref().zip(scratch);
            let of_layer = of_layer.map(|(per_layer, scratch)| per_layer.layer(w, i, scratch)).transpose()?;
            let scale = if d.layer_scales { Some(w.host_vector(i, "layer_scalar")?[0]) } else { None };
            let blocks = streams.map(|streams| streams.blocks(w, i)).transpose()?;
            let scale = scale.filter(|by| *by != 1.0);
            let ngrams = match &ngrams {
                Some((scratch, streams)) => Ngrams::load(w, d, (scratch, *streams), i)?,
                None => None,
            };
            layers.push(Layer { ngrams, mixer, feed_forward, per_layer: of_layer, streams: blocks, scale });
        }
        // A head of its own is needed whole, and of the embedding a few rows: the head is read first.
        let own_head = if d.ends() && !d.tied { Some(w.matrix(None, "lm_head")?) } else { None };
        let needs_embedding = d.begins() || (d.ends() && d.tied);
        let embedding = needs_embedding.then(|| w.matrix(None, "embed_tokens")).transpose()?;
        let head = if d.ends() {
            let norm = if d.has_last_norm() { Some(w.norm(None, "norm")?) } else { None };
            let scaled_norm = match d.logit_scale {
                Some(scale) => Some(w.scaled_norm(None, "norm", Some(scale))?),
                None => norm,
            };
            let matrix = own_head.or(embedding).expect("a head of its own, or the embedding");
            Some(Head { norm, scaled_norm, matrix })
        } else {
            None
        };
        let embedding = embedding.filter(|_| d.begins());
        let scale = match d.embedding_scale {
            Some(EmbeddingScale { by, rounded: true }) => Some(w.rounded(by)?),
            Some(EmbeddingScale { by, rounded: false }) => Some(by as f32),
            None => None,
        };
        let mtp = match &d.mtp {
            Some(of) => Some(Mtp::load(w, of, (d.layers.len(), d.hidden), layers.pop().expect("its layer"))?),
            None => None,
        };
        let softcap = d.logit_softcap;
        let last = streams.map(|streams| streams.last(w, x)).transpose()?;
        Ok(Decoder { x, streams, last, embedding, scale, per_layer, layers, head, softcap, mtp })
    }

    /// Enqueues a step with the tokens of `inputs`, which the backend has begun with. Their keys, values and states go to the backend's caches; it
    /// keeps the logits of the wanted rows. Where other layers come first, the caller has written what they put out to [`Decoder::residual`]; where others
    /// follow, it takes that from there.
    pub fn step(&self, backend: &mut dyn Operations, inputs: &StepInputs) {
        let x = self.x.first_rows(inputs.tokens().len());
        self.embed(backend, inputs);
        for (number, layer) in self.layers.iter().enumerate() {
            layer.forward(backend, self.before(number), x);
        }
        if let Some(last) = &self.last {
            last.forward(backend, x);
        }
        if let Some(head) = self.head.filter(|_| !inputs.wanted().is_empty()) {
            backend.logits(x, head.scaled_norm, head.matrix, self.softcap);
        }
    }
}

/// Predicting one token more.
impl Decoder {
    /// Whether the checkpoint has a head that does.
    pub fn has_mtp(&self) -> bool {
        self.mtp.is_some()
    }

    /// Where a step of that head takes the hidden states from that belong to its tokens: `[max_tokens, hidden]`. The caller writes them before the step.
    ///
    /// # Panics
    /// When there is no such head.
    pub fn mtp_states(&self) -> Tensor {
        self.mtp.as_ref().expect("a head that predicts one token more").states()
    }

    /// Enqueues a step of that head with the tokens of `inputs`, each with the final hidden state of the token before it. It writes to the residual stream, and keeps the
    /// logits of the wanted rows, which are those of the token behind each.
    ///
    /// # Panics
    /// When there is no such head.
    pub fn mtp_step(&self, backend: &mut dyn Operations, inputs: &StepInputs) {
        let mtp = self.mtp.as_ref().expect("a head that predicts one token more");
        let x = self.x.first_rows(inputs.tokens().len());
        // 1. Embeddings beside states, each normed
        let embeddings = mtp.embeddings().first_rows(x.rows);
        backend.embed(self.embedding.expect("only a whole model has such a head"), embeddings);
        if let Some(by) = self.scale {
            backend.elementwise(&Elementwise::Scale { x: embeddings, by });
        }
        mtp.join(backend, x);
        // 2. Its layer
        mtp.layer.forward(backend, None, x);
        // 3. The model's own head
        if !inputs.wanted().is_empty() {
            let head = self.head.expect("only a whole model has such a head");
            backend.logits(x, Some(mtp.norm), head.matrix, self.softcap);
        }
    }

    /// The states that the head goes on from, of these rows of its last step, on the host: `[rows, hidden]`.
    ///
    /// # Panics
    /// When there is no such head.
    pub fn mtp_hidden(&self, backend: &mut dyn Backend, rows: Range<usize>, out: &mut [f32]) {
        let mtp = self.mtp.as_ref().expect("a head that predicts one token more");
        match mtp.passes_normed {
            true => backend.hidden(self.x.rows(rows), Some(mtp.norm), out),
            false => backend.download(self.x.rows(rows), out),
        }
    }
}

/// Results of a step.
impl Decoder {
    /// Copies the final hidden states of these rows of the last step, which are the head's input, to the host: `[rows, hidden]`.
    ///
    /// # Panics
    /// When the last layers are elsewhere.
    pub fn hidden(&self, backend: &mut dyn Backend, rows: Range<usize>, out: &mut [f32]) {
        backend.hidden(self.x.rows(rows), self.head.expect("a model with its last layer").norm, out);
    }

    /// Whether the first layers are elsewhere, so that a step goes on from their residual stream.
    pub fn follows(&self) -> bool {
        self.embedding.is_none()
    }
}

/// A step in pieces: calibration looks at the activations between them.
impl Decoder {
    /// The residual stream: `[max_tokens, hidden]`.
    pub fn residual(&self) -> Tensor {
        self.x
    }

    /// Writes the embeddings of the step's tokens to the residual stream.
    pub fn embed(&self, backend: &mut dyn Operations, inputs: &StepInputs) {
        let Some(embedding) = self.embedding else { return };
        let x = self.x.first_rows(inputs.tokens().len());
        if let Some(streams) = &self.streams {
            return streams.embed(backend, (embedding, self.scale), x.rows);
        }
        backend.embed(embedding, x);
        if let Some(by) = self.scale {
            backend.elementwise(&Elementwise::Scale { x, by });
        }
        if let Some(per_layer) = &self.per_layer {
            per_layer.project(backend, x);
        }
    }

    /// The table that is read before the end of layer `layer`: as late as it can be, in the first.
    fn before(&self, layer: usize) -> Option<&PerLayer> {
        self.per_layer.as_ref().filter(|_| layer == 0)
    }

    /// Adds the output of layer `layer`'s token mixer to the residual stream's first `tokens` rows.
    pub fn mix(&self, layer: usize, backend: &mut dyn Operations, tokens: usize) {
        self.layers[layer].mix(backend, self.x.first_rows(tokens));
    }

    /// Adds the output of layer `layer`'s feed-forward part to them, and what comes behind it.
    pub fn feed_forward(&self, layer: usize, backend: &mut dyn Operations, tokens: usize) {
        self.layers[layer].finish(backend, self.before(layer), self.x.first_rows(tokens));
    }

    /// The same without the routed experts: see [`FeedForward::forward_but_experts`].
    pub fn feed_forward_but_experts(
        &self,
        layer: usize,
        backend: &mut dyn Operations,
        tokens: usize,
        normed: Tensor,
    ) -> Option<Routing> {
        self.layers[layer].feed_forward.forward_but_experts(backend, self.x.first_rows(tokens), normed)
    }
}
