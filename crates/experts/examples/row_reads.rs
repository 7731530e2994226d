//! How quickly rows of a table on disk come, with a cache that holds none of them: `cargo run --release -p sluice-experts --example row_reads FOLDER ROW_BYTES
//! ROWS_A_STEP SECONDS`. Every byte of every row is compared. `row_reads FOLDER write BYTES` makes `FOLDER/model.safetensors`, of one table. Speeds are printed as JSON.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use sluice_experts::{RowOptions, RowTable};
use sluice_store::{Checkpoint, LoadOptions, load};

const TABLE: &str = "rows";

/// The words of the table: a function of where they are.
fn word(number: u64) -> u64 {
    let mixed = (number ^ 0x5bd1_e995).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

const WORD: usize = size_of::<u64>();

fn write(folder: &Path, bytes: u64) -> std::io::Result<()> {
    let words = bytes / WORD as u64;
    let (bytes, mut file) =
        (words * WORD as u64, BufWriter::with_capacity(1 << 20, File::create(folder.join("model.safetensors"))?));
    let header = format!("{{\"{TABLE}\":{{\"dtype\":\"U8\",\"shape\":[{bytes}],\"data_offsets\":[0,{bytes}]}}}}");
    let header = format!("{header:width$}", width = header.len().next_multiple_of(WORD));
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for number in 0..words {
        file.write_all(&word(number).to_le_bytes())?;
    }
    file.into_inner()?.sync_all()
}

/// Words of a row that are not what the file was made with.
fn wrong(row: &[u8], first: u64) -> usize {
    row.chunks_exact(WORD).zip(first..).filter(|(found, number)| **found != word(*number).to_le_bytes()).count()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, numbers @ ..] = &arguments[..] else { panic!("FOLDER is missing") };
    let folder = Path::new(folder);
    let number = |text: &String| text.parse::<u64>().expect("a number");
    if let [verb, bytes] = numbers
        && verb == "write"
    {
        return write(folder, number(bytes)).expect("room for the file");
    }
    let [row_bytes, step, seconds] = numbers else { panic!("ROW_BYTES ROWS_A_STEP SECONDS") };
    let [row_bytes, step, seconds] = [row_bytes, step, seconds].map(number);
    assert!(row_bytes.is_multiple_of(WORD as u64), "rows are whole words");

    let on_disk = |_: &Checkpoint| HashSet::from([TABLE.to_owned()]);
    let (checkpoint, _loading) =
        load::open_except(folder, &LoadOptions::default(), on_disk).expect("a file of this program's");
    let bytes = checkpoint.tensor(TABLE).expect("a table").bytes;
    let rows = bytes.len() as u64 / row_bytes;
    let plane = bytes.slice(..(rows * row_bytes) as usize);
    // Room for a step: a token's rows are never those of the token before.
    let budget = step * RowTable::slot_bytes(std::iter::once(row_bytes as usize)) as u64;
    let options = RowOptions { budget, ..RowOptions::default() };
    let mut table = RowTable::open(&[plane], rows as usize, &options).expect("a reader");

    let mut random = fastrand::Rng::with_seed(std::process::id().into());
    let (mut wanted, mut mismatches, mut steps) = (Vec::new(), 0, 0u64);
    let begun = Instant::now();
    while begun.elapsed().as_secs() < seconds {
        wanted.clear();
        wanted.extend((0..step).map(|_| random.u64(..rows) as u32));
        table.begin(&wanted);
        while table.next_wave() {
            let wave = table.wave();
            for number in 0..wave.len() {
                let (place, planes) = wave.row(number);
                let first = u64::from(wanted[place]) * row_bytes / WORD as u64;
                mismatches += planes.map(|row| wrong(row, first)).sum::<usize>();
            }
        }
        mismatches += table.failed().len();
        steps += 1;
    }
    let (took, stats) = (begun.elapsed().as_secs_f64(), table.stats());
    table.notes().iter().for_each(|note| eprintln!("{note}"));
    println!(
        "{{\"reads\":{},\"reads_per_second\":{},\"milliseconds_a_step\":{},\"mismatches\":{mismatches}}}",
        stats.read,
        stats.read as f64 / took,
        1e3 * took / steps as f64,
    );
}
