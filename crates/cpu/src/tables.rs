//! Tables whose rows are read from disk when a step's tokens want them.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use sluice_backend::{Failed, MatrixId, MatrixSource, NgramHash, NgramTable, StepInputs};
use sluice_experts::{RowOptions, RowStats, RowTable};
use sluice_kernels::format::WeightFormat;
use sluice_kernels::matrix::Matrix;
use sluice_kernels::{Isa, affine};
use sluice_store::Bytes;

use crate::memory::Place;
use crate::threads::Pool;

/// Rows that one task widens.
const ROWS: usize = 4;

struct Table {
    /// Of a table in parts the first.
    id: MatrixId,
    format: WeightFormat,
    cols: usize,
    rows: RowTable,
    /// A token has several rows, those of its n-grams.
    hash: Option<Arc<NgramHash>>,
}

impl Table {
    /// Rows of a token.
    fn heads(&self) -> usize {
        self.hash.as_ref().map_or(1, |hash| hash.heads())
    }
}

/// The rows of the n-grams of a step's tokens: `[tokens, heads]`.
pub(crate) fn numbers_of(hash: &NgramHash, inputs: &StepInputs, numbers: &mut Vec<u32>) {
    numbers.clear();
    numbers.resize(inputs.tokens().len() * hash.heads(), 0);
    for (row, numbers) in numbers.chunks_exact_mut(hash.heads()).enumerate() {
        hash.rows_of(|i| inputs.token_before(row, i), numbers);
    }
}

/// The tables of a model.
#[derive(Default)]
pub struct Tables {
    all: Vec<Table>,
    /// The rows of a step's n-grams. Kept between steps, so that a step allocates nothing.
    numbers: Vec<u32>,
    failed: Vec<Failed>,
}

impl Tables {
    /// Makes a table one whose rows are read from disk when a step wants them.
    ///
    /// # Errors
    /// When the table is not in a file in the form that kernels take, or there is no memory for the cache.
    pub fn stream(&mut self, id: MatrixId, source: &MatrixSource, options: &RowOptions) -> Result<()> {
        let &MatrixSource { format, rows, cols, ref planes } = source;
        ensure!(
            planes.iter().all(Bytes::is_of_file),
            "a table that is not in a file as kernels take it cannot stay on disk: keep it in memory (--tables memory)"
        );
        let rows = RowTable::open(planes, rows, options).context("no memory for rows of a table")?;
        self.all.push(Table { id, format, cols, rows, hash: None });
        Ok(())
    }

    /// The same of a table of n-grams. `source`: that of a part.
    ///
    /// # Errors
    /// As for [`Tables::stream`].
    pub fn stream_ngrams<'a>(
        &mut self,
        table: &NgramTable,
        source: impl Fn(MatrixId) -> &'a MatrixSource,
        options: &RowOptions,
    ) -> Result<()> {
        let parts = || table.parts.iter().map(|part| source(*part));
        let &MatrixSource { format, cols, .. } = source(table.parts[0]);
        ensure!(parts().all(|part| part.format == format), "a table of n-grams whose parts have several formats");
        ensure!(
            parts().all(|part| part.planes.iter().all(Bytes::is_of_file)),
            "a table that is not in files as kernels take it cannot stay on disk: keep it in memory (--tables memory)"
        );
        let rows = RowTable::open_parts(parts().map(|part| (&part.planes[..], part.rows)), options)
            .context("no memory for rows of a table")?;
        self.all.push(Table { id: table.parts[0], format, cols, rows, hash: Some(Arc::clone(&table.hash)) });
        Ok(())
    }

    /// Whether it is one of these.
    pub fn has(&self, table: MatrixId) -> bool {
        self.all.iter().any(|own| own.id == table)
    }

    /// Starts to read the rows that a step wants.
    pub fn begin(&mut self, inputs: &StepInputs) {
        for table in &mut self.all {
            match &table.hash {
                None => table.rows.begin(inputs.tokens()),
                Some(hash) => {
                    numbers_of(hash, inputs, &mut self.numbers);
                    table.rows.begin(&self.numbers);
                }
            }
        }
    }

    /// Writes the step's rows of `table` to `out` as f32, `[tokens, columns]`, once for each step.
    ///
    /// # Panics
    /// If the table is none of these, or `out` has another length.
    pub fn embed_into(&mut self, table: MatrixId, isa: Isa, pool: &mut Pool, out: &mut [f32]) {
        let own = self.all.iter().find(|own| own.id == table).expect("a table on disk");
        let out = Place::of_slice(out, own.cols * own.heads());
        self.embed(table, isa, pool, out);
    }

    /// As [`Tables::embed_into`].
    pub(crate) fn embed(&mut self, table: MatrixId, isa: Isa, pool: &mut Pool, out: Place) {
        let own = self.all.iter_mut().find(|own| own.id == table).expect("a table on disk");
        let (format, cols, heads) = (own.format, own.cols, own.heads());
        let columns = |place: usize| place % heads * cols..(place % heads + 1) * cols;
        while own.rows.next_wave() {
            let wave = own.rows.wave();
            pool.run(wave.len().div_ceil(ROWS), &|task, _| {
                for number in task * ROWS..((task + 1) * ROWS).min(wave.len()) {
                    let (place, planes) = wave.row(number);
                    let matrix = Matrix::new(format, 1, cols, planes).expect("the planes of a row");
                    // SAFETY: this task alone writes this row.
                    affine::dequantize_row(isa, &matrix, 0, unsafe { out.get_mut(place / heads, columns(place)) });
                }
            });
        }
        for (place, error) in own.rows.failed() {
            let place = *place as usize;
            // SAFETY: `&mut self`: no task is running.
            unsafe { out.get_mut(place / heads, columns(place)) }.fill(0.0);
            let why = Arc::new(anyhow::anyhow!("{error}").context("reading a row of a table"));
            self.failed.push(Failed { rows: vec![(place / heads) as u32], why });
        }
    }

    /// Rows of the step that could not be read.
    pub fn take_failed(&mut self) -> Vec<Failed> {
        std::mem::take(&mut self.failed)
    }

    /// Bytes of all caches.
    pub fn bytes(&self) -> usize {
        self.all.iter().map(|table| table.rows.bytes()).sum()
    }

    /// The fallbacks that reading uses, a clause each.
    pub fn notes(&self) -> impl Iterator<Item = &String> {
        self.all.iter().flat_map(|table| table.rows.notes())
    }

    /// What was read, of all tables together.
    pub fn stats(&self) -> Option<RowStats> {
        self.all.iter().map(|table| table.rows.stats()).reduce(|a, b| a + b)
    }
}
