//! Tables whose rows are read from disk when a step's tokens want them.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use sluice_backend::{Failed, MatrixId, MatrixSource, StepInputs};
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
    id: MatrixId,
    format: WeightFormat,
    cols: usize,
    rows: RowTable,
}

/// The tables of a model.
#[derive(Default)]
pub struct Tables {
    all: Vec<Table>,
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
        self.all.push(Table { id, format, cols, rows });
        Ok(())
    }

    /// Whether it is one of these.
    pub fn has(&self, table: MatrixId) -> bool {
        self.all.iter().any(|own| own.id == table)
    }

    /// Starts to read the rows that a step wants.
    pub fn begin(&mut self, inputs: &StepInputs) {
        for table in &mut self.all {
            table.rows.begin(inputs.tokens());
        }
    }

    /// Writes the step's rows of `table` to `out` as f32, `[tokens, columns]`, once for each step.
    ///
    /// # Panics
    /// If the table is none of these, or `out` has another length.
    pub fn embed_into(&mut self, table: MatrixId, isa: Isa, pool: &mut Pool, out: &mut [f32]) {
        let own = self.all.iter().find(|own| own.id == table).expect("a table on disk");
        let out = Place::of_slice(out, own.cols);
        self.embed(table, isa, pool, out);
    }

    /// As [`Tables::embed_into`].
    pub(crate) fn embed(&mut self, table: MatrixId, isa: Isa, pool: &mut Pool, out: Place) {
        let own = self.all.iter_mut().find(|own| own.id == table).expect("a table on disk");
        let (format, cols) = (own.format, own.cols);
        while own.rows.next_wave() {
            let wave = own.rows.wave();
            pool.run(wave.len().div_ceil(ROWS), &|task, _| {
                for number in task * ROWS..((task + 1) * ROWS).min(wave.len()) {
                    let (place, planes) = wave.row(number);
                    let matrix = Matrix::new(format, 1, cols, planes).expect("the planes of a row");
                    // SAFETY: this task alone writes this row.
                    affine::dequantize_row(isa, &matrix, 0, unsafe { out.get_mut(place, 0..out.cols) });
                }
            });
        }
        for (place, error) in own.rows.failed() {
            // SAFETY: `&mut self`: no task is running.
            unsafe { out.get_mut(*place as usize, 0..out.cols) }.fill(0.0);
            let why = Arc::new(anyhow::anyhow!("{error}").context("reading a row of a table"));
            self.failed.push(Failed { rows: vec![*place], why });
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
