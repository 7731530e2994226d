//! The kernels: which there are (`families`), how weights are stored (`format`), which multiplies with which (`choice`), and their compiled code (`objects`), which the driver loads. It compiles
//! PTX for the device that it finds and keeps the result, so that only the first start pays for that: half a minute, except where there is machine code too.

mod choice;
mod families;
mod format;
mod objects;
mod rows;
mod shared_memory;

use std::collections::BTreeMap;
use std::ffi::CString;

use anyhow::{Context, Result};
use cudarc::driver::{DriverError, sys};

pub use self::choice::{FEW, LaunchShape, SQUARE, SQUARE_THREADS, TILE};
pub use self::families::Kernel;
pub use self::format::{
    INT11_BLOCK_FORMATS, INT11_FLOAT_FORMATS, INT11_FORMATS, INT11_TENSOR_FORMATS, KernelFormat, Needs,
};
pub use self::objects::embedded_bytes;
use self::objects::{Code, Objects};
pub use self::rows::{RowLayout, row_bytes_on_device};
pub use self::shared_memory::STATIC_SHARED;
use self::shared_memory::large_shared;
use crate::device::sys::checked;

/// Ways to compute the same, quicker than what is there for all shapes. One becomes the default when a device was seen to give equal bits with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Kernels begin before the one before them has ended.
    Overlap,
    /// Several products and what comes before and after them in one kernel.
    Rows,
    /// The same for one token, in as little time as can be.
    One,
    /// Attention and delta rules of steps with a token of each sequence.
    Last,
    /// Many tokens on integer tensor cores.
    Tiles,
    /// Attention of prompts by tiles of tokens.
    Prompts,
    /// Experts that have a few tokens each by blocks of few rows, their choice in two kernels, and vocabularies for a few tokens.
    Few,
    /// Few tokens on integer tensor cores, by sets of sixteen rows.
    Sets,
    /// What joins partitions leaves its output encoded.
    Joined,
}

/// Which kernels give a device the bits of plain arithmetic: with affine weights, with floats of sixteen bits, and from records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exact {
    pub few: [bool; 3],
    pub wide: [bool; 3],
}

/// Places in [`Exact`].
pub const AFFINE: usize = 0;
pub const FLOATS: usize = 1;
pub const RECORDS: usize = 2;

/// Whether a variant is taken: all are, unless `SLUICE_CUDA_WAYS=Rows,Last` chooses, in builds with the feature `tuning`.
pub fn chosen(variant: Variant) -> bool {
    match std::env::var("SLUICE_CUDA_WAYS").ok().filter(|_| cfg!(feature = "tuning")) {
        Some(chosen) => chosen.split(',').any(|name| name == format!("{variant:?}")),
        None => true,
    }
}

/// Kernels and stamps of each in a module that has them (`STAMP` of `kernels/prim/stamps.cuh`).
#[cfg(feature = "tuning")]
type Stamps = [[[u64; 2]; 8]; 16];

/// All kernels, compiled for a device.
pub struct Kernels {
    /// By [`Kernel::index`]; null where the device lacks a kernel's instructions.
    functions: Vec<sys::CUfunction>,
    objects: Objects,
    capability: i32,
    #[cfg(feature = "tuning")]
    modules: Vec<sys::CUmodule>,
    /// Whether a kernel may begin before the one before it has ended: all of them wait themselves for what they need.
    pub overlap: bool,
}

/// Loads a module, which stays until the process ends. `specific`: its kernels are empty but in machine code of this very device; `None` where there is none that the driver
/// takes.
fn load_module(code: Code, specific: bool) -> Result<Option<sys::CUmodule>, DriverError> {
    let load = |mut code: Vec<u8>| {
        code.push(0);
        let (mut module, none) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: machine code, which knows its length, or a text that ends with a zero; no options.
        checked(unsafe { sys::cuModuleLoadDataEx(&mut module, code.as_ptr().cast(), 0, none, std::ptr::null_mut()) })?;
        Ok(module)
    };
    // A driver that does not take machine code can still take the text.
    match (code.machine_code.is_empty(), specific) {
        (true, true) => Ok(None),
        (false, true) => Ok(load(code.machine_code).ok()),
        (false, false) => load(code.machine_code).or_else(|_| load(code.ptx)).map(Some),
        (true, false) => load(code.ptx).map(Some),
    }
}

/// Whether there are kernels for a device of this compute capability.
///
/// # Errors
/// Where there are none, in one sentence that says what to do.
pub fn ensure_built(capability: i32) -> Result<()> {
    Objects::for_capability(capability).map(drop)
}

impl Kernels {
    /// Compiles, or has the driver find what it compiled before. A context is current, and stays until the process ends, as do the modules. `shared`: bytes of shared
    /// memory that a block can have.
    ///
    /// # Errors
    /// Where there are no kernels for the device, or its driver does not take them.
    pub fn load(capability: i32, shared: usize) -> Result<Kernels> {
        let objects = Objects::for_capability(capability)?;
        let mut modules = BTreeMap::new();
        for kernel in Kernel::all().filter(|kernel| kernel.only().is_none_or(|only| only == capability)) {
            let unit = kernel.unit();
            if !modules.contains_key(unit) {
                let module = load_module(objects.code(unit, capability)?, kernel.only().is_some())
                    .with_context(|| format!("its driver does not take the kernels of {unit}"))?;
                modules.insert(unit, module);
            }
        }
        let function = |kernel: Kernel| {
            let (name, mut function) = (kernel.name(), std::ptr::null_mut());
            let Some(module) = modules.get(kernel.unit()).copied().flatten() else {
                return Ok(function);
            };
            let terminated = CString::new(&*name)?;
            // SAFETY: the module was just loaded; the name ends with a zero.
            checked(unsafe { sys::cuModuleGetFunction(&mut function, module, terminated.as_ptr()) })
                .with_context(|| format!("the kernel {name}"))?;
            if let Some(own) = large_shared(&name) {
                let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: the function was just found; the device has said that a block may have as much.
                checked(unsafe { sys::cuFuncSetAttribute(function, attribute, (shared - own) as i32) })
                    .with_context(|| format!("shared memory of the kernel {name}"))?;
            }
            Ok(function)
        };
        let functions = Kernel::all().map(function).collect::<Result<_>>()?;
        Ok(Kernels {
            functions,
            objects,
            capability,
            #[cfg(feature = "tuning")]
            modules: modules.values().copied().flatten().collect(),
            overlap: capability >= 90 && chosen(Variant::Overlap),
        })
    }

    /// The module of a unit that is loaded only where it is asked for: that of `sluice bench roofline`. A context is current.
    ///
    /// # Errors
    /// Where there is no such unit for the device, or its driver does not take it.
    pub fn load_unit(&self, unit: &str) -> Result<sys::CUmodule> {
        load_module(self.objects.code(unit, self.capability)?, false)?.with_context(|| format!("the kernels of {unit}"))
    }

    /// Brings all kernels to the device, which else come there when they are first launched.
    pub fn load_all(&self) -> Result<(), DriverError> {
        let there = self.functions.iter().filter(|function| !function.is_null());
        // SAFETY: functions of a module that is loaded.
        there.cloned().try_for_each(|function| checked(unsafe { sys::cuFuncLoad(function) }))
    }

    /// Says where the time of kernels went, where modules keep that, and begins anew. The device is at rest.
    #[cfg(feature = "tuning")]
    pub fn print_stamps(&self) {
        for module in &self.modules {
            let (mut at, mut bytes, mut stamps): (_, _, Stamps) = (0, 0, Default::default());
            // SAFETY: the module is loaded; what is copied is as large as the array that it has.
            let found = unsafe {
                checked(sys::cuModuleGetGlobal_v2(&mut at, &mut bytes, *module, c"stamps".as_ptr())).is_ok()
                    && bytes == size_of::<Stamps>()
                    && checked(sys::cuMemcpyDtoH_v2(stamps.as_mut_ptr().cast(), at, bytes)).is_ok()
                    && checked(sys::cuMemsetD8_v2(at, 0, bytes)).is_ok()
            };
            for (kernel, stamps) in stamps.iter().enumerate().filter(|(_, s)| found && s[0][1] > 0) {
                let means = stamps.iter().take_while(|[_, n]| *n > 0).map(|[sum, n]| format!("{} ({n})", sum / n));
                eprintln!("stamps {kernel}: {}", means.collect::<Vec<_>>().join(", "));
            }
        }
    }

    pub fn function(&self, kernel: Kernel) -> sys::CUfunction {
        self.functions[kernel.index()]
    }
}
