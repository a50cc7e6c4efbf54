//! Releases of the distribution, and the processors that they are for.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// A release of the distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suite {
    /// Debian 12, with Linux 6.1.
    Bookworm,
    /// Debian 13, with Linux 6.12.
    Trixie,
    /// Debian unstable, with the newest Linux.
    Sid,
}

impl Default for Suite {
    /// The one for this machine if nobody says otherwise.
    fn default() -> Self {
        Arch::default().suite()
    }
}

impl Suite {
    /// Its name in the archive.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
            Self::Sid => "sid",
        }
    }

    /// Its other name in the archive, which moves on to the next release when there is one.
    pub(crate) fn alias(self) -> &'static str {
        match self {
            Self::Bookworm => "oldstable",
            Self::Trixie => "stable",
            Self::Sid => "unstable",
        }
    }
}

impl fmt::Display for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Suite {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        [Self::Bookworm, Self::Trixie, Self::Sid]
            .into_iter()
            .find(|suite| suite.name() == name)
            .ok_or_else(|| Error::UnknownSuite(name.to_owned()))
    }
}

/// A kind of processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    /// That of most machines, Intel's or AMD's.
    X86_64,
    /// 64-bit RISC-V.
    Riscv64,
}

impl Default for Arch {
    /// That of the machine which this is compiled for.
    fn default() -> Self {
        if cfg!(target_arch = "riscv64") { Self::Riscv64 } else { Self::X86_64 }
    }
}

impl Arch {
    /// What Linux calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Riscv64 => "riscv64",
        }
    }

    /// The release that guests, and programs in them, are of if nobody says otherwise: none is tried more. The one before
    /// trixie has no RISC-V.
    pub fn suite(self) -> Suite {
        match self {
            Self::X86_64 => Suite::Bookworm,
            Self::Riscv64 => Suite::Trixie,
        }
    }

    /// What the distribution calls it.
    pub(crate) fn in_packages(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Riscv64 => "riscv64",
        }
    }

    /// The folder of its libraries.
    pub(crate) fn libraries(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-linux-gnu",
            Self::Riscv64 => "riscv64-linux-gnu",
        }
    }

    /// Where programs look for the dynamic linker.
    pub(crate) fn linker(self) -> &'static str {
        match self {
            Self::X86_64 => "lib64/ld-linux-x86-64.so.2",
            Self::Riscv64 => "lib/ld-linux-riscv64-lp64d.so.1",
        }
    }

    /// The package of the kernel that suits virtual machines best.
    pub(crate) fn kernel(self) -> &'static str {
        match self {
            Self::X86_64 => "linux-image-cloud-amd64",
            Self::Riscv64 => "linux-image-riscv64",
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Arch {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        [Self::X86_64, Self::Riscv64]
            .into_iter()
            .find(|arch| arch.name() == name)
            .ok_or_else(|| Error::UnknownArch(name.to_owned()))
    }
}

/// A release as it is for one kind of processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Release {
    /// The release.
    pub suite: Suite,
    /// The kind of processor.
    pub arch: Arch,
}

impl Release {
    /// The one for a kind of processor if nobody says otherwise.
    pub fn of(arch: Arch) -> Self {
        Self { suite: arch.suite(), arch }
    }

    /// What belongs to it in the cache has this in its name.
    pub fn label(self) -> String {
        match self.arch {
            Arch::X86_64 => self.suite.to_string(),
            Arch::Riscv64 => format!("{}-{}", self.suite, self.arch),
        }
    }
}

impl From<Suite> for Release {
    /// As it is for this machine.
    fn from(suite: Suite) -> Self {
        Self { suite, arch: Arch::default() }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.arch {
            Arch::X86_64 => write!(f, "{}", self.suite),
            Arch::Riscv64 => write!(f, "{} for {}", self.suite, self.arch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_exist_is_named() {
        assert!("woody".parse::<Suite>().unwrap_err().to_string().contains("woody"));
        assert_eq!("sid".parse::<Suite>().unwrap(), Suite::Sid);
        assert!("m68k".parse::<Arch>().unwrap_err().to_string().contains("m68k"));
        assert_eq!("riscv64".parse::<Arch>().unwrap(), Arch::Riscv64);
    }

    #[test]
    fn releases_for_different_processors_have_different_labels() {
        let release = |arch| Release { suite: Suite::Sid, arch };
        assert_eq!(release(Arch::X86_64).label(), "sid");
        assert_eq!(release(Arch::Riscv64).label(), "sid-riscv64");
    }
}
