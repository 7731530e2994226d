//! Tables of n-grams: many rows in several tensors, which stay where they are.

use std::sync::Arc;

use anyhow::{Result, anyhow, ensure};
use sluice_backend::NgramTable;
use sluice_store::Dtype;

use super::{RowTable, UsedBy, Weights};
use crate::description::{NGRAM_NUMBERS, NGRAM_TABLE, NgramsDescription};

impl Weights<'_> {
    /// The table of layer `at`, in parts.
    ///
    /// # Errors
    /// A part that is missing or has another shape; integers of the checkpoint that do not follow from the config.
    pub fn ngram_table(&mut self, at: usize, d: &NgramsDescription) -> Result<NgramTable> {
        let hash = Arc::clone(d.hash(at).expect("a layer with n-grams"));
        self.check_numbers(at, &hash)?;
        let w = self.described(at, NGRAM_TABLE);
        let (module, rows) = (self.module(&w), hash.rows());
        let checkpoint = self.tensors.checkpoint();
        let whole = format!("{module}.weight");
        let names = match checkpoint.tensor(&whole) {
            Some(_) => vec![whole],
            None => (0..d.parts).map(|part| format!("{module}.shard_{part}.weight")).collect(),
        };
        let rows_of = |name: &String| {
            let found = checkpoint.tensor(name);
            let found = found.ok_or_else(|| anyhow!("{}: no tensor {name:?}", checkpoint.named().display()))?;
            Ok(found.shape.first().copied().unwrap_or(0))
        };
        let counts = names.iter().map(rows_of).collect::<Result<Vec<usize>>>()?;
        let (rows_of_part, last) = (counts[0], counts[counts.len() - 1]);
        let alike = counts[..counts.len() - 1].iter().all(|count| *count == rows_of_part) && last <= rows_of_part;
        ensure!(alike && last > 0, "tensors {module}: parts of {counts:?} rows");
        let all: u64 = counts.iter().map(|count| *count as u64).sum();
        ensure!(all >= rows && all <= 1 << 32, "tensors {module}: {all} rows, expected {rows} or a few more");
        self.by = UsedBy::Rows;
        let parts = names.iter().zip(counts).map(|(name, count)| self.load(name, &[], count, w.cols));
        let parts = parts.collect::<Result<Vec<_>>>();
        self.by = UsedBy::All;
        let table = NgramTable { parts: parts?.into(), rows_of_part, cols: w.cols, hash };
        self.tables.push(RowTable::Ngrams(table.clone()));
        Ok(table)
    }

    /// Compares the integers that a checkpoint may have with those that follow from the config.
    fn check_numbers(&self, at: usize, hash: &sluice_backend::NgramHash) -> Result<()> {
        let (multipliers, sizes) = hash.numbers();
        let before = (0..sizes.len()).map(|head| sizes[..head].iter().sum()).collect::<Vec<u64>>();
        let module = self.module(&self.described(at, NGRAM_TABLE));
        let prefix = module.strip_suffix(NGRAM_TABLE).unwrap_or_default();
        for (part, own) in NGRAM_NUMBERS.iter().zip([multipliers, sizes, &before]) {
            let name = format!("{prefix}{part}");
            let Some(stored) = self.tensors.checkpoint().tensor(&name).filter(|_| self.reads) else { continue };
            ensure!(stored.dtype == Dtype::I64, "tensor {name} has type {:?}, expected integers", stored.dtype);
            let bytes = stored.bytes.to_vec();
            let numbers = bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b));
            ensure!(numbers.eq(own.iter().copied()), "tensor {name}: other numbers than the config makes");
        }
        Ok(())
    }
}
