//! `sluice plan`: estimates placement and speed of a model from its config alone, before anything is downloaded.
//!
//! [`shape`] counts parameters, [`estimate`] is the arithmetic, [`memory`] measures the bandwidth of products, and [`residency`] simulates which experts of a recorded
//! text are in memory. A disk without given figures is measured. The output is an estimate, and says what it is based on.

mod estimate;
pub mod expected;
mod gpu;
mod machines;
mod memory;
mod mtp;
mod residency;
mod shape;

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::json;
use sluice_kernels::format::WeightFormat;
use sluice_model::{Method, ModelTensors, Options, Quantization};
use sluice_pack::{parse_bits, parse_group};
use sluice_store::{Checkpoint, Dtype, Tensor};

use crate::disk::{self, Case, Order, PAGE};
use crate::{presets, terminal, units};
use estimate::{Disk, Precision, Products, Split, Token, Weights, hit_rate};
use gpu::{Gpu, OnDevice};
use machines::{Machinery, Machines};
use memory::Measured;
use mtp::Mtp;
use residency::Residency;
use shape::Shape;
use sluice_front::machine;

/// Usual disks, for the table: bytes per second of large reads.
const DISKS: [(&str, f64); 6] = [
    ("SATA SSD", 0.55e9),
    ("NVMe, PCIe 3", 3.5e9),
    ("NVMe, PCIe 4", 7.0e9),
    ("NVMe, PCIe 5", 14.0e9),
    ("Apple M3 Max", 17.5e9),
    ("two PCIe 5", 28.0e9),
];

/// The assumed latency of a solid-state disk, in seconds.
const LATENCY: f64 = 100e-6;

#[derive(Args, Debug)]
pub struct PlanArgs {
    /// A model's folder, a config.json, a name on the hub, or a known model, such as qwen3-30b-a3b or gpt-oss-20b; an unknown one is answered with all
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Memory for weights, experts and the conversation, such as 24GB [default: what is available here]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    memory: Option<u64>,
    /// Bytes per second of the disk, such as 7GB; auto measures with the model's own files
    #[arg(long, value_name = "BYTES|auto", default_value = "auto")]
    disk_bandwidth: String,
    /// Microseconds that a read alone takes beyond its bytes over the bandwidth [default: measured, or 100 where the bandwidth is given]
    #[arg(long, value_name = "MICROSECONDS")]
    disk_latency: Option<f64>,
    /// Bytes per second of memory, such as 60GB [default: measured here]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    memory_bandwidth: Option<u64>,
    /// Bits per weight, 16 for bf16 and f16, 32 for f32 [default: as the checkpoint is, else 4]
    #[arg(long, value_parser = bits)]
    bits: Option<u64>,
    /// Bits per weight of the routed experts [default: as --bits, else as the checkpoint is]
    #[arg(long, value_parser = bits)]
    experts_bits: Option<u64>,
    /// Weights that share a scale [default: as the checkpoint has it, else 64]
    #[arg(long, value_parser = parse_group)]
    group_size: Option<u16>,
    /// Tokens of one conversation
    #[arg(long, default_value_t = 8192)]
    context: u64,
    /// Experts per token instead of the model's own number. LOSSY when it is run so
    #[arg(long, value_name = "K")]
    experts_per_token: Option<usize>,
    /// Part of the experts' reads that memory serves, 0 to 1 [default: simulated with --trace, else expected from the memory]
    #[arg(long, value_name = "RATE")]
    hit_rate: Option<f64>,
    /// Which experts tokens take, of `eval routing --trace-out`: what of them would be in memory is simulated
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Memory of a GPU that computes, such as 24GB: it holds resident weights, the conversation and as many experts as fit; --memory and the disk hold the others
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    gpu_memory: Option<u64>,
    /// GPUs of so much memory that share the layers
    #[arg(long, default_value_t = 1, value_name = "N", requires = "gpu_memory", value_parser = clap::value_parser!(u64).range(1..=64))]
    gpus: u64,
    /// Machines like this one that have a range of layers each
    #[arg(long, value_name = "N", conflicts_with_all = ["gpu_memory", "trace"])]
    machines: Option<usize>,
    /// Bytes per second between two machines, such as 1.2GB [default: 125MB]
    #[arg(long, value_name = "BYTES", value_parser = bytes, requires = "machines")]
    network_bandwidth: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Bytes per second that all threads read from this machine's memory.
///
/// # Errors
/// When there is too little memory to measure with.
pub fn memory_bandwidth() -> Result<f64> {
    ensure!(machine::room().is_none_or(|room| room >= memory::NEEDED), "too little memory to measure with");
    let precision = Precision { bits: 4, group: 64 };
    Ok(memory::measure(precision, precision)?.read)
}

fn bits(text: &str) -> Result<u64, String> {
    match text {
        "16" => Ok(16),
        "32" => Ok(32),
        _ => parse_bits(text).map(u64::from),
    }
}

/// `24GB`, `512MiB`, `1000`.
fn bytes(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1048576.0,
        "gib" => 1073741824.0,
        _ => return Err(format!("{text:?}: expected bytes, such as 24GB")),
    };
    let number = number.trim().parse::<f64>().ok().filter(|n| n.is_finite() && *n > 0.0 && n * scale < 1e18);
    number.map(|n| (n * scale) as u64).ok_or_else(|| format!("{text:?}: expected bytes, such as 24GB"))
}

/// Whether a folder lacks weights that belong there: of a model that is not fetched, only the config is there.
fn lacks_weights<T>(opened: &Result<T, sluice_store::Error>) -> bool {
    matches!(opened, Err(sluice_store::Error::NoWeights { .. } | sluice_store::Error::MissingShard { .. }))
}

pub fn run(args: PlanArgs) -> Result<()> {
    // 1. the model
    let named = presets::find(&args.model)?;
    let config = named.config();
    // A folder may hold no more than a config.
    let opened = named.source().map(|source| source.tensors());
    let (options, there) = (Options::default(), opened.as_ref().and_then(|opened| opened.as_ref().ok()));
    let described = match there {
        Some(tensors) => sluice_model::describe_stored(tensors, &options)?,
        None => sluice_model::describe(config, &options)?,
    };
    described.notes.iter().for_each(|line| terminal::note(line));
    let shape = Shape::of(&described);
    let stored = config.quantization().ok();
    let (all, of_experts) = (stored.as_ref().and_then(Quantization::default), stored.and_then(|q| q.of_experts()));
    let bits_of = |width: Option<(u8, u16)>| width.map(|(bits, _)| u64::from(bits));
    let plain = there.and_then(|tensors| quantized_bits(tensors).or_else(|| float_bits(tensors.checkpoint())));
    // In gpt-oss only experts are quantised.
    let is_mxfp4 = matches!(config.method(), Ok(Some(Method::Mxfp4)));
    let or_mxfp4 = |bits: u64| is_mxfp4.then_some(bits);
    let bits = args.bits.or(bits_of(all)).or(or_mxfp4(16)).or(plain).unwrap_or(4);
    let experts_bits = args.experts_bits.or(args.bits).or(bits_of(of_experts)).or(or_mxfp4(4)).unwrap_or(bits);
    let group = u64::from(args.group_size.or(all.map(|(_, group)| group)).unwrap_or(64));
    let precision = |bits| Precision { bits, group };
    let mtp = Mtp::of(config, there, &described, precision(bits))?;
    let k = args.experts_per_token.unwrap_or(shape.k);
    ensure!(k <= shape.experts, "--experts-per-token {k}: the model has {} experts", shape.experts);
    let weights = Weights::new(&shape, precision(bits), precision(experts_bits), k);
    let on_device = there.map_or(OnDevice::default(), |tensors| OnDevice::of(tensors, &described));
    let weights_there = on_device.weights(&weights);
    let recording = args.trace.as_deref().map(|path| residency::read(path, &shape, k)).transpose()?;

    // 2. the machine
    let room = machine::available().into_iter().chain(machine::cgroup().map(|l| l.left)).min();
    let memory = args.memory.or(room).context("this machine's memory is not known: give --memory")?;
    let measured = memory::measure(precision(bits), precision(experts_bits))?;
    // On another machine, products are assumed to reach the same fraction of its bandwidth as here.
    let memory_bandwidth = args.memory_bandwidth.map_or(measured.read, |b| b as f64);
    let products = measured.products_at(memory_bandwidth);
    let latency = args.disk_latency.map_or(LATENCY, |us| us / 1e6);
    ensure!(latency.is_finite() && latency >= 0.0, "--disk-latency must be 0 or more");
    let this_disk = match args.disk_bandwidth.as_str() {
        "auto" => match opened.filter(|opened| !lacks_weights(opened)).transpose()? {
            Some(tensors) => {
                let found = measure_disk(tensors.checkpoint(), weights.per_expert).with_context(|| {
                    let folder = tensors.checkpoint().folder().display();
                    format!("{folder}: its disk cannot be measured (give --disk-bandwidth)")
                })?;
                Some(if args.disk_latency.is_some() { Disk { latency, ..found } } else { found })
            }
            None => None,
        },
        given => match bytes(given) {
            Ok(bytes) => Some(Disk { bandwidth: bytes as f64, latency }),
            Err(why) => bail!("--disk-bandwidth {why}"),
        },
    };

    // 3. where things go, and what a token costs
    let gpu = args.gpu_memory.map(|bytes| Gpu::new(&shape, &weights_there, (args.gpus, bytes), args.context));
    let split = match &gpu {
        None => Split::new(&shape, &weights, memory, args.context, 2),
        // Resident weights and the cache are in the GPU's memory.
        Some(_) => Split { resident: 0, cache: 0, for_experts: memory.min(weights.experts), missing: 0 },
    };
    let held = split.for_experts.saturating_add(gpu.as_ref().map_or(0, |gpu| gpu.stays)).min(weights.experts);
    let part = if weights.experts > 0 { held as f64 / weights.experts as f64 } else { 1.0 };
    if let Some(rate) = args.hit_rate {
        ensure!((0.0..=1.0).contains(&rate), "--hit-rate {rate}: expected 0 to 1");
    }
    let residency =
        recording.and_then(|r| Residency::simulate(&r, &weights, &split, gpu.as_ref().map(|gpu| gpu.stays)));
    let served = residency.as_ref().filter(|_| gpu.is_some()).and_then(Residency::served_by_gpu);
    let simulated = || match &residency {
        // If everything fits, nothing is missed.
        _ if part >= 1.0 => None,
        Some(residency) => Some(residency.hit_rate()),
        None => args.trace.is_some().then_some(0.0),
    };
    let expected = args.hit_rate.or_else(simulated).unwrap_or_else(|| hit_rate(part));
    let mut disks: Vec<(&str, Disk)> = this_disk.map(|disk| ("this disk", disk)).into_iter().collect();
    if args.disk_bandwidth == "auto" {
        disks.extend(DISKS.map(|(name, bandwidth)| (name, Disk { bandwidth, latency })));
    }
    let mut rates = vec![0.0, 0.5, 0.7, 0.9, expected];
    rates.sort_by(f64::total_cmp);
    rates.dedup();

    let machinery = Machinery {
        precision: (precision(bits), precision(experts_bits)),
        k,
        memory,
        context: args.context,
        // Experts in memory need no disk; for others an ordinary one is assumed where this one is not known.
        disk: this_disk.unwrap_or(Disk { bandwidth: DISKS[1].1, latency }),
        products,
        network: args.network_bandwidth.map_or(machines::NETWORK, |bytes| bytes as f64),
    };
    let machines = args.machines.map(|count| Machines::new(&described, count, &machinery)).transpose()?;

    let out = &mut io::stdout().lock();
    let token = |disk: Disk, rate: f64| Token::new(&weights, rate, disk, products);
    if args.json {
        let rows = disks.iter().flat_map(|(name, disk)| rates.iter().map(move |rate| (name, *disk, *rate)));
        let rows: Vec<_> = rows
            .map(|(name, disk, rate)| {
                let t = token(disk, rate);
                json!({
                    "disk": name, "disk_bandwidth": disk.bandwidth, "disk_latency": disk.latency, "hit_rate": rate, "bytes_from_disk": t.from_disk, "disk_seconds": t.disk,
                    "memory_seconds": t.memory, "tokens_per_second": 1.0 / t.seconds, "bound": t.bound.name(),
                })
            })
            .collect();
        let object = json!({
            "parameters": shape.parameters(), "active": shape.active(k), "resident": weights.resident, "experts": weights.experts,
            "per_expert": weights.per_expert, "expert_bytes_per_token": weights.expert_bytes(),
            "resident_bytes_per_token": weights.resident_read, "memory": memory, "cache": split.cache,
            "memory_for_experts": split.for_experts, "missing": split.missing, "expected_hit_rate": expected,
            "memory_bandwidth": memory_bandwidth, "products_bandwidth": {"resident": products.resident, "experts": products.experts},
            "mtp": mtp.as_ref().map(Mtp::to_json),
            "gpu": gpu.as_ref().map(|gpu| gpu.to_json(&weights_there, served)),
            "machines": machines.as_ref().map(Machines::to_json),
            "simulated": residency.as_ref().map(Residency::to_json), "tokens": rows,
        });
        writeln!(out, "{object:#}")?;
        return Ok(out.flush()?);
    }
    let line = |name: &str, text: String| format!("{name:<12}{text}\n");
    let mut text = line(
        "model",
        format!("{} parameters, {} for a token", units::count(shape.parameters()), units::count(shape.active(k))),
    );
    let widths =
        if experts_bits == bits { format!("{bits} bits") } else { format!("{bits} bits, experts {experts_bits}") };
    let are_floats = precision(bits).is_float() && precision(experts_bits).is_float();
    let widths = if are_floats { widths } else { format!("{widths}, groups of {group}") };
    text += &line(
        "weights",
        format!(
            "{} resident + {} in {} experts of {} ({widths})",
            units::bytes(weights.resident),
            units::bytes(weights.experts),
            weights.expert_count,
            units::bytes(weights.per_expert),
        ),
    );
    let lossy = if k < shape.k { format!(" (LOSSY: the model's own number is {})", shape.k) } else { String::new() };
    text += &line(
        "a token",
        format!(
            "reads {} of resident weights and {} of experts, {k} per layer{lossy}",
            units::bytes(weights.resident_read),
            units::bytes(weights.expert_bytes()),
        ),
    );
    if let Some(mtp) = &mtp {
        text += &line("mtp", mtp.text());
    }
    text += &line(
        "memory",
        format!(
            "{} = {} resident + {} for {} tokens of conversation + {} for experts ({:.1} % of them)",
            units::bytes(memory),
            units::bytes(split.resident),
            units::bytes(split.cache),
            args.context,
            units::bytes(split.for_experts),
            100.0 * part,
        ),
    );
    if let Some(gpu) = &gpu {
        text += &format!("{:<12}{}", "gpu", gpu.text(&weights_there, args.context, served));
        if let Some(line) = on_device.text() {
            text += &format!("{:<12}{line}\n", "");
        }
    }
    if split.missing > 0 {
        text += &line("", format!("TOO LITTLE: {} are missing", units::bytes(split.missing)));
    }
    text += &line("bandwidth", bandwidth_text(memory_bandwidth, products, &measured, bits, experts_bits));
    let wait = this_disk.map_or(latency, |disk| disk.latency) * 1e6;
    text += &line("latency", format!("{wait:.0} us for a layer that reads"));
    let whence = match (args.hit_rate, &residency) {
        (Some(_), _) => "as given".to_owned(),
        _ if part >= 1.0 => "all are in memory".to_owned(),
        (_, Some(residency)) => format!("simulated: {}", residency.whence()),
        _ if args.trace.is_some() => "memory does not hold what a token takes of one layer".to_owned(),
        _ => "no trace of `eval routing --trace-out`; from published LRU rates of Qwen3.5-397B-A17B by the part that fits, other models and texts differ"
            .to_owned(),
    };
    text += &line("hit rate", format!("{:.0} % expected ({whence})", 100.0 * expected));
    if let Some(residency) = &residency {
        text += &line("simulated", residency.text());
    }
    let computes = if gpu.is_some() { "were the CPU to compute" } else { "" };
    text +=
        &format!("\n{computes}{}{:<16}{:>10}", if computes.is_empty() { "" } else { ":\n" }, "tokens/s", "bandwidth");
    rates.iter().for_each(|r| text += &format!("{:>10}", format!("{:.0} %", 100.0 * r)));
    text += &format!("  bound at {:.0} %\n", 100.0 * expected);
    for (name, disk) in &disks {
        text += &format!("{name:<16}{:>10}", format!("{}/s", units::bytes(disk.bandwidth as u64)));
        rates.iter().for_each(|&r| text += &format!("{:>10.2}", 1.0 / token(*disk, r).seconds));
        text += &format!("  {}\n", token(*disk, expected).bound.name());
    }
    text += &format!("{:<16}{:>10}", "from disk", "");
    rates
        .iter()
        .for_each(|&r| text += &format!("{:>10}", units::bytes((weights.expert_bytes() as f64 * (1.0 - r)) as u64)));
    if let Some(machines) = &machines {
        text += "\n";
        text += &machines.text();
    }
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

/// The width that comes nearest to that of a checkpoint's quantised matrices, if it has any.
fn quantized_bits(tensors: &ModelTensors) -> Option<u64> {
    let (checkpoint, layout) = (tensors.checkpoint(), tensors.layout());
    let is_quantized =
        |t: &&Tensor| matches!(layout.format(checkpoint, t), Ok(form) if !matches!(form, WeightFormat::Float(_)));
    let all: Vec<(u64, u64)> =
        checkpoint.tensors().iter().filter(is_quantized).map(|t| (t.bytes.len() as u64, layout.stored(t).1)).collect();
    let (bytes, elements) = all.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let average = 8.0 * bytes as f64 / elements.max(1) as f64;
    // Groups of 64 with a scale and a bias of 16 bits take half a bit more.
    let away = |bits: &u64| ((*bits as f64 + 0.5 - average).abs() * 1e6) as u64;
    (elements > 0).then(|| [2, 3, 4, 5, 6, 8].into_iter().min_by_key(away)).flatten()
}

/// Bits of the floating-point type that most of a checkpoint's bytes have.
fn float_bits(checkpoint: &Checkpoint) -> Option<u64> {
    let bytes =
        |dtype: Dtype| checkpoint.tensors().iter().filter(|t| t.dtype == dtype).map(|t| t.bytes.len()).sum::<usize>();
    let largest = [Dtype::BF16, Dtype::F16, Dtype::F32].into_iter().max_by_key(|dtype| bytes(*dtype))?;
    (bytes(largest) > 0).then_some(8 * largest.size() as u64)
}

/// Measures random reads of an expert's size in a model's files: one at a time, and many at once.
fn measure_disk(checkpoint: &Checkpoint, per_expert: u64) -> Result<Disk> {
    let request = per_expert.next_multiple_of(PAGE).clamp(256 << 10, 16 << 20);
    let files = checkpoint.file_sizes().iter();
    let files: Vec<_> =
        files.map(|(name, len)| (checkpoint.folder().join(name), *len)).filter(|(_, len)| *len >= request).collect();
    let speed = |depth, milliseconds, round| {
        let case = Case { request, depth, order: Order::Random, align: PAGE };
        disk::measure(&files, case, Duration::from_millis(milliseconds), round)
    };
    let (alone, bandwidth) = (speed(1, 500, 0)?, speed(8, 1500, 1)?);
    let latency = request as f64 / alone - request as f64 / bandwidth;
    Ok(Disk { bandwidth, latency: latency.max(0.0) })
}

/// `memory 20.1 GB/s; products with 4 bits 14.9 GB/s (74 %, measured here)`
fn bandwidth_text(memory: f64, products: Products, measured: &Measured, bits: u64, experts_bits: u64) -> String {
    let one = |bits: u64, speed: f64| {
        let part = 100.0 * speed / memory;
        format!("with {bits} bits {}/s ({part:.0} %)", units::bytes(speed as u64))
    };
    let mut text = format!("memory {}/s; products {}", units::bytes(memory as u64), one(bits, products.resident));
    if experts_bits != bits {
        text += &format!(", {}", one(experts_bits, products.experts));
    }
    let here = if memory == measured.read {
        "measured here"
    } else {
        "the parts of its own bandwidth that this machine's products reach"
    };
    format!("{text}: {here}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_with_their_units() {
        for (text, n) in [("24GB", 24_000_000_000), ("1.5 gb", 1_500_000_000), ("2GiB", 2 << 30), ("77", 77)] {
            assert_eq!(bytes(text), Ok(n), "{text}");
        }
        for wrong in ["", "GB", "-1GB", "1XB", "nanGB", "1e300"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
