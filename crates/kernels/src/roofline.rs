//! What a machine can do at best. `sluice bench` puts what the
//! kernels reach beside it, measured in the same run; no kernel uses this.

use crate::Isa;
use crate::dispatch::simd;
use crate::instructions::peak::Peak;

pub use crate::instructions::peak::Arithmetic;

#[inline(always)]
unsafe fn read_peak<V: Peak>(bytes: &[u8]) -> u64 {
    // SAFETY: `simd!` calls this where the instruction set was found.
    unsafe { V::read(bytes) }
}

#[inline(always)]
unsafe fn multiply_add_peak<V: Peak>(arithmetic: Arithmetic, macs: u64) -> u64 {
    // SAFETY: `simd!` calls this where the instruction set was found.
    unsafe { V::multiply_add(arithmetic, macs) }
}

simd! {
    /// Reads every byte once (but for a tail of less than 4 KiB) and returns something that depends on each of them. The time that
    /// this takes on a buffer far larger than the caches is the bandwidth that one thread gets.
    pub fn read(bytes: &[u8]) -> u64 = read_peak
}

simd! {
    fn in_vectors(arithmetic: Arithmetic, macs: u64) -> u64 = multiply_add_peak
}

/// At least `macs` multiply-adds whose factors and sums stay in registers, in as many independent chains as the machine can
/// overlap; returns how many there were.
pub fn multiply_add(isa: Isa, arithmetic: Arithmetic, macs: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if isa.level() == crate::isa::Level::AvxVnni && arithmetic == Arithmetic::Int8 {
        // SAFETY: an `Isa` of this level is made only where AVX-VNNI was found.
        return unsafe { crate::avx2::peak::multiply_add_vnni(macs) };
    }
    in_vectors(isa, arithmetic, macs)
}

/// As [`multiply_add`] for [`Arithmetic::Int8`], in AMX's tile registers; `None` where `isa` has none.
pub fn multiply_add_in_tiles(isa: Isa, macs: u64) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    if isa.level() == crate::isa::Level::Amx {
        // SAFETY: an `Isa` of this level is made only where the tiles were found and permitted.
        return Some(unsafe { crate::avx512::amx::multiply_add(macs) });
    }
    let _ = (isa, macs);
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read() {
        for isa in Isa::supported() {
            let mut bytes = vec![0u8; 4 << 12];
            let nothing = read(isa, &bytes);
            for at in (0..bytes.len()).step_by(97) {
                bytes[at] = 0x11;
                assert_ne!(read(isa, &bytes), nothing, "{isa}: byte {at}");
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn as_many_multiply_adds_as_were_asked_for() {
        for isa in Isa::supported() {
            for arithmetic in Arithmetic::ALL {
                let done = multiply_add(isa, arithmetic, 1000);
                assert!((1000..2000).contains(&done), "{isa} {arithmetic:?}: {done}");
            }
            let in_tiles = multiply_add_in_tiles(isa, 1_000_000);
            assert_eq!(in_tiles.is_some(), isa.to_string() == "amx");
            assert!(in_tiles.is_none_or(|done| (1_000_000..1_100_000).contains(&done)), "{isa}: {in_tiles:?}");
        }
    }
}
