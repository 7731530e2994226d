//! The kernels: PTX that is embedded, made by `kernels/make.py` from the `.cu` files beside it, and compiled by the driver for the device it finds. The driver
//! keeps what it compiles, so that only the first start pays for it.

use std::ffi::CString;
use std::io::Read;

use anyhow::{Context, Result};
use cudarc::driver::sys;

use crate::driver::checked;
use crate::parameters as p;

/// By compute capability, ascending.
pub const PTX: [(i32, &[u8]); 3] = [
    (75, include_bytes!("../kernels/ptx/compute_75.ptx.gz")),
    (80, include_bytes!("../kernels/ptx/compute_80.ptx.gz")),
    (90, include_bytes!("../kernels/ptx/compute_90.ptx.gz")),
];

macro_rules! kernels {
    ($($kernel:ident $name:literal $parameters:ty;)*) => {
        /// A kernel by name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kernel {
            $($kernel,)*
        }

        impl Kernel {
            pub const ALL: &[Kernel] = &[$(Kernel::$kernel,)*];

            /// Its name in the module.
            pub fn name(self) -> &'static str {
                match self {
                    $(Kernel::$kernel => $name,)*
                }
            }

            /// Bytes of the struct that it takes.
            pub fn parameters(self) -> usize {
                match self {
                    $(Kernel::$kernel => size_of::<$parameters>(),)*
                }
            }
        }
    };
}

kernels! {
    Encode "encode" p::Encode;
    Embed "embed" p::Embed;
    CopyRows "copy_rows" p::CopyRows;
    LanesF32One "lanes_f32_1" p::Matmul;
    LanesF32Many "lanes_f32_8" p::Matmul;
    LanesF16One "lanes_f16_1" p::Matmul;
    LanesF16Many "lanes_f16_8" p::Matmul;
    LanesBf16One "lanes_bf16_1" p::Matmul;
    LanesBf16Many "lanes_bf16_8" p::Matmul;
    LanesAffineOne "lanes_affine_1" p::Matmul;
    LanesAffineMany "lanes_affine_8" p::Matmul;
    PairsBf16One "pairs_bf16_1" p::Matmul;
    PairsBf16Many "pairs_bf16_8" p::Matmul;
    PairsAffineOne "pairs_affine_1" p::Matmul;
    PairsAffineMany "pairs_affine_8" p::Matmul;
    Integers2One "integers_2_1" p::Matmul;
    Integers2OneWide "integers_2_1_wide" p::Matmul;
    Integers2Many "integers_2_8" p::Matmul;
    Integers3One "integers_3_1" p::Matmul;
    Integers3OneWide "integers_3_1_wide" p::Matmul;
    Integers3Many "integers_3_8" p::Matmul;
    Integers4One "integers_4_1" p::Matmul;
    Integers4OneWide "integers_4_1_wide" p::Matmul;
    Integers4Many "integers_4_8" p::Matmul;
    Integers5One "integers_5_1" p::Matmul;
    Integers5OneWide "integers_5_1_wide" p::Matmul;
    Integers5Many "integers_5_8" p::Matmul;
    Integers6One "integers_6_1" p::Matmul;
    Integers6OneWide "integers_6_1_wide" p::Matmul;
    Integers6Many "integers_6_8" p::Matmul;
    Integers8One "integers_8_1" p::Matmul;
    Integers8OneWide "integers_8_1_wide" p::Matmul;
    Integers8Many "integers_8_8" p::Matmul;
    StoreKv "store_kv" p::Attention;
    Attend1 "attend_1" p::Attention;
    Attend2 "attend_2" p::Attention;
    Attend4 "attend_4" p::Attention;
    AttendPartition1 "attend_partition_1" p::Attention;
    AttendPartition2 "attend_partition_2" p::Attention;
    AttendPartition4 "attend_partition_4" p::Attention;
    Join "join" p::Attention;
    Convolve "convolve" p::Delta;
    Slide "slide" p::Delta;
    Gates "gates" p::Delta;
    Recur "recur" p::Delta;
    Recur64 "recur_64" p::Delta;
    Recur128 "recur_128" p::Delta;
    NormGated "norm_gated" p::Delta;
    Route "route" p::Route;
    Combine "combine" p::Combine;
}

/// The PTX for a device of this compute capability (75 for 7.5), as text.
pub fn ptx(capability: i32) -> Result<String> {
    let (_, packed) = PTX.iter().rev().find(|(c, _)| *c <= capability).context("it is older than all kernels")?;
    let mut text = String::new();
    flate2::read::GzDecoder::new(*packed).read_to_string(&mut text)?;
    Ok(text)
}

/// All kernels, compiled for a device.
pub struct Kernels(Vec<sys::CUfunction>);

impl Kernels {
    /// Compiles, or has the driver find what it compiled before. A context is current, and stays until the process ends, as does the module.
    pub fn load(capability: i32) -> Result<Kernels> {
        let text = CString::new(ptx(capability)?)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: a text that ends with a zero; no options.
        checked(unsafe {
            sys::cuModuleLoadDataEx(&mut module, text.as_ptr().cast(), 0, std::ptr::null_mut(), std::ptr::null_mut())
        })?;
        let function = |kernel: &Kernel| {
            let name = CString::new(kernel.name())?;
            let mut function = std::ptr::null_mut();
            // SAFETY: the module was just loaded; the name ends with a zero.
            checked(unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) })
                .with_context(|| format!("the kernel {}", kernel.name()))?;
            Ok(function)
        };
        Ok(Kernels(Kernel::ALL.iter().map(function).collect::<Result<_>>()?))
    }

    pub fn function(&self, kernel: Kernel) -> sys::CUfunction {
        self.0[kernel as usize]
    }
}
