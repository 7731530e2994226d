//! Plans a [`Conversion`] from a checkpoint's headers and the model's description: fused experts are split, single ones gathered, and every matrix gets the width
//! that the rules say.

mod made;
mod recurrent;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use anyhow::{Result, bail, ensure};
use sluice_kernels::format::{Float, WeightFormat};
use sluice_model::{
    Belongs, Description, Leaf, MixerDescription, ModelTensors, Quantization, WeightClass, WeightDescription,
    WeightKind, describe,
};
use sluice_store::{Checkpoint, Dtype, Tensor, TensorPlan};

use crate::conversion::{Conversion, ConversionUnit, OPTIONS, Rows, Source, Stack, Treatment};
use crate::rules::{Choice, Module, Rules, Width};

/// Plans the conversion of `tensors`. Reads headers only.
///
/// # Errors
/// Tensors that cannot be packed, experts that are not all there, a rule that no module matches.
pub fn convert(tensors: &ModelTensors, description: &Description, rules: &mut Rules) -> Result<Conversion> {
    let checkpoint = tensors.checkpoint();
    let files = checkpoint.file_sizes().iter().enumerate().map(|(i, (name, _))| (name.as_str(), i)).collect();
    let mut planner = Planner {
        tensors,
        checkpoint,
        files,
        description,
        written: describe(tensors.config(), &OPTIONS)?,
        quantization: tensors.config().quantization()?,
        rules,
        units: Vec::new(),
        found: Conversion {
            units: Vec::new(),
            overrides: BTreeMap::new(),
            quantizes: false,
            undivided: Vec::new(),
            copied: 0,
            too_few: 0,
            requantised: 0,
            parameters: 0,
            refused_by_mlx: description.mlx.refuses_order,
            left_out: BTreeSet::new(),
        },
    };

    // Experts with tensors of their own, by layer and projection; a bundle's may be quantised.
    let mut single = BTreeMap::<(Option<usize>, &str), (WeightDescription, BTreeMap<usize, (usize, &Tensor)>)>::new();
    for (i, t) in checkpoint.tensors().iter().enumerate() {
        // Scales and the like come with their values.
        let Some(name) = tensors.layout().values_of(&t.name) else { continue };
        let meaning = match tensors.belongs(description, &name) {
            Belongs::Text(meaning) => meaning,
            Belongs::Computed => continue,
            Belongs::LeftOut(part) => {
                planner.found.left_out.insert(part);
                continue;
            }
        };
        let weight = meaning.weight;
        ensure!(
            weight.class != WeightClass::NgramEmbedding,
            "tensor {:?}: models with tables of n-grams cannot be packed",
            t.name
        );
        let Some(expert) = meaning.expert else {
            planner.tensor(i, t, weight, meaning.with, meaning.leaf)?;
            continue;
        };
        match meaning.leaf {
            Leaf::Weight => {
                let (_, all) = single.entry((weight.layer, weight.part)).or_insert((weight, BTreeMap::new()));
                all.insert(expert, (i, t));
            }
            // Scales and biases come with their weights; padding is no part of the model.
            Leaf::Scales | Leaf::Biases | Leaf::Padding => {}
            _ => bail!("tensor {:?}: not a part of an expert that is known", t.name),
        }
    }
    for (weight, tensors) in single.into_values() {
        planner.gathered(weight, tensors)?;
    }
    planner.rules.check_all_matched()?;

    let Planner { mut units, mut found, .. } = planner;
    units.sort_by_key(|(order, _)| *order);
    found.units = units.into_iter().map(|(_, unit)| unit).collect();
    Ok(found)
}

/// Part or layer; then experts, by projection, after the rest; then the order of the input.
type Order = (usize, usize, usize);

struct Planner<'a> {
    tensors: &'a ModelTensors,
    checkpoint: &'a Checkpoint,
    files: HashMap<&'a str, usize>,
    description: &'a Description,
    /// The same with the names that safetensors have.
    written: Description,
    /// The input's. If it has a default, `config.json` has to name every module that differs from it.
    quantization: Quantization,
    rules: &'a mut Rules,
    /// Each with its order in the output.
    units: Vec<(Order, ConversionUnit)>,
    found: Conversion,
}

impl Planner<'_> {
    /// Plans one tensor, number `i` of the checkpoint; `with`: the second weight of a tensor that holds two.
    fn tensor(
        &mut self,
        i: usize,
        t: &Tensor,
        weight: WeightDescription,
        with: Option<WeightDescription>,
        leaf: Leaf,
    ) -> Result<()> {
        // 0. matrices that are not in the file as they are
        if matches!(leaf, Leaf::Weight | Leaf::Bare)
            && let Some(made) = self.made(t, &weight, with.as_ref())?
        {
            if weight.count > 1 {
                return self.made_stack(i, t, [Some(weight), with].into_iter().flatten(), made);
            }
            return self.made_matrix(i, &weight, t, vec![made], &[weight.rows]);
        }

        if self.recurrent(i, t, &weight, leaf)? {
            return Ok(());
        }
        if weight.class == WeightClass::Expert && leaf == Leaf::Bias {
            return self.expert_biases(i, t, [Some(weight), with].into_iter().flatten());
        }

        // 1. fused experts: the first half of the rows is the gate
        if weight.class == WeightClass::Expert && matches!(leaf, Leaf::Bare | Leaf::Other) {
            let stored = self.stored(t).filter(|_| !t.bytes.is_empty());
            let (&[experts, rows, last], Some((form, cols, dtype))) = (&t.shape[..], stored) else {
                bail!("tensor {:?}: {} {:?} are no experts that can be packed", t.name, t.dtype, t.shape)
            };
            ensure!(
                !self.takes_turns(&weight),
                "tensor {:?}: experts that are stored by columns cannot be packed",
                t.name
            );
            let weights: Vec<WeightDescription> = [Some(weight), with].into_iter().flatten().collect();
            if leaf == Leaf::Other || !rows.is_multiple_of(weights.len()) {
                bail!("tensor {:?}: not a part of an expert that is known", t.name)
            }
            let (file, offset) = self.place(t);
            let row_bytes = last * t.dtype.size();
            let per_part = rows / weights.len();
            for (k, weight) in weights.iter().enumerate() {
                let at = |e: usize| (file, offset + ((e * rows + k * per_part) * row_bytes) as u64);
                let segments = (0..experts).map(at).collect();
                let parts = vec![Rows { row_bytes, segments }];
                let source = Source::of_files(parts, per_part, Some(form), cols, &t.name);
                self.matrix(i, weight, source, &[experts, per_part, cols], dtype)?;
            }
            return Ok(());
        }

        // 2. modules that are quantised already: their three tensors together
        let sibling = |leaf: &str| self.checkpoint.tensor(&format!("{}.{leaf}", t.name.rsplit_once('.')?.0));
        if matches!(leaf, Leaf::Scales | Leaf::Biases) && sibling("weight").is_some() {
            return Ok(());
        }
        if leaf == Leaf::Weight && sibling("scales").is_some() {
            return self.packed(i, &weight, &[t], &t.shape);
        }
        let stored = self.stored(t);
        if let (Some((form @ WeightFormat::Blocks(_), cols, dtype)), Leaf::Weight) = (stored, leaf) {
            let shape = [&t.shape[..t.shape.len() - 1], &[cols]].concat();
            let source = Source { form: Some(form), cols, pairs: self.pairs_of(&weight), ..self.whole(t) };
            return self.matrix(i, &weight, source, &shape, dtype);
        }
        ensure!(is_float(t), "tensor {:?}: {} cannot be packed (F32, F16, BF16 and MLX's U32 can)", t.name, t.dtype);

        // 3. matrices
        let is_expert = weight.class == WeightClass::Expert;
        let is_matrix = weight.kind == WeightKind::Matrix && t.shape.len() == if is_expert { 3 } else { 2 };
        if leaf == Leaf::Weight && is_matrix {
            let source = Source { pairs: self.pairs_of(&weight), ..self.whole(t) };
            return self.matrix(i, &weight, source, &t.shape, t.dtype);
        }
        // GGUF has a matrix of one row as a vector.
        if leaf == Leaf::Weight && weight.kind == WeightKind::Matrix && weight.rows == 1 && t.shape.len() == 1 {
            return self.matrix(i, &weight, self.whole(t), &[1, t.shape[0]], t.dtype);
        }
        ensure!(!is_expert, "tensor {:?}: not a part of an expert that is known", t.name);

        // 4. the rest: vectors and convolutions, in MLX's layout
        self.found.parameters += elements(t);
        ensure!(self.pairs_of(&weight).is_none(), "tensor {:?}: biases of moved rows cannot be packed", t.name);
        let (mut dtype, mut shape, mut treatment) = (t.dtype, t.shape.clone(), Treatment::Copy);
        if weight.kind == WeightKind::Convolution && shape.len() == 3 && shape[1] == 1 {
            // The axis of length one moves to the end; the bytes stay.
            shape.swap(1, 2);
        }
        if self.tensors.layout().has_centred_norms()
            && shape.len() == 1
            && weight.kind == (WeightKind::Norm { centred: true })
        {
            (dtype, treatment) = (Dtype::F32, Treatment::AddOne(float(t.dtype).expect("checked above")));
        }
        let name = match leaf {
            Leaf::Bare => self.written.mlx_name(&weight),
            _ => format!("{}.{}", self.written.mlx_name(&weight), t.name.rsplit('.').next().unwrap_or_default()),
        };
        let tensors = vec![TensorPlan { name: self.description.mlx.full(&name), dtype, shape }];
        self.push(i, &weight, self.whole(t), treatment, tensors);
        Ok(())
    }

    /// Gathers experts with a tensor each into one stack.
    fn gathered(&mut self, weight: WeightDescription, tensors: BTreeMap<usize, (usize, &Tensor)>) -> Result<()> {
        let (i, first) = *tensors.values().next().expect("an entry has a tensor");
        let whole = tensors.keys().copied().eq(0..weight.count);
        ensure!(whole, "{}: {} tensors for {} experts", weight.name(), tensors.len(), weight.count);
        if let Some(made) = self.made(first, &weight, None)? {
            let mut all = vec![made];
            for (_, t) in tensors.values().skip(1) {
                let other = self.made(t, &weight, None)?.filter(|other| other.format == all[0].format);
                let Some(other) = other else { bail!("tensor {:?}: in another form than other experts", t.name) };
                all.push(other);
            }
            return self.made_matrix(i, &weight, first, all, &[weight.count, weight.rows]);
        }
        let [rows, cols] = first.shape[..] else { bail!("tensor {:?}: {:?} is no matrix", first.name, first.shape) };
        for (_, t) in tensors.values() {
            let same = t.shape == first.shape && t.dtype == first.dtype;
            ensure!(same, "tensor {:?}: {} {:?} unlike the other experts", t.name, t.dtype, t.shape);
        }
        let all: Vec<&Tensor> = tensors.values().map(|(_, t)| *t).collect();
        let shape = [all.len(), rows, cols];
        if first.dtype == Dtype::U32 {
            return self.packed(i, &weight, &all, &shape);
        }
        let Some((form, inputs, dtype)) = self.stored(first) else {
            bail!("tensor {:?}: {} experts cannot be packed", first.name, first.dtype)
        };
        let same = all.iter().all(|t| self.stored(t).is_some_and(|(other, ..)| other == form));
        ensure!(same, "{}: experts of different types cannot be packed", weight.name());
        let segments = all.iter().map(|t| self.place(t)).collect();
        let parts = vec![Rows { row_bytes: cols * first.dtype.size(), segments }];
        let (form, cols, shape) = (Some(form), inputs, [all.len(), rows, inputs]);
        let source = Source::of_files(parts, rows, form, cols, &first.name);
        self.matrix(i, &weight, source, &shape, dtype)
    }

    /// Plans a module that is quantised already, in one tensor or in one per expert; `shape` is that of all its packed weights together. It is copied unless a rule
    /// for it asks for fewer bits, or for as many in another group size.
    fn packed(&mut self, i: usize, weight: &WeightDescription, all: &[&Tensor], shape: &[usize]) -> Result<()> {
        let t = all[0];
        ensure!(t.dtype == Dtype::U32, "tensor {:?} has scales, but is {}", t.name, t.dtype);
        let WeightFormat::Affine { bits, group, .. } = self.tensors.layout().format(self.checkpoint, t)? else {
            bail!("tensor {:?}: packed weights of a kind that cannot be packed again", t.name)
        };
        let (&packed, leading) = shape.split_last().expect("a matrix has columns");
        ensure!(
            (packed * 32).is_multiple_of(bits as usize),
            "tensor {:?}: {packed} words are no rows of {bits} bits",
            t.name
        );
        let cols = packed * 32 / bits as usize;
        ensure!(cols.is_multiple_of(group as usize), "tensor {:?}: {cols} inputs are not groups of {group}", t.name);

        // 1. where its parts are
        let rows = leading.iter().product::<usize>() / all.len();
        let mut parts = vec![Rows { row_bytes: packed * 4, segments: all.iter().map(|t| self.place(t)).collect() }];
        let mut scale = None;
        for leaf in ["scales", "biases"] {
            let mut segments = Vec::with_capacity(all.len());
            for t in all {
                let Some(s) = self.tensors.layout().plane(self.checkpoint, &t.name, leaf) else {
                    bail!("no tensor \"{}.{leaf}\"", t.name.trim_end_matches(".weight"))
                };
                let name = &s.name;
                let float = float(s.dtype).filter(|f| scale.is_none_or(|s| s == *f));
                let Some(float) = float else { bail!("tensor {name:?}: {} unlike the other scales", s.dtype) };
                let len = rows * (cols / group as usize) * float.size();
                ensure!(s.bytes.len() == len, "tensor {name:?}: {:?} does not fit {:?}", s.shape, t.shape);
                scale = Some(float);
                segments.push(self.place(&s));
            }
            let float = scale.expect("there is a tensor");
            parts.push(Rows { row_bytes: cols / group as usize * float.size(), segments });
        }
        let scale = scale.expect("set above");
        let form = Some(WeightFormat::Affine { bits, group, scale });
        let source = Source::of_files(parts, rows, form, cols, &t.name);
        self.groups(i, weight, source, leading)
    }

    /// Plans a matrix of affine groups that is counted already: see [`Planner::packed`]. `leading`: its shape without columns.
    fn groups(&mut self, i: usize, weight: &WeightDescription, source: Source, leading: &[usize]) -> Result<()> {
        let Some(WeightFormat::Affine { bits, group, scale }) = source.form else {
            bail!("tensor {:?}: not in groups", source.name)
        };
        let cols = source.cols;
        // 2. its new width
        let (in_layers, mlx) = (weight.name(), self.written.mlx_name(weight));
        let out = self.description.mlx.full(&mlx);
        let wanted = self.rules.asked_for(Module::of(self.description, weight, &[&in_layers, &mlx, &out]));
        let new = match wanted {
            Some((b, g)) if b < bits || b == bits && g != group => Some((b, g)),
            Some((b, _)) if b > bits => {
                self.found.too_few += 1;
                None
            }
            _ => None,
        };
        let dtype = dtype_of(scale);
        let tensor = |leaf: &str, dtype, cols| TensorPlan {
            name: format!("{out}.{leaf}"),
            dtype,
            shape: [leading, &[cols]].concat(),
        };
        let (bits, group, treatment) = match new {
            Some((bits, group)) => {
                ensure!(cols.is_multiple_of(group as usize), "{in_layers}: {cols} inputs are not groups of {group}");
                self.found.requantised += 1;
                self.found.quantizes = true;
                (bits, group, Treatment::Quantize { bits, group, float: scale })
            }
            None => {
                self.found.copied += 1;
                (bits, group, Treatment::Copy)
            }
        };
        if self.quantization.default() != Some((bits, group)) {
            self.found.overrides.insert(out.clone(), Width::Affine { bits, group });
        }
        let tensors = vec![
            tensor("weight", Dtype::U32, cols / 32 * bits as usize),
            tensor("scales", dtype, cols / group as usize),
            tensor("biases", dtype, cols / group as usize),
        ];
        self.push(i, weight, source, treatment, tensors);
        Ok(())
    }

    /// Plans a matrix `[.., rows, cols]` that may be quantised.
    fn matrix(
        &mut self,
        i: usize,
        weight: &WeightDescription,
        source: Source,
        shape: &[usize],
        dtype: Dtype,
    ) -> Result<()> {
        let (in_layers, mlx) = (weight.name(), self.written.mlx_name(weight));
        let out = self.description.mlx.full(&mlx);
        let (&cols, leading) = shape.split_last().expect("a matrix has columns");
        let float = float(dtype).expect("checked by the caller");
        self.found.parameters += source.all_rows() as u64 * source.cols as u64;
        let is_blocks =
            matches!(source.form, Some(WeightFormat::Blocks(_) | WeightFormat::E2m1(_) | WeightFormat::Fp8(_)));
        let tensor = |leaf: &str, dtype, cols| TensorPlan {
            name: format!("{out}.{leaf}"),
            dtype,
            shape: [leading, &[cols]].concat(),
        };

        let names: [&str; 3] = [&in_layers, &mlx, &out];
        let Choice { width, left, undivided } = self.rules.of(Module::of(self.description, weight, &names), cols);
        if undivided {
            self.found.undivided.push(in_layers);
        }
        let all = Width::Affine { bits: self.rules.bits, group: self.rules.group };
        let named = self.quantization.default().is_some() || width != all;
        if left || width != Width::Plain && named {
            self.found.overrides.insert(out.clone(), width);
        }
        let (tensors, treatment) = match width {
            Width::Mxfp4 => bail!("{out}: MXFP4 is never chosen"),
            Width::Plain if is_blocks => (vec![tensor("weight", Dtype::F32, cols)], Treatment::Widen),
            Width::Plain => (vec![tensor("weight", dtype, cols)], Treatment::Copy),
            Width::Affine { bits, group } => {
                let groups = cols / group as usize;
                let packed = cols / 32 * bits as usize;
                self.found.quantizes = true;
                (
                    vec![
                        tensor("weight", Dtype::U32, packed),
                        tensor("scales", dtype, groups),
                        tensor("biases", dtype, groups),
                    ],
                    Treatment::Quantize { bits, group, float },
                )
            }
        };
        self.push(i, weight, source, treatment, tensors);
        Ok(())
    }

    fn push(
        &mut self,
        i: usize,
        weight: &WeightDescription,
        source: Source,
        treatment: Treatment,
        tensors: Vec<TensorPlan>,
    ) {
        let stack = self.stack(weight, &tensors);
        let part = match (weight.layer, weight.class) {
            (Some(layer), _) => layer + 1,
            (None, WeightClass::Embedding | WeightClass::PerLayerEmbedding) => 0,
            (None, WeightClass::Head) => usize::MAX,
            (None, _) => usize::MAX - 1,
        };
        let projection = stack.as_ref().map_or(0, |s| s.projection + 1);
        let unit = ConversionUnit { source, treatment, tensors, weight: *weight, stack };
        self.units.push(((part, projection, i), unit));
    }

    /// Where a routed expert's projection belongs; `None` for other weights.
    fn stack(&self, weight: &WeightDescription, tensors: &[TensorPlan]) -> Option<Stack> {
        let layer = weight.layer.filter(|_| weight.class == WeightClass::Expert)?;
        let of_layer = self.description.layer_weights(layer).into_iter().filter(|w| w.class == WeightClass::Expert);
        let projection = of_layer.map(|w| w.part).position(|part| part == weight.part)?;
        let part = weight.projection();
        let stored = self.written.packed_name(weight);
        let prefix = self.description.mlx.full(stored.strip_suffix(part)?.strip_suffix('.')?);
        Some(Stack { layer, projection, prefix, part: part.to_owned(), count: *tensors[0].shape.first()? })
    }

    /// How the matrix in `t` is stored, its columns, and the type of what is written of it; `None` if it cannot be packed.
    fn stored(&self, t: &Tensor) -> Option<(WeightFormat, usize, Dtype)> {
        let last = t.shape.last().copied()?;
        match self.tensors.layout().format(self.checkpoint, t).ok()? {
            WeightFormat::Float(float) => Some((WeightFormat::Float(float), last, t.dtype)),
            form @ WeightFormat::Blocks(blocks) => {
                Some((form, last / blocks.block_bytes() * blocks.block_columns(), Dtype::BF16))
            }
            WeightFormat::Affine { .. } | WeightFormat::E2m1(_) | WeightFormat::Fp8(_) => None,
        }
    }

    /// Elements of a head, where the rows of this weight are moved within heads.
    fn pairs_of(&self, weight: &WeightDescription) -> Option<usize> {
        let is_moved = ["self_attn.q_proj", "self_attn.k_proj"].contains(&weight.part);
        let layer = self.description.layers.get(weight.layer?)?;
        let MixerDescription::Attention(attention) = &layer.mixer else { return None };
        (is_moved && self.tensors.layout().has_adjacent_pairs()).then_some(attention.head_dim)
    }

    fn place(&self, t: &Tensor) -> (usize, u64) {
        let (file, offset) = self.checkpoint.place(&t.name).expect("a tensor of this checkpoint");
        (self.files[file], offset)
    }

    /// A whole tensor; rows are along its last dimension.
    fn whole(&self, t: &Tensor) -> Source {
        let cols = t.shape.last().map_or(1, |&n| n);
        let row_bytes = cols * t.dtype.size();
        let rows = t.bytes.len().checked_div(row_bytes).unwrap_or(0);
        let parts = vec![Rows { row_bytes, segments: vec![self.place(t)] }];
        Source::of_files(parts, rows, float(t.dtype).map(WeightFormat::Float), cols, &t.name)
    }
}

/// The element type of scales of that kind.
fn dtype_of(float: Float) -> Dtype {
    match float {
        Float::F32 => Dtype::F32,
        Float::F16 => Dtype::F16,
        Float::Bf16 => Dtype::BF16,
    }
}

fn is_float(t: &Tensor) -> bool {
    float(t.dtype).is_some()
}

fn float(dtype: Dtype) -> Option<Float> {
    match dtype {
        Dtype::F32 => Some(Float::F32),
        Dtype::F16 => Some(Float::F16),
        Dtype::BF16 => Some(Float::Bf16),
        _ => None,
    }
}

fn elements(t: &Tensor) -> u64 {
    (t.bytes.len() / t.dtype.size()) as u64
}
