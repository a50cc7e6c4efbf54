//! Attempts to leave the share while the host moves directories in and out of it.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::*;

const SECRET: &[u8] = b"outside";

fn guest() -> Guest {
    Guest::with_files(Access::ReadWrite, |share| {
        fs::create_dir_all(share.join("dir/sub")).unwrap();
        fs::write(share.join("dir/sub/file"), "inside").unwrap();
        // Files outside with the same names as those inside. A server that resolved paths would find these.
        let outside = share.join("../outside");
        fs::create_dir_all(outside.join("sub")).unwrap();
        fs::write(outside.join("sub/file"), SECRET).unwrap();
        symlink("../outside", share.join("link")).unwrap();
    })
}

#[test]
fn a_directory_that_the_host_moves_out_gives_no_access_to_its_new_parent() {
    let mut guest = guest();
    let dir = guest.walk(&[c"dir"]).unwrap();
    fs::rename(guest.path("dir"), guest.dir.path().join("outside/dir")).unwrap();
    assert_eq!(guest.look_up(ROOT, c"dir"), Err(Errno::NOENT));
    for up in [c"..", c".", c"../canary", c"../sub", c"/etc"] {
        assert_eq!(guest.look_up(dir, up), Err(Errno::INVAL));
        assert_eq!(guest.create(dir, up, WRITE, 0o600).unwrap_err(), Errno::INVAL);
    }
    for name in [c"canary", c"outside"] {
        assert_eq!(guest.look_up(dir, name), Err(Errno::NOENT));
    }
}

#[test]
fn symbolic_links_out_of_the_share_are_not_followed() {
    let mut guest = guest();
    let link = guest.walk(&[c"link"]).unwrap();
    assert_eq!(guest.look_up(link, c"sub"), Err(Errno::NOTDIR));
    assert_eq!(guest.create(link, c"new", WRITE, 0o600).unwrap_err(), Errno::NOTDIR);
    let input = RenameIn { newdir: link };
    let out = guest.call(op::RENAME, ROOT, &[input.as_slice(), b"dir\0dir\0"]);
    assert_eq!(out, Err(Errno::NOTDIR));
    assert_eq!(guest.call(op::UNLINK, link, &[b"sub\0"]), Err(Errno::NOTDIR));
}

/// Tries to reach files outside of the share, by `..` and by names that the host changes concurrently.
fn attack(guest: &mut Guest) -> Option<Vec<u8>> {
    let dir = guest.walk(&[c"dir"]).ok()?;
    assert_eq!(guest.look_up(dir, c".."), Err(Errno::INVAL));
    for name in [c"canary", c"outside"] {
        assert!(guest.look_up(dir, name).is_err());
    }
    for (name, ..) in guest.list(dir, op::READDIRPLUS, 4096).unwrap_or_default() {
        assert!(matches!(name.as_slice(), b"." | b".." | b"sub"), "{name:?}");
    }
    let sub = guest.look_up(dir, c"sub").ok()?.nodeid;
    assert_eq!(guest.look_up(sub, c".."), Err(Errno::INVAL));
    let file = guest.look_up(sub, c"file").ok()?.nodeid;
    let fh = guest.open(file, READ).ok()?;
    let text = guest.read(file, fh, 0, 100);
    guest.release(file, fh).unwrap();
    text.ok()
}

/// Sets a flag when dropped, also by a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_race_with_the_host_gives_access_outside_of_the_share() {
    let mut guest = guest();
    // Few descriptors, so that nodes are often closed and opened again.
    let limits = Limits { nodes: 1000, descriptors: 4, ..MEMORY };
    guest.share = Share::with_limits(&guest.path(""), Access::ReadWrite, everything, limits).unwrap();
    let (dir, link) = (guest.path("dir"), guest.path("link"));
    let away = guest.dir.path().join("outside/dir");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let attacker = scope.spawn(|| {
            let _stop_at_end = SetOnDrop(&is_over);
            let (mut successes, mut failures) = (0, 0);
            while successes < 1000 || failures < 1000 {
                match attack(&mut guest) {
                    Some(text) => {
                        assert_eq!(text, b"inside");
                        successes += 1;
                    }
                    None => failures += 1,
                }
            }
        });
        while !is_over.load(Ordering::Relaxed) {
            fs::rename(&dir, &away).unwrap();
            fs::rename(&away, &dir).unwrap();
            // Replaces the directory by a symbolic link to the outside, and back.
            for _ in 0..2 {
                renameat_with(CWD, &dir, CWD, &link, RenameFlags::EXCHANGE).unwrap();
            }
        }
        attacker.join().unwrap();
    });
    assert_eq!(attack(&mut guest).unwrap(), b"inside");
}
