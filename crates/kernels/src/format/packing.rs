//! How integers are packed into bytes: the packings that kernels are compiled for.

/// How integers are packed into bytes. A type, so that kernels are compiled for each.
pub(crate) trait Packing: Copy {
    /// Bits of an integer. A row is one little-endian bit stream.
    const BITS: usize;
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

packings!($ U2, U3, U4, U5, U6, U8);

/// `with_parts!(grouped, PARTS, COLUMNS => expression)`: the expression with the parts of a weight group and the columns of a part as constants.
#[cfg(target_arch = "x86_64")]
macro_rules! with_parts {
    ($grouped:expr, $parts:ident, $columns:ident => $body:expr) => {
        match $grouped.group {
            16 => {
                const $parts: usize = 1;
                const $columns: usize = 16;
                $body
            }
            32 => {
                const $parts: usize = 1;
                const $columns: usize = 32;
                $body
            }
            64 => {
                const $parts: usize = 2;
                const $columns: usize = 32;
                $body
            }
            _ => {
                const $parts: usize = 4;
                const $columns: usize = 32;
                $body
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use with_parts;
