//! Which instruction set the kernels use. Chosen once at start; every choice gives the same bits.

use std::fmt;

/// An instruction set that this machine has: proof that the shells of that [`Level`] may be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(Level);

/// The instruction sets that the kernels are written for, from plainest to fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Portable Rust, the oracle for the other two.
    Generic,
    /// AVX2, FMA, F16C and BMI2.
    Avx2,
    /// AVX-512 F, BW, DQ, VL, VNNI, VBMI and BF16 (Intel from Sapphire Rapids, AMD from Zen 4).
    Avx512,
    /// The same, and AMX's tiles of bytes for products of integers (Intel from Sapphire Rapids), where Linux permits them.
    Amx,
}

/// `SLUICE_ISA` names something that this machine cannot run or that does not exist.
#[derive(Debug, thiserror::Error)]
#[error("SLUICE_ISA={wanted}: {why}; this machine can run {}", list(&Isa::supported()))]
pub struct IsaError {
    wanted: String,
    why: &'static str,
}

fn list(all: &[Isa]) -> String {
    all.iter().map(|i| i.to_string()).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self.0 {
            Level::Generic => "generic",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Amx => "amx",
        })
    }
}

impl Isa {
    /// Portable Rust, which every machine has.
    pub const GENERIC: Isa = Isa(Level::Generic);

    /// The instruction set.
    pub fn level(self) -> Level {
        self.0
    }

    /// The instruction sets of this machine, plainest first.
    pub fn supported() -> Vec<Isa> {
        #[allow(unused_mut)]
        let mut all = vec![Isa::GENERIC];
        #[cfg(target_arch = "x86_64")]
        {
            if crate::avx2::is_supported() {
                all.push(Isa(Level::Avx2));
            }
            if crate::avx512::is_supported() {
                all.push(Isa(Level::Avx512));
                if crate::avx512::amx::is_supported() {
                    all.push(Isa(Level::Amx));
                }
            }
        }
        all
    }

    /// The fastest instruction set of this machine, or the one that `SLUICE_ISA` names.
    ///
    /// # Errors
    /// When this machine does not have it.
    pub fn from_env() -> Result<Isa, IsaError> {
        let best = *Isa::supported().last().expect("generic is always there");
        let Some(wanted) = std::env::var_os("SLUICE_ISA") else { return Ok(best) };
        let wanted = wanted.to_string_lossy().into_owned();
        let level = match wanted.as_str() {
            "" | "auto" => return Ok(best),
            "generic" => Level::Generic,
            "avx2" => Level::Avx2,
            "avx512" => Level::Avx512,
            "amx" => Level::Amx,
            _ => return Err(IsaError { wanted, why: "expected auto, generic, avx2, avx512 or amx" }),
        };
        if level > best.0 {
            return Err(IsaError { wanted, why: "not supported by this processor" });
        }
        Ok(Isa(level))
    }
}
