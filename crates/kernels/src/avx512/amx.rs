//! AMX's tiles: sums of products of bytes, 32 by 32, as deep as a register (64) for attention on integers and integers of 11 bits, and as a group of int8 activations (32).

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

use crate::input::GROUP;

/// Rows of a tile register, and its columns of 32 bits.
pub const SIDE: usize = 16;
/// Bytes of a row of a tile register.
pub const DEEP: usize = 64;

/// Whether this machine has what the code here needs, and the kernel lets this process use it, which it is asked for once.
pub fn is_supported() -> bool {
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    *SUPPORTED.get_or_init(|| has_tiles() && is_permitted())
}

fn has_tiles() -> bool {
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    // The leaf is there: AVX-512 was found in it.
    let features = __cpuid_count(7, 0).edx;
    features & AMX_TILE != 0 && features & AMX_INT8 != 0
}

#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: i32 = 0x1023;
    const XFEATURE_XTILEDATA: i32 = 18;
    // SAFETY: it takes two numbers and touches no memory; a kernel that does not know it answers with an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// How the eight tile registers are cut.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row.
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// Registers 0 to 3: sums. 4 and 5: 16 rows of `deep` bytes. 6 and 7: bytes of 16 columns, four to a row of the register.
const fn shapes(deep: u8) -> Shapes {
    let (bytes, rows) = (deep as u16, deep / 4);
    Shapes {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        bytes: [64, 64, 64, 64, bytes, bytes, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, rows, rows, 0, 0, 0, 0, 0, 0, 0, 0],
    }
}

static WHOLE: Shapes = shapes(DEEP as u8);
static OF_A_GROUP: Shapes = shapes(GROUP as u8);
static OF_HALF_A_GROUP: Shapes = shapes(GROUP as u8 / 2);

/// Tile registers that are cut to shape; released when it goes.
pub struct Tiles;

impl Tiles {
    /// Shaped for [`Tiles::products`], and for [`Tiles::slices`] of 64 columns.
    ///
    /// # Safety
    /// [`is_supported`].
    pub unsafe fn whole() -> Tiles {
        // SAFETY: the caller's.
        unsafe { Tiles::cut(&WHOLE) }
    }

    /// Tiles with the shape that [`Tiles::group`] takes, and [`Tiles::slices`] of 32 columns.
    ///
    /// # Safety
    /// [`is_supported`].
    pub unsafe fn of_a_group() -> Tiles {
        // SAFETY: the caller's.
        unsafe { Tiles::cut(&OF_A_GROUP) }
    }

    /// Tiles with the shape that [`Tiles::slices`] of 16 columns take.
    ///
    /// # Safety
    /// [`is_supported`].
    pub unsafe fn of_half_a_group() -> Tiles {
        // SAFETY: the caller's.
        unsafe { Tiles::cut(&OF_HALF_A_GROUP) }
    }

    unsafe fn cut(shapes: &'static Shapes) -> Tiles {
        // SAFETY: the shapes are 64 bytes of palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const *shapes, options(nostack, preserves_flags)) };
        Tiles
    }

    /// `to[r][c] = sum over i of a[r][i] * b[i][c]`, of 16 rows, 32 columns and a group's depth. `a`: rows of signed bytes, `a_stride` apart; `b`: four unsigned bytes of each
    /// of 32 columns together; `to`: [16, 32].
    ///
    /// # Safety
    /// All of it can be read and written, and the shape is [`Tiles::of_a_group`].
    #[inline(always)]
    pub unsafe fn group((a, a_stride): (*const i8, usize), b: *const u8, to: *mut i32) {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tileloadd tmm6, [{b} + {stride}*1]",
                "tileloadd tmm4, [{a} + {a_stride}*1]",
                "tdpbsud tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {stride}*1 + 64]",
                "tdpbsud tmm1, tmm4, tmm7",
                "tilestored [{to} + {stride}*1], tmm0",
                "tilestored [{to} + {stride}*1 + 64], tmm1",
                a = in(reg) a,
                a_stride = in(reg) a_stride,
                b = in(reg) b,
                to = in(reg) to,
                stride = in(reg) 4 * 2 * SIDE,
                options(nostack, preserves_flags)
            );
        }
    }

    /// `to[0][r][c] = sum over i of low[r][i] * b[i][c]`, and `to[1]` the same with `high`, of 16 rows, 32 columns and the depth of the shape. `low`: unsigned bytes, `high`:
    /// signed ones, rows 64 bytes apart; `b`: four bytes of each of 32 columns together, signed or not; `to`: [2, 16, 32].
    ///
    /// # Safety
    /// All of it can be read and written.
    #[inline(always)]
    pub unsafe fn slices<const SIGNED: bool>(&self, (low, high): (*const u8, *const i8), b: *const u8, to: *mut i32) {
        macro_rules! multiply {
            ($low:literal, $high:literal) => {
                asm!(
                        "tileloadd tmm6, [{b} + {stride}*1]",
                        "tileloadd tmm4, [{low} + {deep}*1]",
                        "tilezero tmm0",
                        concat!($low, " tmm0, tmm4, tmm6"),
                        "tileloadd tmm5, [{high} + {deep}*1]",
                        "tilezero tmm2",
                        concat!($high, " tmm2, tmm5, tmm6"),
                        "tileloadd tmm7, [{b} + {stride}*1 + 64]",
                        "tilezero tmm1",
                        concat!($low, " tmm1, tmm4, tmm7"),
                        "tilezero tmm3",
                        concat!($high, " tmm3, tmm5, tmm7"),
                        "tilestored [{to} + {stride}*1], tmm0",
                        "tilestored [{to_high} + {stride}*1], tmm2",
                        "tilestored [{to} + {stride}*1 + 64], tmm1",
                        "tilestored [{to_high} + {stride}*1 + 64], tmm3",
                        b = in(reg) b,
                        stride = in(reg) 4 * 2 * SIDE,
                        low = in(reg) low,
                        high = in(reg) high,
                        deep = in(reg) DEEP,
                        to = in(reg) to,
                        to_high = in(reg) to.wrapping_add(2 * SIDE * SIDE),
                        options(nostack, preserves_flags)
                )
            };
        }
        // SAFETY: the caller's, and the tiles are shaped.
        unsafe { if SIGNED { multiply!("tdpbusd", "tdpbssd") } else { multiply!("tdpbuud", "tdpbsud") } }
    }

    /// `to[r][c] = sum over i of a[r][i] * b[i][c]`, of 32 rows and 32 columns and `deep` registers' depth, and over all pairs of `a` and `b`. `a`: rows of bytes, `a_stride`
    /// apart, signed or not; `b`: four bytes of each of 32 columns together, of the other kind; `to`: rows of i32, `to_stride` bytes apart.
    ///
    /// # Safety
    /// All of it can be read and written.
    #[inline(always)]
    pub unsafe fn products<const SIGNED: bool>(
        &self,
        pairs: &[(*const u8, *const u8)],
        a_stride: usize,
        deep: usize,
        (to, to_stride): (*mut i32, usize),
    ) {
        const B_STRIDE: usize = 4 * 2 * SIDE;
        // SAFETY: the caller's, and the tiles are shaped.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem, preserves_flags)
            );
            for &(a, b) in pairs {
                for i in 0..deep {
                    let (a, b) = (a.add(DEEP * i), b.add(B_STRIDE * DEEP / 4 * i));
                    let a_2 = a.wrapping_add(SIDE * a_stride);
                    // The sign is part of the instruction's name.
                    macro_rules! multiply {
                        ($instruction:literal) => {
                            asm!(
                                "tileloadd tmm6, [{b} + {b_stride}*1]",
                                "tileloadd tmm4, [{a} + {a_stride}*1]",
                                concat!($instruction, " tmm0, tmm4, tmm6"),
                                "tileloadd tmm7, [{b} + {b_stride}*1 + 64]",
                                concat!($instruction, " tmm1, tmm4, tmm7"),
                                "tileloadd tmm5, [{a_2} + {a_stride}*1]",
                                concat!($instruction, " tmm2, tmm5, tmm6"),
                                concat!($instruction, " tmm3, tmm5, tmm7"),
                                a = in(reg) a,
                                a_2 = in(reg) a_2,
                                a_stride = in(reg) a_stride,
                                b = in(reg) b,
                                b_stride = in(reg) B_STRIDE,
                                options(nostack, readonly, preserves_flags)
                            )
                        };
                    }
                    if SIGNED {
                        multiply!("tdpbsud");
                    } else {
                        multiply!("tdpbusd");
                    }
                }
            }
            asm!(
                "tilestored [{to} + {stride}*1], tmm0",
                "tilestored [{to} + {stride}*1 + 64], tmm1",
                "tilestored [{to_2} + {stride}*1], tmm2",
                "tilestored [{to_2} + {stride}*1 + 64], tmm3",
                to = in(reg) to,
                to_2 = in(reg) to.wrapping_byte_add(SIDE * to_stride),
                stride = in(reg) to_stride,
                options(nostack, preserves_flags)
            );
        }
    }
}

/// At least `macs` multiply-adds of bytes whose factors and sums stay in tile registers, in six independent chains, as many as two factors leave
/// registers for; returns how many there were.
///
/// # Safety
/// [`is_supported`].
pub unsafe fn multiply_add(macs: u64) -> u64 {
    const EACH: u64 = 6 * (SIDE * SIDE * DEEP) as u64;
    let rounds = macs.div_ceil(EACH);
    let factors = [[3u8; SIDE * DEEP], [1; SIDE * DEEP]];
    // SAFETY: the caller vouches for the machine.
    let tiles = unsafe { Tiles::whole() };
    // SAFETY: the tiles are shaped, and two of them are read from as many bytes as they hold.
    unsafe {
        asm!(
            "tileloadd tmm6, [{a} + {stride}*1]",
            "tileloadd tmm7, [{b} + {stride}*1]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tilezero tmm4",
            "tilezero tmm5",
            a = in(reg) &raw const factors[0],
            b = in(reg) &raw const factors[1],
            stride = in(reg) DEEP,
            options(nostack, readonly, preserves_flags)
        );
        for _ in 0..rounds {
            asm!(
                "tdpbusd tmm0, tmm6, tmm7",
                "tdpbusd tmm1, tmm6, tmm7",
                "tdpbusd tmm2, tmm6, tmm7",
                "tdpbusd tmm3, tmm6, tmm7",
                "tdpbusd tmm4, tmm6, tmm7",
                "tdpbusd tmm5, tmm6, tmm7",
                options(nostack, nomem, preserves_flags)
            );
        }
    }
    drop(tiles);
    rounds * EACH
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: whoever made it has AMX.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}
