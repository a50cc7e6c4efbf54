//! Releases of the distribution, and the architectures for which they exist.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

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
    /// The default for this machine.
    fn default() -> Self {
        Arch::default().suite()
    }
}

impl Suite {
    /// Returns the suite's name in the archive.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
            Self::Sid => "sid",
        }
    }

    /// Returns the name of the suite with its security updates. Unstable has none: it gets new versions.
    pub(crate) fn security(self) -> Option<&'static str> {
        match self {
            Self::Bookworm => Some("bookworm-security"),
            Self::Trixie => Some("trixie-security"),
            Self::Sid => None,
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

/// An architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    /// x86-64, of Intel and AMD processors.
    X86_64,
    /// 64-bit RISC-V.
    Riscv64,
}

impl Default for Arch {
    /// The architecture for which this crate is compiled.
    fn default() -> Self {
        if cfg!(target_arch = "riscv64") { Self::Riscv64 } else { Self::X86_64 }
    }
}

impl Arch {
    /// Returns Linux's name of the architecture.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Riscv64 => "riscv64",
        }
    }

    /// Returns the default release of guests, and the release of the programs in all guests. It is the best tested one.
    /// Releases before trixie do not exist for RISC-V.
    pub fn suite(self) -> Suite {
        match self {
            Self::X86_64 => Suite::Bookworm,
            Self::Riscv64 => Suite::Trixie,
        }
    }

    /// Returns the distribution's name of the architecture.
    pub(crate) fn in_packages(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Riscv64 => "riscv64",
        }
    }

    /// Returns the name of the library directory.
    pub(crate) fn libraries(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-linux-gnu",
            Self::Riscv64 => "riscv64-linux-gnu",
        }
    }

    /// Returns the path of the dynamic linker.
    pub(crate) fn linker(self) -> &'static str {
        match self {
            Self::X86_64 => "lib64/ld-linux-x86-64.so.2",
            Self::Riscv64 => "lib/ld-linux-riscv64-lp64d.so.1",
        }
    }

    /// Returns the package of the kernel that is best for virtual machines.
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

/// A release for one architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Release {
    pub suite: Suite,
    pub arch: Arch,
}

impl Release {
    /// Returns the default release for an architecture.
    pub fn of(arch: Arch) -> Self {
        Self { suite: arch.suite(), arch }
    }

    /// Returns a label for the names of cache entries.
    pub fn label(self) -> String {
        match self.arch {
            Arch::X86_64 => self.suite.to_string(),
            Arch::Riscv64 => format!("{}-{}", self.suite, self.arch),
        }
    }
}

impl From<Suite> for Release {
    /// Returns the release for this machine's architecture.
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
    fn an_unknown_suite_or_architecture_is_named_in_the_error() {
        assert!("woody".parse::<Suite>().unwrap_err().to_string().contains("woody"));
        assert_eq!("sid".parse::<Suite>().unwrap(), Suite::Sid);
        assert!("m68k".parse::<Arch>().unwrap_err().to_string().contains("m68k"));
        assert_eq!("riscv64".parse::<Arch>().unwrap(), Arch::Riscv64);
    }

    #[test]
    fn releases_for_different_architectures_have_different_labels() {
        let release = |arch| Release { suite: Suite::Sid, arch };
        assert_eq!(release(Arch::X86_64).label(), "sid");
        assert_eq!(release(Arch::Riscv64).label(), "sid-riscv64");
    }
}
