//! Numbers that Python sees without copying them: by numpy's array interface, or by DLPack.

use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// What the numbers are.
#[derive(Clone, Copy)]
enum Kind {
    F32,
    U32,
}

/// An array in memory of its own, C-contiguous. `numpy.asarray(array)` and `torch.from_dlpack(array)` are views of it that keep it alive.
#[pyclass(frozen, module = "sluice._sluice")]
pub struct Array {
    kind: Kind,
    shape: Vec<usize>,
    /// The numbers' bits. Atomic, because views of it may write at any time.
    bits: Box<[AtomicU32]>,
}

impl Array {
    /// Of floats: `[rows, columns]`, or of any other shape.
    pub fn of_floats(shape: Vec<usize>, numbers: impl IntoIterator<Item = f32>) -> Array {
        let bits = numbers.into_iter().map(|x| AtomicU32::new(x.to_bits())).collect();
        Array { kind: Kind::F32, shape, bits }
    }

    /// Of whole numbers, such as tokens.
    pub fn of_tokens(tokens: &[u32]) -> Array {
        Array { kind: Kind::U32, shape: vec![tokens.len()], bits: tokens.iter().map(|n| AtomicU32::new(*n)).collect() }
    }

    /// An array of floats whose bits were made already.
    pub fn of_bits(shape: Vec<usize>, bits: Vec<AtomicU32>) -> Array {
        Array { kind: Kind::F32, shape, bits: bits.into() }
    }

    /// Reads the floats.
    pub fn get(&self, numbers: &mut [f32]) {
        self.bits.iter().zip(numbers).for_each(|(bits, x)| *x = f32::from_bits(bits.load(Ordering::Relaxed)));
    }
}

#[pymethods]
impl Array {
    /// As numpy reads it.
    #[getter(__array_interface__)]
    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("shape", pyo3::types::PyTuple::new(py, &self.shape)?)?;
        dict.set_item("typestr", if matches!(self.kind, Kind::F32) { "<f4" } else { "<u4" })?;
        dict.set_item("data", (self.bits.as_ptr() as usize, false))?;
        Ok(dict)
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        pyo3::types::PyTuple::new(py, &self.shape)
    }

    /// numpy's own export of its view, which keeps this array alive.
    #[pyo3(signature = (**arguments))]
    fn __dlpack__<'py>(slf: &Bound<'py, Self>, arguments: Option<&Bound<'py, PyDict>>) -> PyResult<Bound<'py, PyAny>> {
        let view = slf.py().import("numpy")?.call_method1("asarray", (slf,))?;
        view.call_method("__dlpack__", (), arguments)
    }

    /// The CPU.
    fn __dlpack_device__(&self) -> (u32, u32) {
        (1, 0)
    }

    fn __len__(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    fn __repr__(&self) -> String {
        format!(
            "Array(shape={:?}, dtype={})",
            self.shape,
            if matches!(self.kind, Kind::F32) { "float32" } else { "uint32" }
        )
    }
}
