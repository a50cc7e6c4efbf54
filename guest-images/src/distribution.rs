//! How this machine's distribution installs packages, for advice.

use std::fs;
use std::process::{Command, Stdio};

/// The program that installs packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Installer {
    /// Debian's, Ubuntu's.
    Apt,
    /// Fedora's, RHEL's.
    Dnf,
    /// Arch Linux's.
    Pacman,
    /// SUSE's.
    Zypper,
}

/// Debian's names of packages that others name differently: those of Fedora, Arch Linux and SUSE.
const NAMES: [(&str, [&str; 3]); 12] = [
    ("cargo", ["cargo", "rust", "cargo"]),
    ("dpkg-dev", ["dpkg-dev", "dpkg", "dpkg"]),
    ("g++", ["gcc-c++", "gcc", "gcc-c++"]),
    ("libc6-dev", ["glibc-devel", "glibc", "glibc-devel"]),
    ("libfdt-dev", ["libfdt-devel", "dtc", "libfdt-devel"]),
    ("libglib2.0-dev", ["glib2-devel", "glib2-devel", "glib2-devel"]),
    ("libpixman-1-dev", ["pixman-devel", "pixman", "libpixman-1-0-devel"]),
    ("ninja-build", ["ninja-build", "ninja", "ninja"]),
    ("pkg-config", ["pkgconf-pkg-config", "pkgconf", "pkg-config"]),
    ("python3-venv", ["python3", "python", "python3"]),
    ("xz-utils", ["xz", "xz", "xz"]),
    ("zlib1g-dev", ["zlib-devel", "zlib", "zlib-devel"]),
];

/// Returns how this machine's distribution installs packages with these names of Debian's, for messages.
pub fn advice(packages: &[&str]) -> String {
    match Installer::of_this_machine() {
        Some(installer) => installer.command(packages),
        None => format!("install {}", packages.join(" ")),
    }
}

impl Installer {
    /// Returns this machine's, or `None` if its distribution is not known.
    pub fn of_this_machine() -> Option<Self> {
        let files = ["/etc/os-release", "/usr/lib/os-release"];
        Self::of(&files.iter().find_map(|file| fs::read_to_string(file).ok())?)
    }

    /// Reads what os-release(5) says of the distribution, and of those that it is like.
    fn of(os_release: &str) -> Option<Self> {
        let value = |name: &str| {
            let mut lines = os_release.lines();
            let value = lines.find_map(|line| line.trim().strip_prefix(name)?.strip_prefix('='));
            value.unwrap_or_default().trim_matches(['"', '\'']).to_ascii_lowercase()
        };
        let names = format!("{} {}", value("ID"), value("ID_LIKE"));
        names.split_whitespace().find_map(|name| match name {
            "debian" | "ubuntu" => Some(Self::Apt),
            "fedora" | "rhel" | "centos" => Some(Self::Dnf),
            "arch" => Some(Self::Pacman),
            "suse" | "opensuse" => Some(Self::Zypper),
            _ => None,
        })
    }

    /// Returns the name of a package whose name in Debian this is.
    fn name(self, debian: &str) -> &str {
        let others = NAMES.iter().find(|(name, _)| *name == debian).map(|(_, others)| others);
        match (self, others) {
            (Self::Apt, _) | (_, None) => debian,
            (Self::Dnf, Some(names)) => names[0],
            (Self::Pacman, Some(names)) => names[1],
            (Self::Zypper, Some(names)) => names[2],
        }
    }

    /// Returns the command that installs packages.
    fn command(self, packages: &[&str]) -> String {
        let mut names: Vec<&str> = Vec::new();
        for name in packages.iter().map(|package| self.name(package)) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let program = match self {
            Self::Apt => "apt-get install",
            Self::Dnf => "dnf install",
            Self::Pacman => "pacman -S",
            Self::Zypper => "zypper install",
        };
        format!("{program} {}", names.join(" "))
    }

    /// Returns whether a package is installed whose name in Debian this is.
    pub fn has(self, package: &str) -> bool {
        let (program, arguments) = match self {
            Self::Apt => ("dpkg-query", ["--show", "--showformat=${db:Status-Status}"]),
            Self::Dnf | Self::Zypper => ("rpm", ["--query", "--whatprovides"]),
            Self::Pacman => ("pacman", ["--deptest", "--"]),
        };
        let mut command = Command::new(program);
        command.args(arguments).arg(self.name(package)).stdin(Stdio::null()).stderr(Stdio::null());
        let is_installed = |stdout: &[u8]| self != Self::Apt || stdout == b"installed";
        command.output().is_ok_and(|output| output.status.success() && is_installed(&output.stdout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_distribution_has_its_command_and_its_names() {
        let command = |os_release| Installer::of(os_release).unwrap().command(&["gcc", "g++", "xz-utils"]);
        assert_eq!(command("NAME=x\nID=debian\n"), "apt-get install gcc g++ xz-utils");
        assert_eq!(command("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n"), "apt-get install gcc g++ xz-utils");
        assert_eq!(command("ID=fedora\n"), "dnf install gcc gcc-c++ xz");
        assert_eq!(command("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n"), "dnf install gcc gcc-c++ xz");
        assert_eq!(command("ID=arch\n"), "pacman -S gcc xz");
        assert_eq!(command("ID_LIKE='suse opensuse'\nID=opensuse-leap\n"), "zypper install gcc gcc-c++ xz");
    }

    #[test]
    fn an_unknown_distribution_has_no_command() {
        for os_release in ["", "ID=nixos\n", "ID=\nID_LIKE=\n", "VERSION_ID=fedora\n"] {
            assert_eq!(Installer::of(os_release), None, "{os_release}");
        }
    }
}
