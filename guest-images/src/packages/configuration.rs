//! apt's configuration, with everything in the cache.

use std::path::Path;
use std::process::Command;

use crate::error::Result;
use crate::release::Release;
use crate::sources::Archive;
use crate::tool;

/// Returns the content of a `.sources` file for the binary and source packages of a suite.
pub fn stanza(archive: &Archive, suite: &str) -> String {
    let signed_by = archive.signed_by.as_ref().map(|keys| format!("Signed-By: {keys}\n")).unwrap_or_default();
    let uri = &archive.uri;
    format!("Types: deb deb-src\nURIs: {uri}\nSuites: {suite}\nComponents: main\n{signed_by}")
}

/// Returns an apt configuration that keeps everything in `directory`. It takes over only the machine's settings of the
/// network and of the user for downloads.
pub fn configuration(directory: &Path, release: Release) -> Result<String> {
    let machine = tool::run(Command::new("apt-config").args(["dump", "Acquire", "APT::Sandbox"]), "apt")?;
    Ok(with_settings(directory, release, &machine))
}

/// Implements [`configuration`] for the machine's settings. What must not be taken over is at the end, where it
/// overrides them: indexes without a valid signature are never used, and packages are identified by their SHA-256.
fn with_settings(directory: &Path, release: Release, machine: &str) -> String {
    let (directory, arch) = (directory.display(), release.arch.in_packages());
    let machine: String = machine
        .lines()
        .filter(|line| !line.starts_with("Acquire::IndexTargets") && !line.starts_with("Acquire::Languages"))
        .flat_map(|line| [line, "\n"])
        .collect();
    format!(
        "Dir::Etc::main \"/dev/null\";\nDir::Etc::parts \"/dev/null\";\nDir::Etc::preferences \"/dev/null\";\n\
         Dir::Etc::preferencesparts \"/dev/null\";\nDir::Etc::sourcelist \"/dev/null\";\n\
         Dir::Etc::sourceparts \"{directory}/sources.d\";\nDir::State \"{directory}/state\";\n\
         Dir::State::lists \"{directory}/lists\";\nDir::State::status \"{directory}/empty\";\n\
         Dir::Cache \"{directory}/cache\";\n\
         APT::Architecture \"{arch}\";\nAPT::Architectures {{ \"{arch}\"; }};\n\
         APT::Install-Recommends \"false\";\nAcquire::Languages \"none\";\n{machine}\
         Acquire::AllowInsecureRepositories \"false\";\nAcquire::AllowWeakRepositories \"false\";\n\
         Acquire::AllowDowngradeToInsecureRepositories \"false\";\nAPT::Get::AllowUnauthenticated \"false\";\n\
         Acquire::ForceHash \"SHA256\";\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Returns the value that apt reads for a setting from the configuration on a machine with these settings.
    fn value(machine: &str, name: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("apt.conf");
        fs::write(&config, with_settings(folder.path(), Release::default(), machine)).unwrap();
        let mut dump = Command::new("apt-config");
        dump.args(["dump", "--format", "%v", name]).env("APT_CONFIG", config);
        tool::run(&mut dump, "apt").unwrap()
    }

    #[test]
    fn indexes_without_a_signature_are_never_used_whatever_the_machine_allows() {
        for setting in ["Insecure", "Weak", "DowngradeToInsecure"] {
            let name = format!("Acquire::Allow{setting}Repositories");
            assert_eq!(value(&format!("{name} \"1\";\n"), &name), "false");
        }
        assert_eq!(value("", "APT::Get::AllowUnauthenticated"), "false");
    }

    #[test]
    fn downloads_run_as_apts_own_user_or_the_one_that_the_machine_says() {
        assert_eq!(value("", "APT::Sandbox::User"), "_apt");
        assert_eq!(value("APT::Sandbox::User \"root\";\n", "APT::Sandbox::User"), "root");
    }

    #[test]
    fn settings_of_the_network_are_taken_over() {
        let proxy = "Acquire::http::Proxy \"http://proxy.example:3128\";\n";
        assert_eq!(value(proxy, "Acquire::http::Proxy"), "http://proxy.example:3128");
    }
}
