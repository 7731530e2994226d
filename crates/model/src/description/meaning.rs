//! What a tensor of a checkpoint is: which weight, and which part of it, told by its name.

use super::{Description, NGRAM_TABLE, WeightDescription};
use crate::mlx_names;

impl Description {
    /// What the tensor `short` is, for any way of storing experts. `None`: this model has no such tensor.
    pub fn meaning(&self, short: &str) -> Option<Meaning> {
        let (layer, rest) = match short.strip_prefix("layers.") {
            Some(inside) => {
                let (number, rest) = inside.split_once('.')?;
                (Some(self.own_number(number.parse().ok()?)?), rest)
            }
            None => (None, short),
        };
        // What is outside of layers has the same names everywhere.
        let canonical = if layer.is_some() { self.canonical(rest) } else { rest.into() };
        let rest = self.stack_named(rest).unwrap_or(&canonical);
        // 1. routed experts, in one of three spellings
        let stacked = mlx_names::split(rest).map(|(module, rest)| (module, None, rest));
        let by_expert = || {
            let (module, rest) = rest.split_once(".experts.")?;
            Some(match rest.split_once('.').map(|(number, part)| (number.parse().ok(), part)) {
                Some((Some(expert), part)) => (module, Some(expert), part),
                _ => (module, None, rest),
            })
        };
        if let Some((module, expert, rest)) = stacked.or_else(by_expert) {
            let of_module = |w: &WeightDescription| w.part.split_once(".experts.").is_some_and(|(m, _)| m == module);
            let all = self.layer_weights(layer?).into_iter().filter(of_module);
            let all: Vec<WeightDescription> = all.collect();
            let (&weight, projections) = (all.first()?, all.iter());
            if expert.is_some() && rest == "padding" {
                return Some(Meaning { weight, with: None, expert, leaf: Leaf::Padding });
            }
            // In stacks a bias is named like the matrix, and the rows of gate and up may be in one.
            let (stack, leaf) = match rest.strip_suffix("_bias").filter(|_| expert.is_none()) {
                Some(stack) => (stack, Some(Leaf::Bias)),
                None => (rest, None),
            };
            if let Some(end) = stack.strip_prefix("gate_up_proj").filter(|_| expert.is_none())
                && let Some(leaf) =
                    leaf.or_else(|| Leaf::parse(end)).filter(|leaf| [Leaf::Bare, Leaf::Bias].contains(leaf))
            {
                return Some(Meaning { weight, with: all.get(1).copied(), expert, leaf });
            }
            // Experts with tensors of their own may have other names.
            let leaf_of = |w: &WeightDescription| {
                let parse = |name: &str| Leaf::parse(stack.strip_prefix(name)?);
                let own = expert.and_then(|_| parse(self.own_projection(w.projection())));
                let end = own.or_else(|| parse(w.projection()))?;
                Some(leaf.filter(|_| end == Leaf::Bare).unwrap_or(end))
            };
            let found = projections.filter_map(|w| Some((*w, leaf_of(w)?))).next();
            return Some(match found {
                Some((weight, leaf)) => Meaning { weight, with: None, expert, leaf },
                None => Meaning { weight, with: None, expert, leaf: Leaf::Other },
            });
        }
        let all = if layer.is_some() { self.layer_weights(layer?) } else { self.all_outer().collect() };
        // 2. tables of n-grams, in parts
        if let Some((part, leaf)) = rest.strip_prefix(NGRAM_TABLE).and_then(part_of_table) {
            let weight = all.into_iter().find(|w| w.part == NGRAM_TABLE)?;
            return Some(Meaning { weight, with: None, expert: Some(part), leaf });
        }
        // 3. everything else: the module with the longest matching name
        let found = all.into_iter().filter_map(|w| Some((w, Leaf::parse(rest.strip_prefix(w.part)?)?)));
        let (weight, leaf) = found.max_by_key(|(w, _)| w.part.len())?;
        Some(Meaning { weight, with: None, expert: None, leaf })
    }
}

/// The number of a table's part, and which part of its matrix: behind the table's name.
fn part_of_table(rest: &str) -> Option<(usize, Leaf)> {
    let (number, _) = rest.strip_prefix(".shard_")?.split_once('.')?;
    let leaf = Leaf::parse(&rest[".shard_".len() + number.len()..])?;
    Some((number.parse().ok()?, leaf))
}

impl Description {
    /// The usual name of a stack of experts that this architecture's checkpoints name in their own way.
    fn stack_named(&self, part: &str) -> Option<&'static str> {
        let own = self.stack_spelling?.iter().position(|own| part.strip_suffix(".weight") == Some(*own))?;
        Some(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"][own])
    }
}

/// Which part of a weight a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaf {
    /// Its name is the module's: a vector, or experts stacked by Hugging Face.
    Bare,
    /// `.weight`: the values, or the packed integers where there are scales.
    Weight,
    /// `.bias`, which is added to the output.
    Bias,
    /// `.scales` of quantised groups.
    Scales,
    /// `.biases` of quantised groups.
    Biases,
    /// `.padding` after an expert of a bundle: part of the file, not of the model.
    Padding,
    /// Another tensor of a known module.
    Other,
}

impl Leaf {
    /// From the text after a module's name; `None` if it continues the name.
    fn parse(rest: &str) -> Option<Leaf> {
        Some(match rest {
            "" => Leaf::Bare,
            ".weight" => Leaf::Weight,
            ".bias" => Leaf::Bias,
            ".scales" => Leaf::Scales,
            ".biases" => Leaf::Biases,
            _ if rest.starts_with('.') => Leaf::Other,
            _ => return None,
        })
    }
}

/// What a tensor of a checkpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meaning {
    /// The weight that it is a part of.
    pub weight: WeightDescription,
    /// If a tensor holds two weights: the second one, whose rows follow those of the first for each expert.
    pub with: Option<WeightDescription>,
    /// Its expert, or its part of a table, if each has tensors of its own.
    pub expert: Option<usize>,
    /// Which part of the weight.
    pub leaf: Leaf,
}
