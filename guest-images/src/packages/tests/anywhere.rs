//! The same packages on machines that have nothing in common.

use std::path::Path;
use std::process::Stdio;

use pgp::ser::Serialize;

use super::*;
use crate::cpio;
use crate::image::Unpacked;
use crate::image::tests::elf;

/// Path of this test's program in a root directory.
const PROGRAM: &str = "/test";

/// Publishes a program, its library and a busybox.
fn mirror() -> (Mirror, TestKey) {
    let (mirror, key) = (Mirror::start(), TestKey::new());
    let library = "./usr/lib/x86_64-linux-gnu/libhello.so.1";
    let busybox = b"\x7fELF... [\0[[\0ls\0mount\0sh\0\0";
    let packages: [&[(&str, &[u8])]; 4] = [
        &[("./usr/bin/hello", &elf(&["libhello.so.1", "libc.so.6"], ""))],
        &[(library, &elf(&["libc.so.6"], ""))],
        &[
            ("./lib/x86_64-linux-gnu/libc.so.6", &elf(&["ld-linux-x86-64.so.2"], "")),
            ("./lib64/ld-linux-x86-64.so.2", &elf(&[], "")),
        ],
        &[("./bin/busybox", busybox)],
    ];
    let debs = packages.map(|files| deb::tests::package(files, &[]));
    let names = ["hello", "libhello1", "libc6", "busybox-static"];
    let packages: Vec<(&str, &[u8])> = names.into_iter().zip(debs.iter().map(Vec::as_slice)).collect();
    mirror.publish("bookworm", &key, &packages, "");
    (mirror, key)
}

/// Builds an image in this process's root directory.
fn build(folder: &Path, uri: &str) -> Result<Vec<u8>> {
    let (cache, progress) = (Cache::at(folder.join("cache"))?, &mut Progress::silent());
    let keyring = folder.join("key").display().to_string();
    let archive = Archive { uri: uri.to_owned(), signed_by: Some(keyring), expiry: Expiry::Refused };
    let lists = Lists::new(&cache, RELEASE, archive, None, Keys::of_debian())?;
    let repository = Repository::new(&cache, lists, direct(), None)?;
    repository.update(progress)?;
    let packages = repository.resolve(&["hello", "libhello1", "libc6", "busybox-static"])?;
    let root = folder.join("unpacked");
    repository.unpack(&packages, &root, progress)?;
    let (files, mut image) = (Unpacked::new(&root, RELEASE), cpio::Archive::new());
    files.add_busybox(&mut image)?;
    files.add_programs(&mut image, &["usr/bin/hello"])?;
    Ok(image.finish())
}

/// Builds the image for [`in_an_empty_root_directory_the_image_is_the_same`], in a process of its own.
#[test]
fn child_that_builds() {
    let Ok(uri) = std::env::var("TALLY_TEST_BUILD") else { return };
    let image = build(Path::new("/work"), &uri).unwrap_or_else(|error| panic!("{error}"));
    fs::write("/work/image", image).unwrap();
}

#[test]
fn in_an_empty_root_directory_the_image_is_the_same() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can change its root folder");
        return;
    }
    let (mirror, key) = mirror();
    let (here, there) = (folder_of_ours(), folder_of_ours());
    let key = key.certificate.to_bytes().unwrap();
    fs::write(here.path().join("key"), &key).unwrap();
    let expected = build(here.path(), &mirror.uri).unwrap();

    // The root directory has nothing but this program, which is linked statically.
    let (work, program) = (there.path().join("work"), there.path().join(&PROGRAM[1..]));
    fs::create_dir(&work).unwrap();
    fs::create_dir(there.path().join("tmp")).unwrap();
    fs::write(work.join("key"), key).unwrap();
    fs::copy(std::env::current_exe().unwrap(), program).unwrap();
    let mut child = Command::new("/usr/sbin/chroot");
    child.arg(there.path()).args([PROGRAM, "--exact", "packages::tests::anywhere::child_that_builds"]);
    child.env_clear().env("TALLY_TEST_BUILD", &mirror.uri).stdout(Stdio::null());
    assert!(child.status().unwrap().success());
    assert!(fs::read(work.join("image")).unwrap() == expected);
}
