//! Whether an archive's index may be used after its `Valid-Until`. An administrator whose mirror is updated seldom says
//! so to apt, in its configuration or for a source, and means all programs that fetch from it.

use std::fs;
use std::path::{Path, PathBuf};

/// What is done about an index that has expired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    Refused,
    /// It is used: the machine's administrator has told apt to.
    Accepted,
}

impl Expiry {
    /// Returns what apt's configuration on this machine says.
    pub fn of_this_machine() -> Self {
        Self::in_folder(Path::new("/etc/apt"))
    }

    /// Returns what the last setting says. apt reads the folder in the order of the names, and then the file
    /// (`apt.conf(5)`).
    fn in_folder(apt: &Path) -> Self {
        let parts = fs::read_dir(apt.join("apt.conf.d")).into_iter().flatten();
        let mut files: Vec<PathBuf> = parts.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.sort();
        files.push(apt.join("apt.conf"));
        let setting = |file: &PathBuf| setting(&fs::read_to_string(file).ok()?);
        files.iter().rev().find_map(setting).unwrap_or(Self::Refused)
    }

    /// Returns what the value of the setting, or of a source's option of the same name, says.
    pub fn of_value(value: &str) -> Self {
        match value.trim().to_ascii_lowercase().as_str() {
            "no" | "false" | "without" | "off" | "disable" | "0" => Self::Accepted,
            _ => Self::Refused,
        }
    }
}

/// Returns the last setting in a file of apt's configuration: `Acquire::Check-Valid-Until "false";`, or the same in the
/// braces of `Acquire`.
fn setting(text: &str) -> Option<Expiry> {
    const NAME: &str = "check-valid-until";
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code: Vec<&str> = code.filter(|line| !line.trim_start().starts_with('#')).collect();
    let code = code.join("\n");
    let words: Vec<&str> = code
        .split(|c: char| c.is_whitespace() || "{};".contains(c))
        .filter(|word| !word.is_empty())
        .collect();
    words.windows(2).rev().find_map(|pair| {
        let name = pair[0].to_ascii_lowercase();
        let is_this = [NAME, &format!("acquire::{NAME}")].contains(&name.as_str());
        is_this.then(|| Expiry::of_value(pair[1].trim_matches('"')))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_found_in_both_forms_and_not_in_comments() {
        for text in [
            "Acquire::Check-Valid-Until \"false\";\n",
            "Acquire {\n  Retries \"3\";\n  Check-Valid-Until \"no\";\n};\n",
            "acquire::check-valid-until 0;",
        ] {
            assert_eq!(setting(text), Some(Expiry::Accepted), "{text}");
        }
        assert_eq!(setting("Acquire::Check-Valid-Until \"true\";"), Some(Expiry::Refused));
        for text in [
            "",
            "// Acquire::Check-Valid-Until \"false\";\n# Check-Valid-Until \"false\";\n",
            "APT::Get::X \"1\";",
        ] {
            assert_eq!(setting(text), None, "{text}");
        }
    }

    #[test]
    fn the_last_file_decides() {
        let apt = tempfile::tempdir().unwrap();
        assert_eq!(Expiry::in_folder(apt.path()), Expiry::Refused);
        fs::create_dir(apt.path().join("apt.conf.d")).unwrap();
        fs::write(apt.path().join("apt.conf.d/99mirror"), "Acquire::Check-Valid-Until \"false\";").unwrap();
        fs::write(apt.path().join("apt.conf.d/10other"), "Acquire::Check-Valid-Until \"true\";").unwrap();
        assert_eq!(Expiry::in_folder(apt.path()), Expiry::Accepted);
        fs::write(apt.path().join("apt.conf"), "Acquire::Check-Valid-Until \"yes\";").unwrap();
        assert_eq!(Expiry::in_folder(apt.path()), Expiry::Refused);
    }
}
