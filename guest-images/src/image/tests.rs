//! Images from small ELF files.

use std::os::unix::fs::symlink;

use super::*;
use crate::release::Suite;

/// Returns an ELF file of x86-64 with only a dynamic section: the libraries that it needs, and its `DT_RUNPATH`.
pub fn elf(needed: &[&str], runpath: &str) -> Vec<u8> {
    const HEADER: usize = 0x40;
    let (mut strings, mut entries) = (vec![0], Vec::new());
    let mut entry = |tag: u64, text: &str| {
        entries.extend([tag.to_le_bytes(), (strings.len() as u64).to_le_bytes()].concat());
        strings.extend(text.as_bytes());
        strings.push(0);
    };
    for name in needed {
        entry(1, name);
    }
    if !runpath.is_empty() {
        entry(29, runpath);
    }
    entries.extend([0; 16]);
    let mut file = vec![0; HEADER];
    file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    file[0x12] = 62;
    let headers = HEADER + entries.len() + strings.len();
    file[0x28..0x30].copy_from_slice(&(headers as u64).to_le_bytes());
    file[0x3a..0x40].copy_from_slice(&[0x40, 0, 3, 0, 2, 0]);
    // SHT_DYNAMIC with a link to the strings, and SHT_STRTAB.
    let sections = [
        (0_u32, 0, 0, 0_u32, 0_u64),
        (6, HEADER, entries.len(), 2, 16),
        (3, HEADER + entries.len(), strings.len(), 0, 0),
    ];
    file.extend(entries);
    file.extend(strings);
    for (kind, start, length, link, size) in sections {
        let mut header = [0; 0x40];
        header[4..8].copy_from_slice(&kind.to_le_bytes());
        header[0x18..0x20].copy_from_slice(&(start as u64).to_le_bytes());
        header[0x20..0x28].copy_from_slice(&(length as u64).to_le_bytes());
        header[0x28..0x2c].copy_from_slice(&link.to_le_bytes());
        header[0x38..0x40].copy_from_slice(&size.to_le_bytes());
        file.extend(header);
    }
    file
}

fn put(root: &Path, path: &str, content: &[u8]) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

/// Fills a directory as packages would.
fn unpack(root: &Path) {
    put(root, "usr/bin/perf", &elf(&["libelf.so.1", "libc.so.6", "libown.so"], "$ORIGIN/../lib/own"));
    put(root, "usr/lib/x86_64-linux-gnu/libelf.so.1", &elf(&["libz.so.1", "libc.so.6"], ""));
    put(root, "lib/x86_64-linux-gnu/libz-1.2.so", &elf(&[], ""));
    symlink("libz-1.2.so", root.join("lib/x86_64-linux-gnu/libz.so.1")).unwrap();
    put(root, "lib/x86_64-linux-gnu/libc.so.6", &elf(&["ld-linux-x86-64.so.2"], ""));
    put(root, "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", &elf(&[], ""));
    put(root, "usr/lib/own/libown.so", &elf(&[], ""));
    // A program of another architecture is not the library.
    put(root, "usr/lib/own/libc.so.6", b"\x7fELF\x01 of 32 bits");
}

fn image_of(root: &Path) -> Result<Vec<u8>> {
    let mut image = Archive::new();
    Unpacked::new(root, Suite::Bookworm).add_programs(&mut image, &["usr/bin/perf"])?;
    Ok(image.finish())
}

fn names(image: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(image);
    let entries = text.split("070701").skip(1);
    entries.map(|entry| entry[104..].split('\0').next().unwrap().to_owned()).collect()
}

#[test]
fn a_program_comes_with_exactly_the_libraries_that_it_needs() {
    let root = tempfile::tempdir().unwrap();
    unpack(root.path());
    put(root.path(), "usr/lib/x86_64-linux-gnu/libother.so.1", &elf(&[], ""));
    let image = image_of(root.path()).unwrap();
    let files: Vec<String> = names(&image).into_iter().filter(|name| name.contains(".so")).collect();
    let libraries = ["libc.so.6", "libelf.so.1", "libown.so", "libz.so.1"];
    let mut expected = libraries.map(|name| format!("lib/x86_64-linux-gnu/{name}")).to_vec();
    expected.push("lib64/ld-linux-x86-64.so.2".into());
    assert_eq!(files, expected);
}

#[test]
fn the_same_packages_give_the_same_image_wherever_they_are_unpacked() {
    let [one, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let elsewhere = other.path().join("a/longer/path");
    unpack(one.path());
    unpack(&elsewhere);
    assert!(image_of(one.path()).unwrap() == image_of(&elsewhere).unwrap());
}

#[test]
fn a_library_that_no_package_has_is_an_error_even_if_this_machine_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let (root, machine) = (folder.path().join("root"), folder.path().join("machine"));
    unpack(&root);
    put(&machine, "libhere.so.1", &elf(&[], ""));
    put(&root, "usr/bin/perf", &elf(&["libhere.so.1"], machine.to_str().unwrap()));
    let refusal = || image_of(&root).unwrap_err().to_string();
    assert_eq!(
        refusal(),
        "bookworm: the library libhere.so.1, which usr/bin/perf needs, not found in the unpacked packages"
    );
    symlink(machine.join("libhere.so.1"), root.join("usr/lib/libhere.so.1")).unwrap();
    assert!(refusal().contains("libhere.so.1"));
    fs::remove_file(root.join("usr/lib/libhere.so.1")).unwrap();
    symlink(&machine, root.join("usr/lib/x86_64-linux-gnu/linked")).unwrap();
    put(&root, "usr/bin/perf", &elf(&["libhere.so.1"], "$ORIGIN/../lib/x86_64-linux-gnu/linked"));
    assert!(refusal().contains("libhere.so.1"));
}

#[test]
fn a_damaged_program_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    unpack(root.path());
    let whole = elf(&["libc.so.6"], "");
    for end in [0, 5, 0x3f, 0x60, whole.len() - 1] {
        put(root.path(), "usr/bin/perf", &whole[..end]);
        let said = image_of(root.path()).unwrap_err().to_string();
        assert!(said.contains("usr/bin/perf"), "{said}");
    }
}

#[test]
fn busyboxs_commands_are_read_without_running_it() {
    let root = tempfile::tempdir().unwrap();
    let busybox = |names: &str| [b"\x7fELF...\xae ", names.as_bytes(), b"\0\0/proc/self/exe\0"].concat();
    put(root.path(), "bin/busybox", &busybox("[\0[[\0acpid\0busybox\0mount\0sh\0xxd"));
    let mut image = Archive::new();
    Unpacked::new(root.path(), Suite::Bookworm).add_busybox(&mut image).unwrap();
    let expected = ["bin", "busybox", "[", "[[", "acpid", "mount", "sh", "xxd", "TRAILER!!!"];
    let names = names(&image.finish());
    assert_eq!(names.iter().map(|name| name.trim_start_matches("bin/")).collect::<Vec<_>>(), expected);
    assert_eq!(commands(&busybox("[\0[[\0sh\0mount")), None, "the names are in order");
    assert_eq!(commands(b"text"), None);
}
