//! Weight formats: which planes a matrix consists of, and what its kernels need to know of them. The types that every kernel and its callers share.
//!
//! One file is one family of formats. It says once which planes a matrix has and, where columns share scales ([`Grouped`]), how their integers are packed.
//! Kernels are compiled for each packing of the list below, never for a format by name. To add a format:
//!
//! 1. write its file: a type that implements [`Format`], and a [`Packing`] if none of the list fits;
//! 2. add it to [`WeightFormat`] and to the list of [`WeightFormat::with`], and a new packing to the list of `packings!`.

mod affine;
mod float;
mod planes;
mod q8_0;

pub use affine::Affine;
pub(crate) use affine::{U2, U3, U4, U5, U6, U8};
pub use float::Float;
pub use planes::{Element, MAX_PLANES, MatrixError, Plane, Planes};
pub(crate) use q8_0::I8;
pub use q8_0::Q8_0;

/// How the bytes of a matrix encode its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// One element after the other.
    Float(Float),
    /// MLX's affine groups: `w = q * s + b`, with one s and one b for each `group` columns.
    Affine {
        /// Bits of each q: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Columns of a group: 32, 64 or 128.
        group: u16,
        /// The type of s and b.
        scale: Float,
    },
    /// GGUF's Q8_0: `w = q * s`, with signed bytes q and one f16 s for each 32 columns.
    Q8_0,
}

/// The precision of activations. Chosen once at start, and a part of the numerics version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activations {
    /// As they are computed.
    F32,
    /// Rounded to bf16.
    Bf16,
    /// Quantised to integers in groups of 32 columns, where weights are integers in groups too.
    Int8,
}

/// The encoding of activations that a matrix takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationFormat {
    /// f32.
    F32,
    /// bf16.
    Bf16,
    /// Signed bytes in groups of 32 columns.
    Int8,
}

/// What a format is, written down once, in its own file.
pub(crate) trait Format {
    /// The planes of a matrix with `cols` columns, in the order that they have everywhere.
    fn planes(&self, cols: usize) -> Result<Planes, MatrixError>;
    /// How groups of columns are packed; `None` for formats without groups.
    fn grouped(&self) -> Option<Grouped>;
    /// The encoding of activations that a matrix takes in `mode` (the table in `docs/numerics.md`).
    fn activation_format(&self, mode: Activations) -> ActivationFormat;
}

/// A format in groups: unsigned integers q, and for each `group` columns a scale s and a bias b, so that `w = fma(q, s, b)`.
///
/// Plane 0 holds integers as `packing` says, plane 1 scales. Where the packing has no [`Packing::ZERO`], plane 2 holds biases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grouped {
    pub packing: PackingName,
    /// Columns of a group: 32, 64 or 128.
    pub group: usize,
    /// The type of scales and biases.
    pub scale: Float,
}

impl Grouped {
    /// Activation groups in a weight group: 1, 2 or 4.
    pub fn parts(self) -> usize {
        self.group / crate::input::GROUP
    }

    /// The scale and the bias of group `g`, from a row's planes of scales and biases.
    #[inline(always)]
    pub fn scale_and_bias(self, scales: &[u8], biases: &[u8], g: usize) -> (f32, f32) {
        let s = self.scale.read(scales, g);
        (s, self.packing.zero().map_or_else(|| self.scale.read(biases, g), |zero| -zero * s))
    }
}

/// How integers are packed into bytes. A type, so that kernels are compiled for each.
pub(crate) trait Packing: Copy {
    /// Bits of an integer. A row is one little-endian bit stream.
    const BITS: usize;
    /// Bytes hold signed integers. Kernels take `q + 128`, which are the same bytes with the highest bit flipped.
    const SIGNED: bool = false;
    /// The integer that stands for zero, where that is the same in every group: the bias is `-ZERO * s`. Otherwise biases are a plane.
    const ZERO: Option<f32> = None;
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
                    $($crate::format::PackingName::$name => {
                        type $d packing = $crate::format::$name;
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

impl WeightFormat {
    /// The list of formats.
    #[inline(always)]
    fn with<R>(self, use_it: impl FnOnce(&dyn Format) -> R) -> R {
        match self {
            WeightFormat::Float(float) => use_it(&float),
            WeightFormat::Affine { bits, group, scale } => use_it(&Affine { bits, group, scale }),
            WeightFormat::Q8_0 => use_it(&Q8_0),
        }
    }

    /// The encoding of activations that a matrix of this format takes in `mode` (the table in `docs/numerics.md`).
    pub fn activation_format(self, mode: Activations) -> ActivationFormat {
        self.with(|format| format.activation_format(mode))
    }

    /// The planes of a matrix with `cols` columns, in the order that they have everywhere.
    ///
    /// # Errors
    /// Where there is no such format, or its groups do not divide the columns.
    pub fn planes(self, cols: usize) -> Result<Planes, MatrixError> {
        self.with(|format| format.planes(cols))
    }

    /// How groups of columns are packed; `None` for formats without groups.
    pub(crate) fn grouped(self) -> Option<Grouped> {
        self.with(|format| format.grouped())
    }
}
