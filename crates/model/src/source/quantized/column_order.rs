//! Columns that their producer has quantised in the order of activations (GPTQ's `desc_act`, compressed-tensors' `actorder: group`): a list has the group of each, and those
//! of a group are anywhere. Kernels have groups of columns that are beside each other, so columns move, and the input that each is multiplied with is known by its number.

use anyhow::{Context, Result, ensure};
use sluice_store::{Dtype, Tensor};

use super::module::read;

/// Columns beyond which an order is not read: their numbers are kept as f32 on the device.
const MOST_COLUMNS: usize = 1 << 24;

/// The column of the file that belongs at each place, in ascending groups and within them in the file's order; `None` if that is the file's own order, or the list has -1
/// everywhere, which stands for none. `per_row`: groups of a row.
///
/// # Errors
/// No list of a group for each of `cols` columns, or groups of different sizes.
pub(super) fn column_order(list: Option<&Tensor>, per_row: usize, cols: usize) -> Result<Option<Vec<u32>>> {
    let Some(list) = list else { return Ok(None) };
    let name = &list.name;
    let is_list = list.dtype == Dtype::I32 && list.shape == [cols] && cols <= MOST_COLUMNS;
    ensure!(is_list, "tensor {name:?}: {} {:?}, expected a group for each of {cols} columns", list.dtype, list.shape);
    let values = read(list)?;
    let groups: Vec<i32> = values.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
    if groups.iter().all(|group| *group == -1) {
        return Ok(None);
    }
    // 1. how many columns each group has
    ensure!((1..=cols).contains(&per_row), "tensor {name:?}: {per_row} groups of {cols} columns");
    let mut counts = vec![0; per_row];
    for (column, group) in groups.iter().enumerate() {
        let of_group = usize::try_from(*group).ok().and_then(|group| counts.get_mut(group));
        *of_group.with_context(|| format!("tensor {name:?}: column {column} is of group {group} of {per_row}"))? += 1;
    }
    let alike = counts.iter().all(|count| *count == counts[0]);
    ensure!(alike, "tensor {name:?}: groups of different sizes ({cols} columns in {per_row} groups)");
    // 2. their places
    let per_group = counts[0];
    let mut free: Vec<usize> = (0..per_row).map(|group| group * per_group).collect();
    let mut order = vec![0; cols];
    for (column, group) in groups.iter().enumerate() {
        let place = &mut free[*group as usize];
        order[*place] = column as u32;
        *place += 1;
    }
    let in_order = order.iter().enumerate().all(|(place, column)| place == *column as usize);
    Ok((!in_order).then_some(order))
}
