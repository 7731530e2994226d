//! From an [`Isa`](crate::isa::Isa) to the code of its folder. Only this file and `isa.rs` list the instruction sets.

use crate::instructions::bf16_dot::Bf16Dot;
use crate::instructions::bytes::Bytes;
use crate::instructions::encode::Encode;
use crate::instructions::f32_dot::Lanes;
use crate::instructions::int8_dot::Int8Dot;
use crate::instructions::int11_dot::Int11Dot;
use crate::instructions::peak::Peak;
use crate::instructions::unpack::Unpack;

/// Makes a function that runs `$body::<V>(args)` with the lanes of the given [`Isa`], inside a shell that has the
/// instruction set enabled. `$body` must be `#[inline(always)] unsafe fn body<V: Lanes>(..)`, and sound for any arguments
/// that the made (safe) function lets through: it does the checks.
macro_rules! simd {
    ($(#[$meta:meta])* $vis:vis fn $name:ident$(<$($life:lifetime),+>)?($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name$(<$($life),+>)?(isa: crate::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx2,fma,f16c,bmi2")]
                unsafe fn avx2$(<$($life),+>)?($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this shell has the instruction set enabled.
                    unsafe { $body::<crate::avx2::Avx2x16>($($arg),*) }
                }
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,f16c,bmi2")]
                unsafe fn avx512$(<$($life),+>)?($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: as above.
                    unsafe { $body::<crate::avx512::Avx512x16>($($arg),*) }
                }
                match isa.level() {
                    // SAFETY: an `Isa` above generic is made only after its features were detected.
                    crate::isa::Level::Avx512 | crate::isa::Level::Amx => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    crate::isa::Level::Avx2 | crate::isa::Level::AvxVnni => return unsafe { avx2($($arg),*) },
                    _ => {}
                }
            }
            #[cfg(target_arch = "aarch64")]
            {
                #[allow(clippy::too_many_arguments)]
                unsafe fn neon$(<$($life),+>)?($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: every aarch64 processor has NEON.
                    unsafe { $body::<crate::neon::Neon16<crate::neon::Plain>>($($arg),*) }
                }
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "neon,dotprod")]
                unsafe fn dotprod$(<$($life),+>)?($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this shell has the instruction set enabled.
                    unsafe { $body::<crate::neon::Neon16<crate::neon::DotProd>>($($arg),*) }
                }
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "neon,dotprod,i8mm")]
                unsafe fn i8mm$(<$($life),+>)?($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: as above.
                    unsafe { $body::<crate::neon::Neon16<crate::neon::I8mm>>($($arg),*) }
                }
                match isa.level() {
                    // SAFETY: an `Isa` above generic is made only after its features were detected.
                    crate::isa::Level::Neon => return unsafe { neon($($arg),*) },
                    // SAFETY: as above.
                    crate::isa::Level::DotProd => return unsafe { dotprod($($arg),*) },
                    // SAFETY: as above.
                    crate::isa::Level::I8mm => return unsafe { i8mm($($arg),*) },
                    _ => {}
                }
            }
            let _ = isa;
            // SAFETY: the generic lanes need no instruction set; the body is sound for all arguments.
            unsafe { $body::<crate::generic::Generic16>($($arg),*) }
        }
    };
}

pub(crate) use simd;

/// The maximum over all instruction sets: `greatest!(Trait::function(arguments))`, a number known without an `Isa`.
macro_rules! greatest {
    ($needs:ident::$function:ident($($arg:expr),*)) => {{
        let most = <crate::generic::Generic16 as $needs>::$function($($arg),*);
        #[cfg(target_arch = "x86_64")]
        let most = most
            .max(<crate::avx2::Avx2x16 as $needs>::$function($($arg),*))
            .max(<crate::avx512::Avx512x16 as $needs>::$function($($arg),*));
        #[cfg(target_arch = "aarch64")]
        let most = most
            .max(<crate::neon::Neon16<crate::neon::DotProd> as $needs>::$function($($arg),*))
            .max(<crate::neon::Neon16<crate::neon::I8mm> as $needs>::$function($($arg),*));
        most
    }};
}

pub(crate) use greatest;

/// Checks at compile time that an instruction set implements every trait.
const fn is_whole<V: Lanes + Bytes + Encode + Int8Dot + Int11Dot + Bf16Dot + Peak + Unpack>() {}

const _: () = is_whole::<crate::generic::Generic16>();
#[cfg(target_arch = "x86_64")]
const _: () = is_whole::<crate::avx2::Avx2x16>();
#[cfg(target_arch = "x86_64")]
const _: () = is_whole::<crate::avx512::Avx512x16>();
#[cfg(target_arch = "aarch64")]
const _: () = is_whole::<crate::neon::Neon16<crate::neon::Plain>>();
#[cfg(target_arch = "aarch64")]
const _: () = is_whole::<crate::neon::Neon16<crate::neon::DotProd>>();
#[cfg(target_arch = "aarch64")]
const _: () = is_whole::<crate::neon::Neon16<crate::neon::I8mm>>();
