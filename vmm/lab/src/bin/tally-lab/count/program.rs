//! A program of this machine, and the libraries without which it does not run on the simulated host.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use elf::ElfBytes;
use elf::abi::{EM_RISCV, EM_X86_64, PT_INTERP};
use elf::endian::LittleEndian;
use guest_images::Arch;
use tally_lab::{Error, Result};

/// Folder of the libraries in the working directory, and the dynamic linker's name there.
const LIBRARIES: &str = "lib";
const LINKER: &str = "ld.so";

/// An ELF program.
pub struct Program {
    path: PathBuf,
    /// Its name in the working directory.
    name: String,
    /// The dynamic linker, if it has one, and the libraries by their names.
    linker: Option<(PathBuf, BTreeMap<String, PathBuf>)>,
}

impl Program {
    /// Finds a program as a shell does, and its libraries.
    pub fn find(name: &OsStr, arch: Arch) -> Result<Self> {
        let path = search(name).ok_or_else(|| Error::Uncountable {
            program: name.into(),
            why: "there is no such program on this machine".to_owned(),
        })?;
        let content = read(&path)?;
        let uncountable = |why: String| Error::Uncountable { program: path.clone(), why };
        let file = ElfBytes::<LittleEndian>::minimal_parse(&content).map_err(|_| {
            uncountable(
                "it is no ELF program; count a script's interpreter, and copy the script by --with"
                    .to_owned(),
            )
        })?;
        let machine = match arch {
            Arch::X86_64 => EM_X86_64,
            Arch::Riscv64 => EM_RISCV,
        };
        if file.ehdr.e_machine != machine {
            return Err(uncountable(format!("it is not for {arch} hosts")));
        }
        let segments = file.segments().into_iter().flatten();
        let interpreter = segments.filter(|header| header.p_type == PT_INTERP).find_map(|header| {
            let bytes = file.segment_data(&header).ok()?;
            Some(PathBuf::from(OsStr::from_bytes(bytes.strip_suffix(b"\0").unwrap_or(bytes))))
        });
        let linker = match interpreter {
            None => None,
            Some(linker) => {
                let libraries = libraries(&linker, &path).map_err(uncountable)?;
                Some((linker, libraries))
            }
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { path, name, linker })
    }

    /// Returns the files that it needs in its working directory, with their contents.
    pub fn files(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let mut files = vec![(self.name.clone(), read(&self.path)?)];
        if let Some((linker, libraries)) = &self.linker {
            files.push((format!("{LIBRARIES}/{LINKER}"), read(linker)?));
            for (name, path) in libraries {
                files.push((format!("{LIBRARIES}/{name}"), read(path)?));
            }
        }
        Ok(files)
    }

    /// Returns the words of a command that runs it in its working directory.
    pub fn command(&self) -> Vec<String> {
        let program = format!("./{}", self.name);
        match self.linker {
            None => vec![program],
            // Not by its own path: the host has programs with libraries of other versions there.
            Some(_) => vec![
                format!("./{LIBRARIES}/{LINKER}"),
                "--inhibit-cache".to_owned(),
                "--library-path".to_owned(),
                format!("./{LIBRARIES}"),
                program,
            ],
        }
    }
}

/// Refuses files of which two would have the same name in the working directory.
pub fn refuse_equal_names(files: &[(String, Vec<u8>)]) -> Result<()> {
    let mut names: Vec<&str> = files.iter().map(|(name, _)| &**name).collect();
    // No file can have the folder's name.
    names.push(LIBRARIES);
    names.sort_unstable();
    match names.windows(2).find(|two| two[0] == two[1]) {
        Some([name, _]) => {
            Err(Error::Counts(format!("two files would have the name {name}: choose another by --with")))
        }
        _ => Ok(()),
    }
}

/// Reads a file.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|source| Error::File { action: "read", path: path.to_owned(), source })
}

/// Returns the file that a shell would execute for a command's name.
fn search(name: &OsStr) -> Option<PathBuf> {
    let given = PathBuf::from(name);
    if name.as_bytes().contains(&b'/') {
        return given.is_file().then_some(given);
    }
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Asks a dynamic linker for the libraries of a program.
fn libraries(linker: &Path, program: &Path) -> std::result::Result<BTreeMap<String, PathBuf>, String> {
    let failed = |why: String| format!("its libraries cannot be found: {why}");
    let program = fs::canonicalize(program).map_err(|error| failed(error.to_string()))?;
    let output = Command::new(linker).arg("--list").arg(program).output();
    let output = output.map_err(|error| failed(format!("{}: {error}", linker.display())))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    listed(&String::from_utf8_lossy(&output.stdout)).map_err(failed)
}

/// Returns the libraries in what the dynamic linker lists, such as `libc.so.6 => /lib/libc.so.6 (0x...)`. The linker
/// itself and the vDSO have no arrow.
fn listed(text: &str) -> std::result::Result<BTreeMap<String, PathBuf>, String> {
    let arrows = text.lines().filter_map(|line| line.trim().split_once(" => "));
    let library = |(name, place): (&str, &str)| match place.rsplit_once(" (") {
        Some((path, _)) => Ok((name.to_owned(), PathBuf::from(path))),
        None => Err(format!("{name} is missing")),
    };
    arrows.map(library).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_with_an_arrow_and_a_missing_one_is_named() {
        let text =
            "\tlinux-vdso.so.1 (0x7ffd)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f00)\n\t/lib64/ld.so (0x7f01)\n";
        let libraries = listed(text).unwrap();
        assert_eq!(
            libraries.into_iter().collect::<Vec<_>>(),
            [("libc.so.6".to_owned(), PathBuf::from("/lib/libc.so.6"))]
        );
        assert_eq!(listed("\tlibgone.so => not found\n").unwrap_err(), "libgone.so is missing");
    }

    #[test]
    fn two_files_of_one_name_are_refused() {
        let files = |names: [&str; 2]| names.map(|name| (name.to_owned(), Vec::new()));
        assert!(refuse_equal_names(&files(["a", "b"])).is_ok());
        assert!(refuse_equal_names(&files(["a", "a"])).is_err());
        assert!(refuse_equal_names(&files(["a", "lib"])).is_err());
    }

    #[test]
    fn a_command_is_searched_in_path_unless_its_name_has_a_slash() {
        assert!(search("sh".as_ref()).is_some_and(|path| path.is_absolute()));
        assert_eq!(search("./sh".as_ref()), None);
        assert_eq!(search("/bin/sh".as_ref()), Some(PathBuf::from("/bin/sh")));
    }
}
