//! `sluice pack`: the flags, what is shown meanwhile, and the figures at the end. The packing itself is `sluice_pack`.

mod summary;

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use clap::ValueEnum;
use sluice_pack::{
    Calibration, Error, Event, Layout, Outcome, PackOptions, Rounding, Rule, Rules, Watch, parse_bits, parse_group,
    parse_recipe,
};
use sluice_store::{MAX_SETTINGS, read_small};

use crate::progress::Progress;
use crate::{folders, hub, interrupt, terminal};

/// Quantise a model to MLX's format (lossy: `sluice eval ppl` measures what it costs)
#[derive(Debug, clap::Args)]
pub struct PackArgs {
    /// Folder or name of the checkpoint: safetensors in bf16, f16 or f32, or of MLX (what is quantised already stays as it is, unless
    /// --experts-bits, --set or a recipe asks for fewer bits)
    input: PathBuf,
    /// Folder to write; an interrupted packing goes on where it was
    output: PathBuf,
    /// Bits per weight: 2, 3, 4, 5, 6 or 8; `none` leaves all but what is named as it is
    #[arg(long, default_value = "4", value_parser = bits_or_none)]
    bits: Bits,
    /// Bits per weight of the routed experts [default: as --bits]
    #[arg(long, value_name = "BITS", value_parser = parse_bits)]
    experts_bits: Option<u8>,
    /// Weights that share a scale: 32, 64 or 128
    #[arg(long, default_value = "64", value_parser = parse_group)]
    group_size: u16,
    /// Another width for modules whose name matches a pattern, such as 'embed_tokens=6', '*.mlp.experts.*=4:32' or
    /// 'layers.{0-3}.*=none'; BITS is `none` to leave them as they are. The last match decides
    #[arg(long, value_name = "PATTERN=BITS[:GROUP]")]
    set: Vec<Rule>,
    /// A file of such rules, one a line, `#` for remarks; --set comes after them
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// mlx: experts stacked, in shards. bundle: each expert one aligned run, one file per layer, which streams best
    #[arg(long, value_enum, default_value = "mlx")]
    layout: LayoutArg,
    /// Only these layers' experts (a bundle's files; the rest of the model too): later runs add the others
    #[arg(long, value_name = "A-B", value_parser = layers)]
    layers: Option<(usize, usize)>,
    /// Search the scale and bias of each group by least squares instead of taking MLX's: slower, closer to the original
    #[arg(long)]
    search: bool,
    /// Take the scale and bias of each group from its least and its greatest weight: worse than either, for comparison with who does so
    #[arg(long, conflicts_with_all = ["search", "calibration"])]
    min_max: bool,
    /// Quantise routed experts by what they see when the model reads this text: slowest, closest in what comes out
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Tokens of that text to read, in windows of 512
    #[arg(long, value_name = "TOKENS", default_value = "131072", requires = "calibration")]
    calibration_tokens: usize,
    /// At the end read everything back and compare it with what was written
    #[arg(long)]
    verify: bool,
    /// Write into a folder that is not empty, over the model in it
    #[arg(long)]
    force: bool,
    /// Threads (default: all cores)
    #[arg(long)]
    threads: Option<usize>,
    /// Bytes of tensors in one file
    #[arg(long, default_value_t = 5 << 30, hide = true)]
    shard_bytes: u64,
}

/// `A-B` or `A`.
fn layers(text: &str) -> Result<(usize, usize), String> {
    let wrong = || format!("{text:?}: expected a layer or a range of layers, such as 0-9");
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (first.parse().map_err(|_| wrong())?, last.parse().map_err(|_| wrong())?);
    if first <= last { Ok((first, last)) } else { Err(wrong()) }
}

/// `--bits`: a width for all, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bits(Option<u8>);

fn bits_or_none(text: &str) -> Result<Bits, String> {
    if text == "none" { Ok(Bits(None)) } else { parse_bits(text).map(|b| Bits(Some(b))) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LayoutArg {
    /// Experts stacked, in shards: what mlx_lm reads
    Mlx,
    /// One file per layer of experts, each expert one aligned run: what streams best
    Bundle,
}

/// Packs. Ctrl-C exits with 130; complete files stay for another try.
pub fn run(args: PackArgs) -> Result<()> {
    let begin = Instant::now();
    let options = args.options()?;
    let input = hub::resolved(&args.input)?;
    let hold = interrupt::hold();
    let screen = Screen::default();
    let result = sluice_pack::pack(&input, &args.output, &options, &screen);
    screen.clear();
    drop(hold);
    let output = args.output.display();
    let kept = "what is whole is kept, the same command goes on from there";
    match result {
        Ok(Outcome::Whole(report)) => print!("{}", summary::report(&report, begin.elapsed())),
        Ok(Outcome::Partly { missing, files }) => {
            println!("{missing} of {files} files are still to be packed (other --layers)");
        }
        Err(Error::Interrupted { kept: is_kept }) => {
            terminal::note(&format!("{output}: interrupted, {}", if is_kept { kept } else { "nothing kept" }));
            return Err(interrupt::Interrupted.into());
        }
        Err(Error::Failed { kept: is_kept, cause }) => {
            if is_kept {
                terminal::note(&format!("{output}: unfinished, {kept}"));
            }
            return Err(cause);
        }
    }
    Ok(())
}

/// The progress line.
#[derive(Default)]
struct Screen {
    progress: Mutex<Option<Progress>>,
}

impl Screen {
    fn clear(&self) {
        self.progress.lock().unwrap_or_else(|e| e.into_inner()).take();
    }
}

impl Watch for Screen {
    fn event(&self, event: Event) {
        match event {
            Event::Planned(conversion) => {
                summary::remarks(conversion).iter().for_each(|line| terminal::note(line));
            }
            Event::GoesOn { whole, files } => {
                terminal::note(&format!("goes on: {whole} of {files} files are whole"));
            }
            Event::Space { needed, free } => terminal::note(&summary::space(needed, free)),
            Event::Progress { done, all } => {
                let mut progress = self.progress.lock().unwrap_or_else(|e| e.into_inner());
                let [done, all] = [done, all].map(|bytes| (bytes / 1_000_000) as usize);
                progress.get_or_insert_with(|| Progress::new("packing", "MB", all)).set(done, all);
            }
            Event::Note(line) => terminal::note(line),
        }
    }

    fn is_stopped(&self) -> bool {
        interrupt::pressed()
    }
}

impl PackArgs {
    fn options(&self) -> Result<PackOptions> {
        ensure!(self.layers.is_none() || self.layout == LayoutArg::Bundle, "--layers is for bundles: --layout bundle");
        let calibration = self.calibration.as_ref().map(|text| Calibration {
            text: text.clone(),
            tokens: self.calibration_tokens,
            tokenizer_cache: folders::tokenizer_cache(),
        });
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Ok(PackOptions {
            rules: self.rules()?,
            layout: match self.layout {
                LayoutArg::Mlx => Layout::Mlx,
                LayoutArg::Bundle => Layout::Bundle,
            },
            layers: self.layers,
            rounding: match self {
                PackArgs { min_max: true, .. } => Rounding::Range,
                // A calibration starts from the search's result.
                PackArgs { search: true, .. } | PackArgs { calibration: Some(_), .. } => Rounding::Search,
                _ => Rounding::Mlx,
            },
            calibration,
            verify: self.verify,
            force: self.force,
            threads: self.threads.unwrap_or(cores).clamp(1, 1024),
            shard_bytes: self.shard_bytes,
        })
    }

    /// All rules: --bits for all, --experts-bits, the recipe's, --set; the last that matches decides.
    fn rules(&self) -> Result<Rules> {
        let mut set = Vec::new();
        let Bits(all) = self.bits;
        if all.is_none() {
            set.push("*=none".parse::<Rule>().expect("a rule"));
        }
        set.extend(self.experts_bits.map(Rule::experts));
        if let Some(path) = &self.recipe {
            let text = read_small(path, MAX_SETTINGS)?;
            let text = std::str::from_utf8(&text).map_err(|_| anyhow!("{}: not UTF-8", path.display()))?;
            set.extend(parse_recipe(text).map_err(|e| anyhow!("{}: {e}", path.display()))?);
        }
        set.extend(self.set.iter().cloned());
        let default = all.or(self.experts_bits).unwrap_or(4);
        Ok(Rules::new(default, self.group_size, set))
    }
}
