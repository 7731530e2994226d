//! Which instruction set the kernels use. Chosen once at start; every choice gives the same bits.

use std::fmt;

/// An instruction set that this machine has: proof that the shells of that [`Level`] may be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Level);

/// The instruction sets that the kernels are written for. Those of one architecture come from plainest to fastest; a machine has any of them, not all up to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Portable Rust, the oracle for the others.
    Generic,
    /// AVX2, FMA, F16C and BMI2.
    Avx2,
    /// The same, and AVX-VNNI's products of bytes (Intel from Alder Lake, AMD from Zen 5).
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL, VNNI, VBMI and BF16 (Intel from Sapphire Rapids, AMD from Zen 4).
    Avx512,
    /// The same, and AMX's tiles of bytes for products of integers (Intel from Sapphire Rapids), where Linux permits them.
    Amx,
    /// NEON, as every aarch64 processor has it.
    Neon,
    /// The same, and dot products of bytes (Cortex-A76, Neoverse N1, Apple M1 and after).
    DotProd,
    /// The same, and products of small matrices of bytes (Cortex-A510 and A710, Neoverse V1 and N2, Apple M2 and after).
    I8mm,
}

impl Level {
    /// All of them, those of one architecture from plainest to fastest.
    pub const ALL: [Level; 8] = [
        Level::Generic,
        Level::Avx2,
        Level::AvxVnni,
        Level::Avx512,
        Level::Amx,
        Level::Neon,
        Level::DotProd,
        Level::I8mm,
    ];

    /// Its name for `SLUICE_ISA` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Generic => "generic",
            Level::Avx2 => "avx2",
            Level::AvxVnni => "avxvnni",
            Level::Avx512 => "avx512",
            Level::Amx => "amx",
            Level::Neon => "neon",
            Level::DotProd => "dotprod",
            Level::I8mm => "i8mm",
        }
    }

    /// Whether this machine can run it.
    pub fn is_supported(self) -> bool {
        match self {
            Level::Generic => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => crate::avx2::is_supported(),
            #[cfg(target_arch = "x86_64")]
            Level::AvxVnni => crate::avx2::has_vnni(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => crate::avx512::is_supported(),
            #[cfg(target_arch = "x86_64")]
            Level::Amx => crate::avx512::is_supported() && crate::avx512::amx::is_supported(),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => true,
            #[cfg(target_arch = "aarch64")]
            Level::DotProd => crate::neon::has_dotprod(),
            #[cfg(target_arch = "aarch64")]
            Level::I8mm => crate::neon::has_i8mm(),
            _ => false,
        }
    }

    /// Whether there is code for it in this program: it is of the architecture that the program was compiled for.
    pub const fn is_compiled(self) -> bool {
        match self {
            Level::Generic => true,
            Level::Avx2 | Level::AvxVnni | Level::Avx512 | Level::Amx => cfg!(target_arch = "x86_64"),
            Level::Neon | Level::DotProd | Level::I8mm => cfg!(target_arch = "aarch64"),
        }
    }
}

/// `SLUICE_ISA` names something that this machine cannot run or that does not exist.
#[derive(Debug, thiserror::Error)]
#[error("SLUICE_ISA={wanted}: {why}; this machine can run {}", list(&Isa::supported()))]
pub struct IsaError {
    wanted: String,
    why: String,
}

fn list(all: &[Isa]) -> String {
    all.iter().map(|i| i.to_string()).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.0.name())
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
        Level::ALL.into_iter().filter(|level| level.is_supported()).map(Isa).collect()
    }

    /// The names of those that there is code for in this program, and that this machine lacks.
    pub fn missing() -> Vec<&'static str> {
        let lacks = |level: &Level| level.is_compiled() && !level.is_supported();
        Level::ALL.into_iter().filter(lacks).map(Level::name).collect()
    }

    /// The fastest instruction set of this machine, or the one that `SLUICE_ISA` names.
    ///
    /// # Errors
    /// When this machine does not have it.
    pub fn from_env() -> Result<Isa, IsaError> {
        let best = *Isa::supported().last().expect("generic is always there");
        let Some(wanted) = std::env::var_os("SLUICE_ISA") else { return Ok(best) };
        let wanted = wanted.to_string_lossy().into_owned();
        if matches!(wanted.as_str(), "" | "auto") {
            return Ok(best);
        }
        let Some(level) = Level::ALL.into_iter().find(|level| level.name() == wanted) else {
            let names = Level::ALL.map(Level::name).join(", ");
            return Err(IsaError { wanted, why: format!("expected auto or one of {names}") });
        };
        if !level.is_supported() {
            let what = if level.is_compiled() { "processor" } else { "architecture" };
            return Err(IsaError { wanted, why: format!("not supported by this {what}") });
        }
        Ok(Isa(level))
    }
}
