//! Tables of embeddings that stay on disk: the host reads the rows of a step's tokens and widens them, and the device gets them as f32.

use anyhow::Result;
use sluice_backend::{Failed, Isa, MatrixId, MatrixSource, NgramTable, RowOptions, RowStats, StepInputs, Tensor};
use sluice_cpu::{Pool as Threads, Tables};

use crate::device::memory::bytes_of;
use crate::device::pinned::PinnedBuffer;
use crate::ops::context::{Context, contiguous_pieces};

struct DiskTable {
    /// Of a table in parts the first.
    id: MatrixId,
    rows: Tables,
    /// `[tokens, columns]` f32 of the present step, on their way to the device.
    widened: PinnedBuffer,
}

/// The tables of a model that stay on disk.
#[derive(Default)]
pub struct DiskTables {
    all: Vec<DiskTable>,
}

impl DiskTables {
    /// As [`sluice_backend::Resources::stream_table`].
    pub fn stream(&mut self, id: MatrixId, source: &MatrixSource, options: &RowOptions) -> Result<()> {
        let mut rows = Tables::default();
        rows.stream(id, source, options)?;
        self.all.push(DiskTable { id, rows, widened: PinnedBuffer::default() });
        Ok(())
    }

    /// As [`sluice_backend::Resources::stream_ngrams`]. `source`: that of a part.
    pub fn stream_ngrams<'a>(
        &mut self,
        table: &NgramTable,
        source: impl Fn(MatrixId) -> &'a MatrixSource,
        options: &RowOptions,
    ) -> Result<()> {
        let mut rows = Tables::default();
        rows.stream_ngrams(table, source, options)?;
        self.all.push(DiskTable { id: table.parts[0], rows, widened: PinnedBuffer::default() });
        Ok(())
    }

    /// Takes over a table of another device.
    pub fn take(&mut self, id: MatrixId, from: &mut DiskTables) {
        self.all.extend(from.all.extract_if(.., |table| table.id == id));
    }

    pub fn ids(&self) -> Vec<MatrixId> {
        self.all.iter().map(|table| table.id).collect()
    }

    pub fn has(&self, id: MatrixId) -> bool {
        self.all.iter().any(|table| table.id == id)
    }

    /// Starts to read the rows that a step wants.
    pub fn begin(&mut self, inputs: &StepInputs) {
        self.all.iter_mut().for_each(|table| table.rows.begin(inputs));
    }

    /// `out = table[tokens]`. Waits for the rows, but not for their way to the device.
    pub fn embed(&mut self, context: &Context, id: MatrixId, threads: (Isa, &mut Threads), out: Tensor) -> Result<()> {
        let table = self.all.iter_mut().find(|table| table.id == id).expect("a table on disk");
        let out = out.first_rows(context.inputs.tokens().len());
        let elements = out.rows * out.cols;
        table.widened.reserve(&context.gpu, 4 * elements)?;
        let widened = table.widened.floats_mut(elements);
        table.rows.embed_into(id, threads.0, threads.1, widened);
        for (at, range) in contiguous_pieces(out, context.place(out)) {
            // SAFETY: the tensor was checked against its buffer; the rows stay until the next step, and this one ends when the device has finished.
            unsafe { context.gpu.write_async(at, bytes_of(&widened[range]))? };
        }
        Ok(())
    }

    /// Rows of the step that could not be read.
    pub fn take_failed(&mut self) -> Vec<Failed> {
        self.all.iter_mut().flat_map(|table| table.rows.take_failed()).collect()
    }

    /// Bytes of all caches, and of what is on its way to the device.
    pub fn bytes(&self) -> [usize; 2] {
        let sum = |of: fn(&DiskTable) -> usize| self.all.iter().map(of).sum();
        [sum(|table| table.rows.bytes()), sum(|table| table.widened.bytes())]
    }

    /// The fallbacks that reading uses, a clause each.
    pub fn notes(&self) -> impl Iterator<Item = &String> {
        self.all.iter().flat_map(|table| table.rows.notes())
    }

    /// What was read, of all tables together.
    pub fn stats(&self) -> Option<RowStats> {
        self.all.iter().filter_map(|table| table.rows.stats()).reduce(|a, b| a + b)
    }
}
