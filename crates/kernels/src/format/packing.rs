//! How integers are packed into bytes: the packings that kernels are compiled for.

/// How integers are packed into bytes. A type, so that kernels are compiled for each.
pub(crate) trait Packing: Copy {
    /// Bits of an integer. A row is one little-endian bit stream.
    const BITS: usize;
    /// Bytes hold signed integers. Kernels take `q + 128`, which are the same bytes with the highest bit flipped.
    const SIGNED: bool = false;
    /// The integer that stands for zero, where that is the same in every group: the bias is `-ZERO * s`. Otherwise biases are a plane.
    const ZERO: Option<f32> = None;
}

/// Unsigned integers of a width.
#[derive(Clone, Copy)]
pub(crate) struct Unsigned<const BITS: usize>;

impl<const BITS: usize> Packing for Unsigned<BITS> {
    const BITS: usize = BITS;
}

pub(crate) type U2 = Unsigned<2>;
pub(crate) type U3 = Unsigned<3>;
pub(crate) type U4 = Unsigned<4>;
pub(crate) type U5 = Unsigned<5>;
pub(crate) type U6 = Unsigned<6>;
pub(crate) type U8 = Unsigned<8>;

/// Signed bytes around zero.
#[derive(Clone, Copy)]
pub(crate) struct I8;

impl Packing for I8 {
    const BITS: usize = 8;
    const SIGNED: bool = true;
    const ZERO: Option<f32> = Some(128.0);
}

/// Makes the list of packings: a name for each, and the macro `with_packing!` that goes from a name to its type.
macro_rules! packings {
    ($d:tt $($name:ident),+ $(,)?) => {
        /// The packings that kernels are compiled for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum PackingName {
            $($name),+
        }

        impl PackingName {
            /// [`Packing::BITS`].
            pub fn bits(self) -> usize {
                match self {
                    $(PackingName::$name => <$name as Packing>::BITS),+
                }
            }

            /// [`Packing::ZERO`].
            #[inline(always)]
            pub fn zero(self) -> Option<f32> {
                match self {
                    $(PackingName::$name => <$name as Packing>::ZERO),+
                }
            }
        }

        /// `with_packing!(name, P => expression)`: the expression with `P` as the type of that packing.
        macro_rules! with_packing {
            ($d name:expr, $d packing:ident => $d body:expr) => {
                match $d name {
                    $($crate::format::packing::PackingName::$name => {
                        type $d packing = $crate::format::packing::$name;
                        $d body
                    })+
                }
            };
        }
        pub(crate) use with_packing;
    };
}

packings!($ U2, U3, U4, U5, U6, U8, I8);

/// `with_parts!(parts, PARTS => expression)`: the expression with `PARTS` as a constant, for weight groups of so many activation groups.
#[cfg(target_arch = "x86_64")]
macro_rules! with_parts {
    ($parts:expr, $name:ident => $body:expr) => {
        match $parts {
            1 => {
                const $name: usize = 1;
                $body
            }
            2 => {
                const $name: usize = 2;
                $body
            }
            _ => {
                const $name: usize = 4;
                $body
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use with_parts;
