//! A model in GGUF files.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use sluice_store::load::{OpenCheckpoint, OpenFile};
use sluice_store::safetensors::Entry;
use sluice_store::{Checkpoint, Dtype, Error, Stamp};

use super::config::{self, Architecture};
use super::header::{Header, TensorInfo};
use super::layout::GgufLayout;
use super::metadata::Metadata;
use super::names::{LONG_ROPE_FACTORS, Names, ROPE_FACTORS, SHORT_ROPE_FACTORS};
use super::positions::Factors;
use super::{latent, parts, streams, tokenizer};
use crate::config::Config;
use crate::description::ProjectionLayout;
use crate::source::layout::TensorLayout;
use crate::source::model_source::ModelSource;
use crate::source::text_files::TextFiles;

/// Files that may be made of the metadata, beside the config.
const TEXTS: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"];

/// One file of the model.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    stamp: Stamp,
    tensors: Vec<TensorInfo>,
}

/// A model in one GGUF file, or in a set of split files.
pub struct GgufModel {
    /// What the user named.
    path: PathBuf,
    config: Arc<Config>,
    config_text: String,
    metadata: Metadata,
    parts: Vec<Part>,
    layout: GgufLayout,
    /// Text files that were asked for: making a tokenizer's takes a while.
    texts: Mutex<HashMap<String, Arc<[u8]>>>,
}

impl GgufModel {
    /// Reads the headers of the model of which the file at `path` is (a part of).
    ///
    /// # Errors
    /// Headers that are not to be trusted, parts that are missing or of another model, and metadata of an architecture that is not supported. The message names
    /// the file and the key or tensor.
    pub fn open(path: &Path) -> Result<GgufModel> {
        let read = |path: &Path| -> Result<(Header, OpenFile)> {
            let open = OpenFile::open(path)?;
            let header = Header::from_reader(open.reader(), open.stamp().len(), path)?;
            Ok((header, open))
        };
        // 1. the files of the set
        let named = read(path)?;
        let files = parts::files_of(path, &named.0)?;
        let mut named = Some(named).filter(|_| files.len() == 1);
        let mut metadata: Option<Metadata> = None;
        let (mut parts, mut factors) = (Vec::new(), Factors::default());
        for (number, file) in files.iter().enumerate() {
            let (header, open) = match named.take() {
                Some(read) => read,
                None => read(file)?,
            };
            if files.len() > 1 {
                let first = metadata.as_ref().unwrap_or(&header.metadata);
                parts::check_part(first, &header.metadata, number, files.len())?;
            }
            for (name, table) in [
                (ROPE_FACTORS, &mut factors.all),
                (LONG_ROPE_FACTORS, &mut factors.long),
                (SHORT_ROPE_FACTORS, &mut factors.short),
            ] {
                if let Some(stored) = header.tensors.iter().find(|t| t.name == name) {
                    *table = Some(read_factors(&open, stored)?);
                }
            }
            metadata.get_or_insert(header.metadata);
            parts.push(Part { path: file.clone(), stamp: open.stamp(), tensors: header.tensors });
        }
        let metadata = metadata.expect("at least one file");
        parts::check_tensors(&metadata, parts.iter().map(|part| part.tensors.len()).sum())?;

        // 2. what they hold
        let mut shapes: HashMap<&str, &TensorInfo> = HashMap::new();
        for part in &parts {
            for tensor in &part.tensors {
                let other = shapes.insert(&tensor.name, tensor);
                ensure!(other.is_none(), "{}: tensor {:?} is also in another part", part.path.display(), tensor.name);
            }
        }
        let architecture = Architecture::of(&metadata)?;
        let config_text = config::json(architecture, &metadata, &shapes, &factors)?.to_string();
        let config = Config::parse(metadata.path().to_owned(), config_text.as_bytes())?;
        let layout = layout_of(architecture, &metadata, &shapes)?;
        Ok(GgufModel {
            path: path.to_owned(),
            config: Arc::new(config),
            config_text,
            metadata,
            parts,
            layout,
            texts: Mutex::default(),
        })
    }

    /// The metadata, of the first file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The text of file `name`, if the metadata says what would be in it.
    fn text(&self, name: &str) -> Result<Option<Arc<[u8]>>> {
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(text) = texts.get(name) {
            return Ok(Some(Arc::clone(text)));
        }
        let text = match name {
            "config.json" => Some(self.config_text.clone()),
            _ => tokenizer::text_file(&self.metadata, name)?,
        };
        let Some(text) = text else { return Ok(None) };
        let text: Arc<[u8]> = text.into_bytes().into();
        // A tokenizer's text has tens of megabytes, and whoever compiled it once does not ask again.
        if name != "tokenizer.json" {
            texts.insert(name.to_owned(), Arc::clone(&text));
        }
        Ok(Some(text))
    }
}

impl fmt::Debug for GgufModel {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("GgufModel").field("path", &self.path).finish_non_exhaustive()
    }
}

/// How the tensors hold the weights of such a model.
fn layout_of(
    architecture: Architecture,
    metadata: &Metadata,
    tensors: &HashMap<&str, &TensorInfo>,
) -> Result<GgufLayout> {
    let first = |part: &str| (0..8).any(|layer| tensors.contains_key(&*format!("blk.{layer}.{part}")));
    let sandwich = matches!(
        architecture,
        Architecture::Gemma2 | Architecture::Gemma3 | Architecture::Gemma4 | Architecture::Olmo2 | Architecture::Glm4
    );
    let keys = architecture.keys(metadata, tensors);
    let names = Names::new(sandwich, architecture.joins(), first).with_ngrams(streams::ngram_layer(&keys)?);
    let names = names.with_latent(latent::layers(&keys));
    let projections = match architecture {
        Architecture::Qwen3Next if first("ssm_in.weight") => Some(ProjectionLayout::ByKeyHead),
        Architecture::Qwen3Next => Some(ProjectionLayout::PairsByKeyHead),
        _ => None,
    };
    // Ollama says whether its converter has moved them.
    let moved = metadata.flag(&keys.key("ssm.v_head_reordered"))?;
    let kinds = tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.kind)).collect();
    Ok(GgufLayout {
        names,
        kinds,
        adjacent_pairs: architecture.moves_pairs(),
        tiled_value_heads: moved.unwrap_or(architecture.tiles_value_heads()),
        divides_joined: architecture.divides_joined(),
        projections,
    })
}

/// The values of the table of rotary factors.
fn read_factors(file: &OpenFile, table: &TensorInfo) -> Result<Vec<f32>> {
    let at = file.path().display();
    ensure!(table.kind.name == "F32", "{at}: tensor {:?}: type {} is not supported", table.name, table.kind.name);
    let len = table.range.end - table.range.start;
    ensure!(table.shape.len() == 1 && len <= 1 << 16, "{at}: tensor {:?}: shape {:?}", table.name, table.shape);
    let bytes = file.bytes().slice(table.range.start as usize..table.range.end as usize);
    sluice_backend::widen(sluice_backend::Float::F32, &bytes).with_context(|| table.name.clone())
}

/// How the store sees a tensor: rows of floats, or of bytes where they are blocks.
fn entry(tensor: &TensorInfo) -> Entry {
    let TensorInfo { name, kind, shape, range } = tensor;
    let dtype = match kind.name {
        "F32" => Dtype::F32,
        "F16" => Dtype::F16,
        "BF16" => Dtype::BF16,
        "F64" => Dtype::F64,
        "I8" => Dtype::I8,
        "I16" => Dtype::I16,
        "I32" => Dtype::I32,
        "I64" => Dtype::I64,
        _ => Dtype::U8,
    };
    let mut shape = shape.clone();
    if let Some(last) = shape.last_mut().filter(|_| kind.elements > 1) {
        *last = *last / kind.elements * kind.bytes;
    }
    // The gate of the shared expert is one row, which files have as a vector.
    if name.ends_with("ffn_gate_inp_shexp.weight") && shape.len() == 1 {
        shape.insert(0, 1);
    }
    // Convolutions of queries, keys and values have axes of one element beside channels and taps.
    if name.contains(".ssm_conv1d_") && shape.len() > 2 {
        let taps = shape.pop().unwrap_or(0);
        shape = vec![shape.iter().product(), taps];
    }
    Entry { name: name.clone(), dtype, shape, range: range.clone() }
}

impl ModelSource for GgufModel {
    fn path(&self) -> &Path {
        &self.path
    }

    fn config(&self) -> &Arc<Config> {
        &self.config
    }

    fn tokenizer_name(&self) -> Option<String> {
        tokenizer::tokenizer_name(&self.metadata)
    }

    fn weight_files(&self) -> Vec<(PathBuf, u64)> {
        self.parts.iter().map(|part| (part.path.clone(), part.stamp.len())).collect()
    }

    fn open_checkpoint(&self) -> Result<OpenCheckpoint, Error> {
        let open = |part: &Part| {
            let file = OpenFile::open(&part.path)?;
            // The header that was read must be this file's.
            if file.stamp() != part.stamp {
                return Err(Error::Replaced { path: part.path.clone() });
            }
            Ok((file, part.tensors.iter().map(entry).collect()))
        };
        OpenCheckpoint::of_files(&self.path, self.parts.iter().map(open).collect::<Result<_, _>>()?)
    }

    fn layout(&self, _: &Checkpoint) -> Box<dyn TensorLayout> {
        Box::new(self.layout.clone())
    }

    /// The config that was made of the metadata: whoever makes it otherwise computes something else. All else is in the files, whose bytes are summed.
    fn fingerprint_inputs(&self) -> Result<Vec<(&'static str, Vec<u8>)>> {
        Ok(vec![("config.json", self.config_text.clone().into_bytes())])
    }
}

impl TextFiles for GgufModel {
    fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
        let path = self.locate(name);
        match self.text(name) {
            Ok(Some(text)) if text.len() as u64 > limit => Err(Error::TooLarge { path, limit }),
            Ok(Some(text)) => Ok(text.to_vec()),
            Ok(None) => Err(Error::Io { path, doing: "find", cause: ErrorKind::NotFound.into() }),
            Err(e) => Err(Error::Refused { why: format!("{e:#}") }),
        }
    }

    /// The tokenizer's files, whose texts are made for it.
    fn list(&self, folder: &str) -> io::Result<Vec<(String, u64)>> {
        let mut files = Vec::new();
        for name in TEXTS.iter().filter(|_| folder.is_empty()) {
            if let Some(text) = self.text(name).map_err(|e| io::Error::other(format!("{e:#}")))? {
                files.push(((*name).to_owned(), text.len() as u64));
            }
        }
        Ok(files)
    }

    fn locate(&self, name: &str) -> PathBuf {
        // Not a path that anybody could open: what a message about the text in the file is about.
        let mut shown = self.path.clone().into_os_string();
        shown.push(format!(" ({} of its metadata)", tokenizer::main_key(name).unwrap_or(name)));
        shown.into()
    }

    fn fingerprint(&self, name: &str) -> Option<u128> {
        tokenizer::MetadataFiles(&self.metadata).fingerprint(name)
    }

    fn has(&self, name: &str) -> bool {
        name == "config.json" || tokenizer::MetadataFiles(&self.metadata).has(name)
    }
}
