//! Experts that stay on disk: the store reads those that a layer's tokens want into memory of the host, from where they go to the device, into room that
//! each layer uses anew. Plain, and slow: nothing is kept on the device, and nothing overlaps.

use std::sync::Arc;

use anyhow::{Error, Result};
use sluice_backend::{Activations, ExpertOptions, Experts, Failed, Moe, Streamed};
use sluice_store::experts::{ExpertStore, Next};
use sluice_store::{Bytes, host_memory};

use crate::driver::{Address, Gpu};
use crate::memory::{ALIGNMENT, Scratch};
use crate::mixture::{PROJECTIONS, operands};
use crate::parameters as p;
use crate::weights::{ARRAYS, Weights};

pub struct Streaming {
    store: ExpertStore,
    /// The experts of a layer, and where each of their matrices is.
    room: Scratch,
    table: Scratch,
    matrices: Vec<p::Matrix>,
    /// Rows whose experts could not be read, and why the first of them could not.
    failed_rows: Vec<u32>,
    error: Option<Arc<sluice_store::Error>>,
}

impl Streaming {
    pub fn open<'a>(
        weights: &mut Weights,
        mixtures: impl Iterator<Item = &'a Moe> + Clone,
        options: &ExpertOptions,
    ) -> Result<Streaming> {
        let k = mixtures.clone().map(|m| m.scoring.k()).max().unwrap_or(0);
        let arrays = |experts: &Experts, e: usize| -> Vec<Bytes> {
            let of = |o: crate::mixture::Operand| weights.all[o.weight].rows_bytes(o.row..o.row + o.rows);
            operands(experts, e).into_iter().flat_map(of).collect()
        };
        let sources = mixtures.clone().map(|m| (0..m.experts.count).map(|e| arrays(&m.experts, e)));
        let store = ExpertStore::open(sources, k, options, &mut host_memory)?;
        for moe in mixtures {
            for expert in 0..moe.experts.count {
                operands(&moe.experts, expert).iter().for_each(|o| weights.all[o.weight].streamed = true);
            }
        }
        Ok(Streaming {
            store,
            room: Scratch::default(),
            table: Scratch::default(),
            matrices: Vec::new(),
            failed_rows: Vec::new(),
            error: None,
        })
    }

    /// Reads the experts that tokens want, and brings them to the device. Where the table of their matrices is.
    #[allow(clippy::too_many_arguments)]
    pub fn fetch(
        &mut self,
        gpu: &Gpu,
        weights: &Weights,
        mode: Activations,
        layer: usize,
        experts: &Experts,
        k: usize,
        chosen: &[u32],
    ) -> Result<Address> {
        // 1. What is wanted
        let mut tokens = vec![0u32; experts.count];
        chosen.iter().for_each(|&e| tokens[e as usize] += 1);
        let wanted: Vec<u32> = (0..experts.count as u32).filter(|e| tokens[*e as usize] > 0).collect();
        let tokens: Vec<u32> = wanted.iter().map(|e| tokens[*e as usize]).collect();
        let arrays = |e: usize| operands(experts, e).map(|o| (o, weights.all[o.weight].bytes_per_array(o.rows)));
        let padded = |bytes: usize| bytes.next_multiple_of(ALIGNMENT);
        let all = wanted.iter().flat_map(|&e| arrays(e as usize)).flat_map(|(_, bytes)| bytes);
        let room = self.room.room(gpu, all.map(padded).sum())?;
        self.matrices.clear();
        self.matrices.resize(PROJECTIONS * experts.count, p::Matrix::default());
        // 2. One after the other as they come
        let fetch = self.store.fetch(layer, &wanted, &tokens, false);
        let mut at = room;
        loop {
            let i = match self.store.next(fetch, true) {
                Next::Expert(i) => i,
                Next::Failed(i) => {
                    self.error.get_or_insert(self.store.take_error(fetch, i));
                    let rows = chosen.chunks_exact(k).zip(0..).filter(|(row, _)| row.contains(&wanted[i]));
                    self.failed_rows.extend(rows.map(|(_, row)| row));
                    // No kernel computes it: what is left of these rows means nothing.
                    continue;
                }
                Next::Later => continue,
                Next::Over => break,
            };
            let expert = wanted[i] as usize;
            for (projection, (operand, bytes)) in arrays(expert).into_iter().enumerate() {
                let mut places = [0; ARRAYS];
                for (array, (place, len)) in places.iter_mut().zip(bytes).enumerate() {
                    let from = self.store.array(fetch, i, projection * ARRAYS + array);
                    assert_eq!(from.len(), len);
                    // SAFETY: room for all was made; waited for below, before the slot is released.
                    unsafe { gpu.write_later(at, from)? };
                    *place = at;
                    at += padded(len) as u64;
                }
                self.matrices[projection * experts.count + expert] =
                    weights.all[operand.weight].described(places, mode);
            }
            gpu.wait()?;
            self.store.release(fetch, i);
        }
        for matrix in &mut self.matrices {
            if matrix.data == 0 {
                // No kernel multiplies with it.
                matrix.kind = u32::MAX;
            }
        }
        let bytes = p::Matrix::bytes(&self.matrices);
        let table = self.table.room(gpu, bytes.len())?;
        // SAFETY: the room was just made.
        unsafe { gpu.write(table, bytes)? };
        Ok(table)
    }

    /// Whether an expert could not be read in this step.
    pub fn has_failed(&self) -> bool {
        self.error.is_some()
    }

    /// Which rows of the step were lost, ascending, and why; `None` if none was.
    pub fn take_failure(&mut self) -> Option<Failed> {
        let error = self.error.take()?;
        let mut rows = std::mem::take(&mut self.failed_rows);
        rows.sort_unstable();
        rows.dedup();
        Some(Failed { rows, why: Arc::new(Error::from(error)) })
    }

    pub fn take(&mut self) -> Streamed {
        Streamed {
            stats: self.store.take_stats(),
            reader: self.store.reader(),
            notes: self.store.notes().to_vec(),
            slots: self.store.slots(),
            file_bytes: self.store.file_bytes(),
            looks_ahead: false,
        }
    }

    pub fn notes(&self) -> Vec<String> {
        self.store.notes().to_vec()
    }

    pub fn host_bytes(&self) -> usize {
        self.store.bytes()
    }

    pub fn device_bytes(&self) -> usize {
        self.room.bytes() + self.table.bytes()
    }
}
