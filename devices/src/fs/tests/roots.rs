//! What a guest does not see of a directory that is its root. Tests with mounts need root's rights; otherwise they
//! print a note and do nothing.

use rustix::mount::{MountFlags, mount, mount_bind};

use super::*;

const OWN: [&str; 2] = ["dev", "tmp"];

/// A guest whose root is the directory, with the directories `dev`, `tmp`, `etc`, `home/cache` and `mounted`.
fn guest(mounts: Mounts) -> Guest {
    let mut guest = Guest::with_files(Access::ReadOnly, |root| {
        for folder in ["dev", "tmp", "etc/dev", "home/cache", "mounted"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        for file in ["dev/null", "tmp/secret", "etc/dev/file", "home/cache/secret", "home/file"] {
            fs::write(root.join(file), "content").unwrap();
        }
        symlink("../home/cache/secret", root.join("etc/link")).unwrap();
        symlink("nowhere", root.join("broken")).unwrap();
    });
    open(&mut guest, mounts);
    guest
}

fn open(guest: &mut Guest, mounts: Mounts) {
    let (path, hidden) = (guest.path(""), [guest.path("home/cache"), guest.path("none")]);
    guest.share =
        Share::open_root(&Root { path: &path, mounts, own: &OWN, hidden: &hidden, owners: &[] }, 1).unwrap();
}

/// Returns the names in a directory, which must be the same in both kinds of listings, and found.
fn names(guest: &mut Guest, node: u64) -> Vec<String> {
    let [names, found] = [op::READDIR, op::READDIRPLUS].map(|opcode| {
        let listed = guest.list(node, opcode, 4096).unwrap();
        let is_entry = |name: &[u8]| name != b"." && name != b"..";
        let names = listed.into_iter().filter(|entry| is_entry(&entry.0));
        let mut names: Vec<String> = names.map(|(name, ..)| String::from_utf8(name).unwrap()).collect();
        names.sort();
        names
    });
    assert_eq!(names, found);
    for name in &names {
        let name = std::ffi::CString::new(&**name).unwrap();
        guest.look_up(node, &name).unwrap();
    }
    names
}

#[test]
fn what_the_guest_has_for_itself_does_not_exist_in_its_root() {
    let mut guest = guest(Mounts::Hidden);
    assert_eq!(names(&mut guest, ROOT), ["broken", "etc", "home", "mounted"]);
    for name in [c"dev", c"tmp"] {
        assert_eq!(guest.look_up(ROOT, name), Err(Errno::NOENT));
    }
    let etc = guest.walk(&[c"etc"]).unwrap();
    assert_eq!(names(&mut guest, etc), ["dev", "link"]);
    assert!(guest.walk(&[c"etc", c"dev", c"file"]).is_ok(), "only at the top");
}

#[test]
fn a_hidden_directory_does_not_exist_by_any_name() {
    let mut guest = guest(Mounts::Seen);
    let home = guest.walk(&[c"home"]).unwrap();
    assert_eq!(names(&mut guest, home), ["file"]);
    assert_eq!(guest.look_up(home, c"cache"), Err(Errno::NOENT));
    fs::rename(guest.path("home/cache"), guest.path("etc/renamed")).unwrap();
    assert_eq!(guest.walk(&[c"etc", c"renamed"]), Err(Errno::NOENT));
    for later in ["home/cache", "none"] {
        fs::create_dir(guest.path(later)).unwrap();
    }
    assert_eq!(guest.walk(&[c"home", c"cache"]), Err(Errno::NOENT), "another one at its place");
    assert_eq!(guest.walk(&[c"none"]), Err(Errno::NOENT), "one that was not there yet");
    assert_eq!(names(&mut guest, home), ["file"]);
    assert!(!names(&mut guest, ROOT).contains(&"none".to_owned()));
}

#[test]
fn a_directory_that_the_guest_has_forgotten_is_not_listed() {
    let mut guest = guest(Mounts::Seen);
    let home = guest.walk(&[c"home"]).unwrap();
    let fh = guest.open_directory(home).unwrap();
    let forget = ForgetIn { nlookup: 1 };
    assert!(guest.call_raw(op::FORGET, home, &[forget.as_slice()], 0).is_none());
    for opcode in [op::READDIR, op::READDIRPLUS] {
        assert_eq!(guest.read_directory(home, fh, opcode, 4096).unwrap_err(), Errno::STALE);
    }
}

#[test]
fn a_hidden_directory_is_not_found_again_after_a_snapshot() {
    let mut guest = guest(Mounts::Seen);
    // It is not hidden yet.
    guest.share = Share::open(&guest.path(""), Access::ReadOnly, 1).unwrap();
    let secret = guest.walk(&[c"home", c"cache", c"secret"]).unwrap();
    let device = guest.walk(&[c"dev", c"null"]).unwrap();
    let seen = guest.walk(&[c"home", c"file"]).unwrap();
    let saved = guest.share.save().unwrap();
    open(&mut guest, Mounts::Seen);
    guest.share.restore(&saved).unwrap();
    assert_eq!((guest.open(secret, READ), guest.open(device, READ)), (Err(Errno::STALE), Err(Errno::STALE)));
    assert!(guest.open(seen, READ).is_ok());
}

#[test]
fn a_root_is_read_only() {
    let mut guest = guest(Mounts::Hidden);
    assert_eq!(guest.create(ROOT, c"new", WRITE, 0o600).unwrap_err(), Errno::ROFS);
    let file = guest.walk(&[c"home", c"file"]).unwrap();
    assert_eq!(guest.open(file, WRITE), Err(Errno::ROFS));
    assert!(guest.open(file, READ).is_ok());
}

#[test]
fn the_first_directory_of_a_path_that_is_missing_is_named() {
    let mut guest = guest(Mounts::Hidden);
    let mut missing = |path: &str| guest.share.first_missing(Path::new(path));
    assert_eq!((missing("/"), missing(""), missing("/etc/dev")), (None, None, None));
    assert_eq!(missing("/home/cache/x"), Some("home/cache".into()));
    assert_eq!(missing("etc/none/x"), Some("etc/none".into()));
    assert_eq!(missing("dev"), Some("dev".into()));
    assert_eq!(missing("home/file"), Some("home/file".into()), "it is no directory");
}

#[test]
fn a_root_that_cannot_be_opened_is_reported_with_its_option() {
    let guest = guest(Mounts::Hidden);
    let path = guest.path("home/file");
    let root = Root { path: &path, mounts: Mounts::Hidden, own: &OWN, hidden: &[], owners: &[] };
    let error = Share::open_root(&root, 1).unwrap_err().to_string();
    assert_eq!(error, format!("--root {}: not a directory", path.display()));
}

fn tmpfs(at: &Path) -> rustix::io::Result<()> {
    mount("tmpfs", at, "tmpfs", MountFlags::empty(), None)
}

#[test]
fn a_mount_is_seen_only_if_that_is_wanted() {
    let mut guest = guest(Mounts::Hidden);
    let Some(_mount) = Mount::new(guest.path("mounted"), tmpfs) else { return };
    // Of the same file system, so that only the mount differs.
    let inside = guest.path("home");
    let Some(_bound) = Mount::new(guest.path("etc/dev"), |at| mount_bind(&inside, at)) else { return };
    fs::write(guest.path("mounted/file"), "content").unwrap();
    assert_eq!(names(&mut guest, ROOT), ["broken", "etc", "home"]);
    assert_eq!(guest.look_up(ROOT, c"mounted"), Err(Errno::NOENT));
    assert_eq!(guest.walk(&[c"etc", c"dev"]), Err(Errno::NOENT));
    open(&mut guest, Mounts::Seen);
    assert!(guest.walk(&[c"mounted", c"file"]).is_ok() && guest.walk(&[c"etc", c"dev", c"file"]).is_ok());
    assert_eq!(guest.walk(&[c"etc", c"dev", c"cache"]), Err(Errno::NOENT), "hidden by this path, too");
}

#[test]
fn what_a_kernel_shows_of_itself_and_device_nodes_are_not_seen_wherever_they_are_mounted() {
    let mut guest = guest(Mounts::Seen);
    let kernels = ["proc", "sysfs"];
    for kind in kernels {
        let kernels = |at: &Path| mount(kind, at, kind, MountFlags::empty(), None);
        let Some(_mount) = Mount::new(guest.path("mounted"), kernels) else { return };
        assert_eq!(guest.look_up(ROOT, c"mounted"), Err(Errno::NOENT), "{kind}");
        assert!(!names(&mut guest, ROOT).contains(&"mounted".to_owned()));
    }
    let Some(_devices) = Mount::new(guest.path("dev"), tmpfs) else { return };
    let devices = guest.path("dev");
    let Some(_bound) = Mount::new(guest.path("mounted"), |at| mount_bind(&devices, at)) else { return };
    open(&mut guest, Mounts::Seen);
    assert_eq!(guest.look_up(ROOT, c"mounted"), Err(Errno::NOENT));
}

#[test]
fn a_file_that_the_user_cannot_read_stays_unreadable() {
    let mut guest = guest(Mounts::Hidden);
    let closed = guest.path("etc/dev/file");
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o0)).unwrap();
    if fs::read(&closed).is_ok() {
        eprintln!("not tested: this user reads everything");
        return;
    }
    let node = guest.walk(&[c"etc", c"dev", c"file"]).unwrap();
    assert_eq!(guest.open(node, READ), Err(Errno::ACCESS));
}

/// Lets a tenth of a second pass, for which names are not looked for again.
fn wait() {
    std::thread::sleep(std::time::Duration::from_millis(150));
}

#[test]
fn a_name_stays_a_node_whatever_has_it_on_the_host() {
    let mut guest = guest(Mounts::Hidden);
    let (home, file) = (guest.walk(&[c"home"]).unwrap(), guest.walk(&[c"home", c"file"]).unwrap());
    wait();
    fs::write(guest.path("home/next"), "another").unwrap();
    fs::rename(guest.path("home/next"), guest.path("home/file")).unwrap();
    let content = |guest: &mut Guest| {
        let fh = guest.open(file, READ)?;
        let content = guest.read(file, fh, 0, 100);
        guest.release(file, fh)?;
        content
    };
    assert_eq!(content(&mut guest).unwrap(), b"another");
    assert_eq!(guest.attributes(file).unwrap().size, 7);
    assert_eq!(guest.look_up(home, c"file").unwrap().nodeid, file);

    fs::remove_file(guest.path("home/file")).unwrap();
    wait();
    assert_eq!(guest.attributes(file), Err(Errno::NOENT));
    assert_eq!((content(&mut guest), guest.look_up(home, c"file")), (Err(Errno::NOENT), Err(Errno::NOENT)));

    // All of the directory is made anew.
    fs::remove_dir_all(guest.path("home")).unwrap();
    fs::create_dir(guest.path("home")).unwrap();
    fs::write(guest.path("home/file"), "made anew").unwrap();
    wait();
    assert_eq!(content(&mut guest).unwrap(), b"made anew");
    assert_eq!(names(&mut guest, home), ["file"]);
}

#[test]
fn a_file_that_is_open_stays_the_same_until_it_is_closed() {
    let mut guest = guest(Mounts::Hidden);
    let file = guest.walk(&[c"home", c"file"]).unwrap();
    let fh = guest.open(file, READ).unwrap();
    fs::write(guest.path("home/next"), "another").unwrap();
    fs::rename(guest.path("home/next"), guest.path("home/file")).unwrap();
    wait();
    let other = guest.open(file, READ).unwrap();
    assert_eq!(guest.walk(&[c"home", c"file"]).unwrap(), file);
    assert_eq!(
        (guest.read(file, fh, 0, 100).unwrap(), guest.read(file, other, 0, 100).unwrap()),
        (b"content".to_vec(), b"content".to_vec())
    );
    guest.release(file, fh).unwrap();
    guest.release(file, other).unwrap();
    let fh = guest.open(file, READ).unwrap();
    assert_eq!(guest.read(file, fh, 0, 100).unwrap(), b"another");
}

#[test]
fn the_guest_keeps_what_it_has_of_a_file_that_does_not_change() {
    let mut guest = guest(Mounts::Hidden);
    guest.share.server.kept.settled = std::time::Duration::from_secs(2);
    let file = guest.walk(&[c"home", c"file"]).unwrap();
    let keeps = |guest: &mut Guest| {
        let reply = guest.call(op::OPEN, file, &[OpenIn::default().as_slice()]).unwrap();
        let OpenOut { fh, open_flags, .. } = decode(&reply);
        guest.release(file, fh).unwrap();
        open_flags == KEEP_CACHE
    };
    // Another change could have the same time.
    assert_eq!((keeps(&mut guest), keeps(&mut guest)), (false, false));
    std::thread::sleep(std::time::Duration::from_millis(2100));
    assert_eq!((keeps(&mut guest), keeps(&mut guest)), (false, true));
    fs::write(guest.path("home/file"), "CONTENT").unwrap();
    assert!(!keeps(&mut guest));
    std::thread::sleep(std::time::Duration::from_millis(2100));
    assert_eq!((keeps(&mut guest), keeps(&mut guest)), (false, true));
    // The same size, and the same time of the last change of the content.
    let times = fs::File::open(guest.path("home/file")).unwrap().metadata().unwrap().modified().unwrap();
    fs::write(guest.path("home/file"), "another").unwrap();
    fs::File::options().write(true).open(guest.path("home/file")).unwrap().set_modified(times).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(2100));
    assert!(!keeps(&mut guest));
}

#[test]
fn a_file_that_becomes_a_directory_is_another_node() {
    let mut guest = guest(Mounts::Hidden);
    let file = guest.walk(&[c"home", c"file"]).unwrap();
    fs::remove_file(guest.path("home/file")).unwrap();
    fs::create_dir(guest.path("home/file")).unwrap();
    wait();
    assert_eq!(guest.attributes(file), Err(Errno::STALE));
    let directory = guest.walk(&[c"home", c"file"]).unwrap();
    assert_ne!(directory, file);
    assert_eq!(guest.attributes(directory).unwrap().mode & 0o170_000, 0o040_000);
}

#[test]
fn links_to_an_inode_are_nodes_of_their_own() {
    let mut guest = guest(Mounts::Hidden);
    fs::hard_link(guest.path("home/file"), guest.path("etc/other")).unwrap();
    let (one, other) = (guest.walk(&[c"home", c"file"]).unwrap(), guest.walk(&[c"etc", c"other"]).unwrap());
    assert_ne!(one, other);
    assert_eq!(guest.attributes(one).unwrap().ino, guest.attributes(other).unwrap().ino);
    assert_eq!(guest.walk(&[c"home", c"file"]).unwrap(), one);
}

#[test]
fn what_takes_the_place_of_another_may_be_hidden() {
    let mut guest = guest(Mounts::Hidden);
    let folder = guest.walk(&[c"etc", c"dev"]).unwrap();
    fs::rename(guest.path("etc/dev"), guest.path("etc/away")).unwrap();
    fs::rename(guest.path("home/cache"), guest.path("etc/dev")).unwrap();
    wait();
    assert_eq!(guest.attributes(folder), Err(Errno::NOENT));
    assert_eq!(guest.look_up(folder, c"secret"), Err(Errno::NOENT));
}
