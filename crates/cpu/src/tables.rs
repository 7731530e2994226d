//! Tables whose rows are read from disk when a step's tokens want them.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use sluice_backend::{Failed, MatrixId, StepInputs};
use sluice_experts::{RowOptions, RowTable};
use sluice_kernels::matrix::Matrix;
use sluice_kernels::{Isa, affine};
use sluice_store::Bytes;

use crate::memory::{Place, Weight};
use crate::threads::Pool;

/// Rows that one task widens.
const ROWS: usize = 4;

/// The tables of a model.
#[derive(Default)]
pub struct Tables {
    all: Vec<(usize, RowTable)>,
    failed: Vec<Failed>,
}

impl Tables {
    /// Bytes that the cache of a table's rows would take.
    pub fn bytes_of(weight: &Weight, options: &RowOptions) -> usize {
        RowTable::bytes_of(
            weight.source().iter().map(|plane| plane.len() / weight.rows()),
            weight.rows(),
            options.budget,
        )
    }

    /// Makes a table one whose rows are read from disk when a step wants them.
    ///
    /// # Errors
    /// When the table is not in a file in the form that kernels take, or there is no memory for the cache.
    pub fn stream(&mut self, number: usize, weight: &mut Weight, options: &RowOptions) -> Result<()> {
        let of_files = weight.source().iter().all(Bytes::is_of_file);
        ensure!(
            of_files,
            "a table that is not in a file as kernels take it cannot stay on disk: keep it in memory (--tables memory)"
        );
        let table = RowTable::open(weight.source(), weight.rows(), options);
        self.all.push((number, table.context("no memory for rows of a table")?));
        weight.streamed = true;
        Ok(())
    }

    /// Starts to read the rows that a step wants.
    pub fn begin(&mut self, inputs: &StepInputs) {
        for (_, table) in &mut self.all {
            table.begin(inputs.tokens());
        }
    }

    /// Writes the step's rows of `table` to `out` as f32, if the table is on disk. Returns whether it is.
    pub fn embed(&mut self, table: MatrixId, weight: &Weight, (isa, pool): (Isa, &mut Pool), out: Place) -> bool {
        let Some((_, table)) = self.all.iter_mut().find(|(number, _)| *number == table.number()) else { return false };
        while table.next_wave() {
            let wave = table.wave();
            pool.run(wave.len().div_ceil(ROWS), &|task, _| {
                for number in task * ROWS..((task + 1) * ROWS).min(wave.len()) {
                    let (place, planes) = wave.row(number);
                    let matrix = Matrix::new(weight.format(), 1, weight.cols(), planes).expect("the planes of a row");
                    // SAFETY: this task alone writes this row.
                    affine::dequantize_row(isa, &matrix, 0, unsafe { out.get_mut(place, 0..out.cols) });
                }
            });
        }
        for (place, error) in table.failed() {
            // SAFETY: `&mut self`: no task is running.
            unsafe { out.get_mut(*place as usize, 0..out.cols) }.fill(0.0);
            let why = Arc::new(anyhow::anyhow!("{error}").context("reading a row of a table"));
            self.failed.push(Failed { rows: vec![*place], why });
        }
        true
    }

    /// Rows of the step that could not be read.
    pub fn take_failed(&mut self) -> Vec<Failed> {
        std::mem::take(&mut self.failed)
    }

    /// Bytes of all caches.
    pub fn bytes(&self) -> usize {
        self.all.iter().map(|(_, table)| table.bytes()).sum()
    }

    /// The fallbacks that reading uses, a clause each.
    pub fn notes(&self) -> impl Iterator<Item = &String> {
        self.all.iter().flat_map(|(_, table)| table.notes())
    }

    /// What was read, of all tables together.
    pub fn stats(&self) -> Option<sluice_experts::RowStats> {
        self.all.iter().map(|(_, table)| table.stats()).reduce(|a, b| sluice_experts::RowStats {
            wanted: a.wanted + b.wanted,
            read: a.read + b.read,
            bytes: a.bytes + b.bytes,
            waited: a.waited + b.waited,
        })
    }
}
