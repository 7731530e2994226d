//! The kernels: PTX that is embedded, made by `kernels/make.py` from the `.cu` files beside it, and compiled by the driver for the device it finds. The driver
//! keeps what it compiles, so that only the first start pays for it: half a minute, but where the machine code is embedded too.

use std::ffi::CString;
use std::io::Read;

use anyhow::{Context, Result};
use cudarc::driver::{DriverError, sys};

use crate::device::sys::checked;
use crate::parameters as p;

/// By compute capability, ascending.
pub const PTX: [(i32, &[u8]); 3] = [
    (75, include_bytes!("../kernels/ptx/compute_75.ptx.gz")),
    (80, include_bytes!("../kernels/ptx/compute_80.ptx.gz")),
    (90, include_bytes!("../kernels/ptx/compute_90.ptx.gz")),
];

/// Machine code, for compute capabilities of the same first number, from this one on.
const CUBIN: (i32, &[u8]) = (90, include_bytes!("../kernels/ptx/sm_90.cubin.gz"));

/// Bytes that lie in the program for GPUs: who computes elsewhere never reads them.
pub fn embedded_bytes() -> u64 {
    PTX.iter().chain([&CUBIN]).map(|(_, code)| code.len() as u64).sum()
}

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
    LanesF32One "lanes_f32_1" p::Products;
    LanesF32Many "lanes_f32_8" p::Products;
    LanesF16One "lanes_f16_1" p::Products;
    LanesF16Many "lanes_f16_8" p::Products;
    LanesBf16One "lanes_bf16_1" p::Products;
    LanesBf16Many "lanes_bf16_8" p::Products;
    LanesAffineOne "lanes_affine_1" p::Products;
    LanesAffineMany "lanes_affine_8" p::Products;
    LanesF32Squares "lanes_f32_32" p::Products;
    LanesF16Squares "lanes_f16_32" p::Products;
    LanesBf16Squares "lanes_bf16_32" p::Products;
    LanesAffineSquares "lanes_affine_32" p::Products;
    PairsBf16One "pairs_bf16_1" p::Products;
    PairsBf16Many "pairs_bf16_8" p::Products;
    PairsAffineOne "pairs_affine_1" p::Products;
    PairsAffineMany "pairs_affine_8" p::Products;
    Integers2One "integers_2_1" p::Products;
    Integers2OneWide "integers_2_1_wide" p::Products;
    Integers2Many "integers_2_8" p::Products;
    Integers3One "integers_3_1" p::Products;
    Integers3OneWide "integers_3_1_wide" p::Products;
    Integers3Many "integers_3_8" p::Products;
    Integers4One "integers_4_1" p::Products;
    Integers4OneWide "integers_4_1_wide" p::Products;
    Integers4Many "integers_4_8" p::Products;
    Integers5One "integers_5_1" p::Products;
    Integers5OneWide "integers_5_1_wide" p::Products;
    Integers5Many "integers_5_8" p::Products;
    Integers6One "integers_6_1" p::Products;
    Integers6OneWide "integers_6_1_wide" p::Products;
    Integers6Many "integers_6_8" p::Products;
    Integers8One "integers_8_1" p::Products;
    Integers8OneWide "integers_8_1_wide" p::Products;
    Integers8Many "integers_8_8" p::Products;
    Rows2For1 "rows_2_1" p::Rows;
    Rows2For2 "rows_2_2" p::Rows;
    Rows2For4 "rows_2_4" p::Rows;
    Rows2For8 "rows_2_8" p::Rows;
    Rows3For1 "rows_3_1" p::Rows;
    Rows3For2 "rows_3_2" p::Rows;
    Rows3For4 "rows_3_4" p::Rows;
    Rows3For8 "rows_3_8" p::Rows;
    Rows4For1 "rows_4_1" p::Rows;
    Rows4For2 "rows_4_2" p::Rows;
    Rows4For4 "rows_4_4" p::Rows;
    Rows4For8 "rows_4_8" p::Rows;
    Rows5For1 "rows_5_1" p::Rows;
    Rows5For2 "rows_5_2" p::Rows;
    Rows5For4 "rows_5_4" p::Rows;
    Rows5For8 "rows_5_8" p::Rows;
    Rows6For1 "rows_6_1" p::Rows;
    Rows6For2 "rows_6_2" p::Rows;
    Rows6For4 "rows_6_4" p::Rows;
    Rows6For8 "rows_6_8" p::Rows;
    Rows8For1 "rows_8_1" p::Rows;
    Rows8For2 "rows_8_2" p::Rows;
    Rows8For4 "rows_8_4" p::Rows;
    Rows8For8 "rows_8_8" p::Rows;
    One2 "one_2" p::One;
    One2Wide "one_2_wide" p::One;
    One2Deep "one_2_deep" p::One;
    One3 "one_3" p::One;
    One3Wide "one_3_wide" p::One;
    One3Deep "one_3_deep" p::One;
    One4 "one_4" p::One;
    One4Wide "one_4_wide" p::One;
    One4Deep "one_4_deep" p::One;
    One5 "one_5" p::One;
    One5Wide "one_5_wide" p::One;
    One5Deep "one_5_deep" p::One;
    One6 "one_6" p::One;
    One6Wide "one_6_wide" p::One;
    One6Deep "one_6_deep" p::One;
    One8 "one_8" p::One;
    One8Wide "one_8_wide" p::One;
    One8Deep "one_8_deep" p::One;
    OneBf16 "one_bf16" p::One;
    Tiles2Of1 "tiles_2_1" p::Products;
    TilesFew2Of1 "tiles_few_2_1" p::Products;
    TilesLow2Of1 "tiles_low_2_1" p::Products;
    Tiles2Of2 "tiles_2_2" p::Products;
    TilesFew2Of2 "tiles_few_2_2" p::Products;
    TilesLow2Of2 "tiles_low_2_2" p::Products;
    Tiles2Of4 "tiles_2_4" p::Products;
    TilesFew2Of4 "tiles_few_2_4" p::Products;
    TilesLow2Of4 "tiles_low_2_4" p::Products;
    Tiles3Of1 "tiles_3_1" p::Products;
    TilesFew3Of1 "tiles_few_3_1" p::Products;
    TilesLow3Of1 "tiles_low_3_1" p::Products;
    Tiles3Of2 "tiles_3_2" p::Products;
    TilesFew3Of2 "tiles_few_3_2" p::Products;
    TilesLow3Of2 "tiles_low_3_2" p::Products;
    Tiles3Of4 "tiles_3_4" p::Products;
    TilesFew3Of4 "tiles_few_3_4" p::Products;
    TilesLow3Of4 "tiles_low_3_4" p::Products;
    Tiles4Of1 "tiles_4_1" p::Products;
    TilesFew4Of1 "tiles_few_4_1" p::Products;
    TilesLow4Of1 "tiles_low_4_1" p::Products;
    Tiles4Of2 "tiles_4_2" p::Products;
    TilesFew4Of2 "tiles_few_4_2" p::Products;
    TilesLow4Of2 "tiles_low_4_2" p::Products;
    Tiles4Of4 "tiles_4_4" p::Products;
    TilesFew4Of4 "tiles_few_4_4" p::Products;
    TilesLow4Of4 "tiles_low_4_4" p::Products;
    Tiles5Of1 "tiles_5_1" p::Products;
    TilesFew5Of1 "tiles_few_5_1" p::Products;
    TilesLow5Of1 "tiles_low_5_1" p::Products;
    Tiles5Of2 "tiles_5_2" p::Products;
    TilesFew5Of2 "tiles_few_5_2" p::Products;
    TilesLow5Of2 "tiles_low_5_2" p::Products;
    Tiles5Of4 "tiles_5_4" p::Products;
    TilesFew5Of4 "tiles_few_5_4" p::Products;
    TilesLow5Of4 "tiles_low_5_4" p::Products;
    Tiles6Of1 "tiles_6_1" p::Products;
    TilesFew6Of1 "tiles_few_6_1" p::Products;
    TilesLow6Of1 "tiles_low_6_1" p::Products;
    Tiles6Of2 "tiles_6_2" p::Products;
    TilesFew6Of2 "tiles_few_6_2" p::Products;
    TilesLow6Of2 "tiles_low_6_2" p::Products;
    Tiles6Of4 "tiles_6_4" p::Products;
    TilesFew6Of4 "tiles_few_6_4" p::Products;
    TilesLow6Of4 "tiles_low_6_4" p::Products;
    Tiles8Of1 "tiles_8_1" p::Products;
    TilesFew8Of1 "tiles_few_8_1" p::Products;
    TilesLow8Of1 "tiles_low_8_1" p::Products;
    Tiles8Of2 "tiles_8_2" p::Products;
    TilesFew8Of2 "tiles_few_8_2" p::Products;
    TilesLow8Of2 "tiles_low_8_2" p::Products;
    Tiles8Of4 "tiles_8_4" p::Products;
    TilesFew8Of4 "tiles_few_8_4" p::Products;
    TilesLow8Of4 "tiles_low_8_4" p::Products;
    Few2 "few_2" p::Few;
    FewGated2 "few_gated_2" p::Few;
    Few3 "few_3" p::Few;
    FewGated3 "few_gated_3" p::Few;
    Few4 "few_4" p::Few;
    FewGated4 "few_gated_4" p::Few;
    Few5 "few_5" p::Few;
    FewGated5 "few_gated_5" p::Few;
    Few6 "few_6" p::Few;
    FewGated6 "few_gated_6" p::Few;
    Few8 "few_8" p::Few;
    FewGated8 "few_gated_8" p::Few;
    Slabs4 "slabs_4" p::Products;
    Slabs8 "slabs_8" p::Products;
    Thin4For8 "thin_4_8" p::Products;
    Thin4For16 "thin_4_16" p::Products;
    Thin8For8 "thin_8_8" p::Products;
    Thin8For16 "thin_8_16" p::Products;
    RowsBf16For1 "rows_bf16_1" p::Rows;
    RowsBf16For2 "rows_bf16_2" p::Rows;
    RowsBf16For4 "rows_bf16_4" p::Rows;
    RowsBf16For8 "rows_bf16_8" p::Rows;
    StoreKv "store_kv" p::Attention;
    Attend1 "attend_1" p::Attention;
    Attend2 "attend_2" p::Attention;
    Attend4 "attend_4" p::Attention;
    AttendPartition1 "attend_partition_1" p::Attention;
    AttendPartition2 "attend_partition_2" p::Attention;
    AttendPartition4 "attend_partition_4" p::Attention;
    AttendDeep2 "attend_deep_2" p::Attention;
    AttendDeep4 "attend_deep_4" p::Attention;
    AttendLast1 "attend_last_1" p::Attention;
    AttendLast2 "attend_last_2" p::Attention;
    AttendLast4 "attend_last_4" p::Attention;
    AttendTile "attend_tile" p::Attention;
    AttendTile128 "attend_tile_128" p::Attention;
    AttendTile256 "attend_tile_256" p::Attention;
    AttendTileLong "attend_tile_long" p::Attention;
    AttendTileLow "attend_tile_low" p::Attention;
    Join "join" p::Attention;
    Convolve "convolve" p::Delta;
    Slide "slide" p::Delta;
    Gates "gates" p::Delta;
    Recur "recur" p::Delta;
    Recur64 "recur_64" p::Delta;
    Recur128 "recur_128" p::Delta;
    NormGated "norm_gated" p::Delta;
    RecurOne64 "recur_one_64" p::Delta;
    RecurOne128 "recur_one_128" p::Delta;
    NormGatedOne "norm_gated_one" p::Delta;
    Route "route" p::Route;
    CountPairs "count_pairs" p::Pairs;
    GroupPairs "group_pairs" p::Pairs;
    RouteFew "route_few" p::RouteFew;
    ChooseFew "choose_few" p::ChooseFew;
    Combine "combine" p::Combine;
    RouteOne "route_one" p::RouteOne;
    GateUp2One "gate_up_one_2" p::ExpertsOne;
    GateUp2Asking "gate_up_asking_2" p::ExpertsOne;
    Down2One "down_one_2" p::ExpertsOne;
    GateUp3One "gate_up_one_3" p::ExpertsOne;
    GateUp3Asking "gate_up_asking_3" p::ExpertsOne;
    Down3One "down_one_3" p::ExpertsOne;
    GateUp4One "gate_up_one_4" p::ExpertsOne;
    GateUp4Asking "gate_up_asking_4" p::ExpertsOne;
    Down4One "down_one_4" p::ExpertsOne;
    GateUp5One "gate_up_one_5" p::ExpertsOne;
    GateUp5Asking "gate_up_asking_5" p::ExpertsOne;
    Down5One "down_one_5" p::ExpertsOne;
    GateUp6One "gate_up_one_6" p::ExpertsOne;
    GateUp6Asking "gate_up_asking_6" p::ExpertsOne;
    Down6One "down_one_6" p::ExpertsOne;
    GateUp8One "gate_up_one_8" p::ExpertsOne;
    GateUp8Asking "gate_up_asking_8" p::ExpertsOne;
    Down8One "down_one_8" p::ExpertsOne;
    AttendIntegers64 "attend_integers_64" p::Attention;
    AttendIntegers128 "attend_integers_128" p::Attention;
    AttendIntegers256 "attend_integers_256" p::Attention;
    Tops "tops" p::Tops;
    Best "best" p::Best;
    Sums "sums" p::Sums;
}

/// The PTX for a device of this compute capability (75 for 7.5), as text.
pub fn ptx(capability: i32) -> Result<String> {
    let (_, packed) = PTX.iter().rev().find(|(c, _)| *c <= capability).context("it is older than all kernels")?;
    let mut text = String::new();
    flate2::read::GzDecoder::new(*packed).read_to_string(&mut text)?;
    Ok(text)
}

/// The machine code for a device of this compute capability, where it is embedded.
fn cubin(capability: i32) -> Result<Option<Vec<u8>>> {
    let (made_for, packed) = CUBIN;
    if capability / 10 != made_for / 10 || capability < made_for {
        return Ok(None);
    }
    let mut code = Vec::new();
    flate2::read::GzDecoder::new(packed).read_to_end(&mut code)?;
    Ok(Some(code))
}

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
    /// Few tokens on integer tensor cores, by blocks of few rows.
    Thin,
    /// Some tens of them, by blocks that are an even share.
    Slabs,
    /// What joins partitions leaves its output encoded.
    Joined,
}

/// Whether this way is taken: all are, but where `SLUICE_CUDA_WAYS=Rows,Last` chooses, in builds for trying.
pub fn chosen(way: Variant) -> bool {
    match std::env::var("SLUICE_CUDA_WAYS").ok().filter(|_| cfg!(feature = "tuning")) {
        Some(ways) => ways.split(',').any(|w| w == format!("{way:?}")),
        None => true,
    }
}

/// Bytes that a kernel may have of shared memory whose size is known when it is compiled, at most, where it takes more than the usual of the other.
pub const STATIC_SHARED: usize = 12 << 10;

impl Kernel {
    /// [`STATIC_SHARED`] of this kernel: less where it has to leave more of the other.
    pub fn static_shared(self) -> usize {
        use Kernel::*;
        match self {
            AttendTile | AttendTile128 | AttendTile256 | AttendTileLong | AttendTileLow => 5 << 10,
            _ => STATIC_SHARED,
        }
    }

    /// Whether it may be launched with all of the shared memory that a block can have, less what [`Kernel::static_shared`] says.
    fn wants_much_shared(self) -> bool {
        let kinds = [
            "attend_integers",
            "attend_last",
            "attend_tile",
            "down_one",
            "few_",
            "gate_up_",
            "one_",
            "route_",
            "rows_",
            "slabs_",
            "thin_",
            "tiles_",
        ];
        kinds.iter().any(|kind| self.name().starts_with(kind))
    }
}

/// Kernels and stamps of each in a module that has them (`STAMP` of `kernels/numerics.cuh`).
#[cfg(feature = "tuning")]
type Stamps = [[[u64; 2]; 8]; 16];

/// All kernels, compiled for a device.
pub struct Kernels {
    functions: Vec<sys::CUfunction>,
    #[cfg(feature = "tuning")]
    module: sys::CUmodule,
    /// Whether a kernel may begin before the one before it has ended: all of them wait themselves for what they need.
    pub overlap: bool,
}

impl Kernels {
    /// Compiles, or has the driver find what it compiled before. A context is current, and stays until the process ends, as does the module.
    pub fn load(capability: i32, shared: usize) -> Result<Kernels> {
        let load = |mut code: Vec<u8>| {
            code.push(0);
            let (mut module, none) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: machine code, which knows its length, or a text that ends with a zero; no options.
            checked(unsafe {
                sys::cuModuleLoadDataEx(&mut module, code.as_ptr().cast(), 0, none, std::ptr::null_mut())
            })?;
            anyhow::Ok(module)
        };
        // A driver that does not take machine code can still take the text.
        let embedded = match cubin(capability)?.map(load) {
            Some(Ok(module)) => module,
            _ => load(ptx(capability)?.into_bytes())?,
        };
        let tried = std::env::var_os("SLUICE_CUDA_PTX").filter(|_| cfg!(feature = "tuning"));
        let tried = tried.map(|path| load(std::fs::read(path)?)).transpose()?;
        let function = |kernel: &Kernel| {
            let name = CString::new(kernel.name())?;
            let mut function = std::ptr::null_mut();
            // SAFETY: the modules were just loaded; the name ends with a zero.
            let mut find = |module| checked(unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) });
            if tried.is_none_or(|module| find(module).is_err()) {
                find(embedded).with_context(|| format!("the kernel {}", kernel.name()))?;
            }
            if kernel.wants_much_shared() {
                let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: the function was just found; the device has said that a block may have as much.
                checked(unsafe {
                    sys::cuFuncSetAttribute(function, attribute, (shared - kernel.static_shared()) as i32)
                })
                .with_context(|| format!("shared memory of the kernel {}", kernel.name()))?;
            }
            Ok(function)
        };
        let functions = Kernel::ALL.iter().map(function).collect::<Result<_>>()?;
        Ok(Kernels {
            functions,
            #[cfg(feature = "tuning")]
            module: tried.unwrap_or(embedded),
            overlap: capability >= 90 && chosen(Variant::Overlap),
        })
    }

    /// Brings all kernels to the device, which else come there when they are first launched.
    pub fn load_all(&self) -> Result<(), DriverError> {
        // SAFETY: functions of a module that is loaded.
        self.functions.iter().try_for_each(|function| checked(unsafe { sys::cuFuncLoad(*function) }))
    }

    /// Says where the time of kernels went, where the module keeps that, and begins anew. The device is at rest.
    #[cfg(feature = "tuning")]
    pub fn print_stamps(&self) {
        let (mut at, mut bytes, mut stamps): (_, _, Stamps) = (0, 0, Default::default());
        // SAFETY: the module is loaded; what is copied is as large as the array that it has.
        let found = unsafe {
            checked(sys::cuModuleGetGlobal_v2(&mut at, &mut bytes, self.module, c"stamps".as_ptr())).is_ok()
                && bytes == size_of::<Stamps>()
                && checked(sys::cuMemcpyDtoH_v2(stamps.as_mut_ptr().cast(), at, bytes)).is_ok()
                && checked(sys::cuMemsetD8_v2(at, 0, bytes)).is_ok()
        };
        for (kernel, stamps) in stamps.iter().enumerate().filter(|(_, s)| found && s[0][1] > 0) {
            let means = stamps.iter().take_while(|[_, n]| *n > 0).map(|[sum, n]| format!("{} ({n})", sum / n));
            eprintln!("stamps {kernel}: {}", means.collect::<Vec<_>>().join(", "));
        }
    }

    pub fn function(&self, kernel: Kernel) -> sys::CUfunction {
        self.functions[kernel as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(code: &[u8], at: usize, bytes: usize) -> usize {
        code[at..at + bytes].iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte))
    }

    /// Names and sizes of the sections of machine code, an ELF file of 64 bits.
    fn sections(code: &[u8]) -> Vec<(String, usize)> {
        let [from, size, count, names] =
            [(0x28, 8), (0x3a, 2), (0x3c, 2), (0x3e, 2)].map(|(at, n)| number(code, at, n));
        let field = |section: usize, at, bytes| number(code, from + section * size + at, bytes);
        let section = |i: usize| {
            let name = field(names, 0x18, 8) + field(i, 0, 4);
            let end = code[name..].iter().position(|byte| *byte == 0).unwrap();
            (String::from_utf8_lossy(&code[name..name + end]).into_owned(), field(i, 0x20, 8))
        };
        (0..count).map(section).collect()
    }

    #[test]
    fn memory_of_known_size_leaves_the_rest_to_whoever_asks_for_much() {
        let sections = sections(&cubin(90).unwrap().unwrap());
        let (mut found, mut most) = (0, 0);
        for kernel in Kernel::ALL.iter().filter(|kernel| kernel.wants_much_shared()) {
            let name = format!(".nv.shared.{}", kernel.name());
            if let Some((_, bytes)) = sections.iter().find(|(of, _)| *of == name) {
                // The section begins with what the driver keeps, which is not of the memory that a block can have.
                let bytes = bytes - 1024;
                assert!(bytes <= kernel.static_shared(), "{}: {bytes} bytes", kernel.name());
                (found, most) = (found + 1, most.max(bytes));
            }
        }
        assert!(found > 10 && most > 4096, "{found} kernels with up to {most} bytes: sections have other names");
    }
}
