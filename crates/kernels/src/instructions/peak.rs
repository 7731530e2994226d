//! The peak of a machine: loops that only read memory, or only multiply and add in registers.

/// Multiply-adds of a dot product, by the types of its factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    F32,
    /// Bf16Dot of bf16, summed in f32. Where there is no such instruction, [`Arithmetic::F32`].
    Bf16,
    /// Fours (pairs in AVX2) of 8-bit integers, summed in i32.
    Int8,
}

impl Arithmetic {
    /// All kinds.
    pub const ALL: [Arithmetic; 3] = [Arithmetic::F32, Arithmetic::Bf16, Arithmetic::Int8];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Arithmetic::F32 => "f32",
            Arithmetic::Bf16 => "bf16",
            Arithmetic::Int8 => "int8",
        }
    }
}

/// # Safety
/// As for [`Lanes`](super::f32_dot::Lanes).
pub(crate) trait Peak {
    /// Reads every byte once (but for a tail of less than 4 KiB) and returns something that depends on each of them.
    unsafe fn read(bytes: &[u8]) -> u64;
    /// At least `macs` multiply-adds in registers, in as many independent chains as the machine can overlap; returns how many there were.
    unsafe fn multiply_add(arithmetic: Arithmetic, macs: u64) -> u64;
}

/// Streams that are read at the same time. They are on different pages, so that more of the hardware prefetchers' trackers work at once.
pub(crate) const STREAMS: usize = 4;

/// Independent sums: more than latency times throughput of any of these instructions, fewer than registers.
pub(crate) const CHAINS: usize = 12;

/// Makes a loop of `$lanes` multiply-adds per instruction in `CHAINS` chains.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! chains {
    ($(#[$meta:meta])* $name:ident, $features:literal, $lanes:expr, $zero:expr, $w:expr, $x:expr, |$acc:ident, $a:ident, $b:ident| $mac:expr) => {
        /// # Safety
        /// The machine has the features.
        #[target_feature(enable = $features)]
        unsafe fn $name(macs: u64) -> u64 {
            let rounds = macs.div_ceil((CHAINS * $lanes) as u64);
            let ($a, $b) = (std::hint::black_box($w), std::hint::black_box($x));
            let mut sums = [$zero; CHAINS];
            for _ in 0..rounds {
                for $acc in &mut sums {
                    *$acc = $mac;
                }
            }
            std::hint::black_box(sums);
            rounds * (CHAINS * $lanes) as u64
        }
    };
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use chains;
