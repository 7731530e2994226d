//! An MTP head is packed with its model, at eight bits.

use std::fs;
use std::path::{Path, PathBuf};

use sluice_engine::{DraftOptions, DrafterChoice, Engine, Generation, Options};
use sluice_pack::{Event, Layout, Outcome, PackOptions, Rounding, Rule, Rules, Watch, pack};
use sluice_store::{Checkpoint, Dtype};

struct Silent;

impl Watch for Silent {
    fn event(&self, _: Event) {}

    fn is_stopped(&self) -> bool {
        false
    }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// A folder with a checkpoint and its head. Without an index and a `model.safetensors`, all of its files are read.
fn with_head(name: &str) -> tempfile::TempDir {
    let made = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden(name)).unwrap().flatten() {
        let file = entry.file_name().into_string().unwrap();
        if file == "config.json" || file.ends_with(".safetensors") {
            fs::copy(entry.path(), made.path().join(file.replace("model.", "weights."))).unwrap();
        }
    }
    fs::copy(golden("mtp").join(format!("{name}.safetensors")), made.path().join("mtp.safetensors")).unwrap();
    made
}

#[test]
fn a_head_is_packed_at_eight_bits_and_drafts() {
    let cases = [
        ("qwen3_5", Layout::Mlx, "language_model.mtp."),
        ("qwen3_5_moe", Layout::Mlx, "language_model.mtp."),
        ("qwen3_5_moe", Layout::Bundle, "language_model.mtp."),
        ("glm4_moe", Layout::Mlx, "model.layers."),
        ("deepseek_v3", Layout::Bundle, "model.layers."),
    ];
    let mut quantised = 0;
    for (name, layout, prefix) in cases {
        let (from, to) = (with_head(name), tempfile::tempdir().unwrap());
        let to = to.path().join("packed");
        let experts = if name == "qwen3_5" { Vec::new() } else { vec![Rule::experts(4)] };
        let options = PackOptions {
            rules: Rules::new(4, 32, experts),
            layout,
            layers: None,
            rounding: Rounding::Mlx,
            calibration: None,
            verify: true,
            force: false,
            threads: 2,
            shard_bytes: 1 << 30,
        };
        assert!(matches!(pack(from.path(), &to, &options, &Silent), Ok(Outcome::Whole(_))), "{name}");
        // 1. Its matrices have twice the bytes of those of other layers
        let packed = Checkpoint::open(&to).unwrap();
        let join = if prefix.ends_with("mtp.") { "fc.weight" } else { ".eh_proj.weight" };
        let is_join = |t: &&sluice_store::Tensor| t.name.starts_with(prefix) && t.name.ends_with(join);
        let t = packed.tensors().iter().find(is_join).unwrap_or_else(|| panic!("{name}: no {prefix}..{join}"));
        let (rows, last) = (t.shape[0], t.shape[1]);
        // Rows that groups do not divide stay as they are.
        let wanted = if t.dtype == Dtype::U32 { 2 * rows / 4 } else { 2 * rows };
        assert_eq!(last, wanted, "{name}: {} {:?} are not rows of bytes", t.dtype, t.shape);
        quantised += usize::from(t.dtype == Dtype::U32);
        // 2. It drafts
        let drafts =
            DraftOptions { drafter: DrafterChoice::Mtp, tokens: 2, governed: false, ..DraftOptions::default() };
        let options = Options { drafts, threads: 2, max_context: Some(128), ..Options::for_this_machine().unwrap() };
        let mut engine = Engine::open(&to, options).unwrap();
        let id = engine.add_sequence();
        engine.start(id, &[1, 2, 3, 4, 5], Generation { max_tokens: 20, ..Generation::default() }).unwrap();
        while !engine.is_idle() {
            engine.step().unwrap();
        }
        assert!(engine.draft_stats()[0].counts.drafted > 10, "{name}: {:?}", engine.draft_stats());
    }
    assert!(quantised > 0, "no head was quantised");
}
