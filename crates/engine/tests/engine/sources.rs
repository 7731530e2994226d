//! The engine knows a model by its source alone: a format of one file, with other names and without a `config.json`, needs no change to the engine.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use sluice_backend::WeightFormat;
use sluice_engine::{Activations, Engine, KvType, Options, cpu};
use sluice_model::source::{ExpertStorage, TensorLayout, TextFiles};
use sluice_model::{Config, ModelSource, source};
use sluice_store::load::OpenCheckpoint;
use sluice_store::{Checkpoint, Error, Tensor, TensorPlan, Writer};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// The model's names of modules and those of the file.
const MODULES: [(&str, &str); 9] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];
const OUTER: [(&str, &str); 3] = [("embed_tokens", "token_embd"), ("norm", "output_norm"), ("lm_head", "output")];

/// The name that stands for `name` in the table, from its column `from` to the other, with what follows.
fn translated(name: &str, table: &[(&str, &str)], back: bool) -> Option<String> {
    table.iter().find_map(|(ours, theirs)| {
        let (from, to) = if back { (theirs, ours) } else { (ours, theirs) };
        let rest = name.strip_prefix(from).filter(|rest| rest.is_empty() || rest.starts_with('.'))?;
        Some(format!("{to}{rest}"))
    })
}

#[derive(Debug)]
struct BlockNames;

impl TensorLayout for BlockNames {
    fn name(&self) -> &'static str {
        "one file"
    }

    fn full(&self, short: &str) -> String {
        let translated = match short.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
            Some((layer, part)) => translated(part, &MODULES, false).map(|part| format!("blk.{layer}.{part}")),
            None => translated(short, &OUTER, false),
        };
        translated.unwrap_or_else(|| short.to_owned())
    }

    fn short(&self, name: &str) -> Option<String> {
        match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, part)) => translated(part, &MODULES, true).map(|part| format!("layers.{layer}.{part}")),
            None => translated(name, &OUTER, true),
        }
    }

    fn shares_head(&self) -> bool {
        false
    }

    fn format(&self, _: &Checkpoint, tensor: &Tensor) -> Result<WeightFormat> {
        let known = [("F32", sluice_backend::Float::F32), ("BF16", sluice_backend::Float::Bf16)];
        let float = known.into_iter().find(|(name, _)| *name == tensor.dtype.name()).expect("a golden model's type").1;
        Ok(WeightFormat::Float(float))
    }

    fn plane(&self, checkpoint: &Checkpoint, name: &str, _: &str) -> Option<Tensor> {
        checkpoint.tensor(name)
    }

    fn experts(&self, _: &Checkpoint, _: &str) -> ExpertStorage {
        ExpertStorage::Stacked
    }

    fn stacked_experts(&self, short: &str) -> String {
        self.full(short)
    }

    fn has_centred_norms(&self) -> bool {
        false
    }

    fn convolution_shape(&self, channels: usize, taps: usize) -> Vec<usize> {
        vec![channels, 1, taps]
    }
}

/// A file with everything: weights under other names, and the config in its metadata.
struct OneFile {
    path: PathBuf,
    config: Arc<Config>,
}

impl OneFile {
    fn open(path: &Path) -> OneFile {
        let metadata = Checkpoint::open(path.parent().unwrap()).unwrap().metadata().clone();
        let config = Config::parse(path.to_owned(), metadata["config"].as_bytes()).unwrap();
        OneFile { path: path.to_owned(), config: Arc::new(config) }
    }
}

impl TextFiles for OneFile {
    fn read(&self, name: &str, _: u64) -> Result<Vec<u8>, Error> {
        Err(Error::Io { path: self.locate(name), doing: "find", cause: io::ErrorKind::NotFound.into() })
    }

    fn list(&self, _: &str) -> io::Result<Vec<(String, u64)>> {
        Ok(Vec::new())
    }

    fn locate(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl ModelSource for OneFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn config(&self) -> &Arc<Config> {
        &self.config
    }

    fn weight_files(&self) -> Vec<(PathBuf, u64)> {
        vec![(self.path.clone(), std::fs::metadata(&self.path).map_or(0, |m| m.len()))]
    }

    fn open_checkpoint(&self) -> Result<OpenCheckpoint, Error> {
        OpenCheckpoint::safetensors(self.path.parent().expect("a file is in a folder"))
    }

    fn layout(&self, _: &Checkpoint) -> Box<dyn TensorLayout> {
        Box::new(BlockNames)
    }

    fn fingerprint_inputs(&self) -> Result<Vec<(&'static str, Vec<u8>)>> {
        Ok(Vec::new())
    }
}

/// The model of a golden folder in one file.
fn write(from: &Path, path: &Path) {
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    let checkpoint = Checkpoint::open(from).unwrap();
    let renamed = |t: &Tensor| BlockNames.full(t.name.strip_prefix("model.").unwrap_or(&t.name));
    let plan = |t: &Tensor| TensorPlan { name: renamed(t), dtype: t.dtype, shape: t.shape.clone() };
    let plans: Vec<TensorPlan> = checkpoint.tensors().iter().map(plan).collect();
    let mut writer = Writer::create(path, &plans, &BTreeMap::from([("config".to_owned(), config)])).unwrap();
    checkpoint.tensors().iter().for_each(|t| writer.append(&renamed(t), &t.bytes).unwrap());
    writer.finish().unwrap();
}

#[test]
fn a_format_of_one_file_gives_the_same_logits() {
    let options = Options {
        activations: Activations::F32,
        kv_type: Some(KvType::F32),
        max_context: Some(32),
        threads: 2,
        ..Options::for_this_machine().unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    write(&golden("llama"), &path);
    assert!(!dir.path().join("config.json").exists());
    let folder = source::open(&golden("llama")).unwrap();
    let file: Arc<dyn ModelSource> = Arc::new(OneFile::open(&path));
    let [wanted, found] = [folder, file].map(|source| {
        let mut engine = Engine::open_source(&source, options.clone(), &cpu).unwrap();
        assert!(engine.skipped().is_empty(), "{:?}", engine.skipped());
        let (id, mut bits) = (engine.add_sequence(), Vec::new());
        let keep = |_, logits: &[f32]| {
            bits.extend(logits.iter().map(|x| x.to_bits()));
            Ok(())
        };
        engine.feed(id, &[1, 2, 3, 4, 5, 6, 7], true, keep).unwrap();
        bits
    });
    assert_eq!(found, wanted);
}
