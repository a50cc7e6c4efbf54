//! A host that moves things in and out of the share while a guest tries to get out with them.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::*;

const SECRET: &[u8] = b"outside";

fn guest() -> Guest {
    Guest::with_files(Access::ReadWrite, |share| {
        fs::create_dir_all(share.join("dir/sub")).unwrap();
        fs::write(share.join("dir/sub/file"), "inside").unwrap();
        // Things outside with the names of those inside, for a server that followed a path to find them.
        let outside = share.join("../outside");
        fs::create_dir_all(outside.join("sub")).unwrap();
        fs::write(outside.join("sub/file"), SECRET).unwrap();
        symlink("../outside", share.join("link")).unwrap();
    })
}

#[test]
fn a_folder_that_the_host_moves_out_leads_nowhere_else() {
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
fn links_out_of_the_share_lead_nowhere() {
    let mut guest = guest();
    let link = guest.walk(&[c"link"]).unwrap();
    assert_eq!(guest.look_up(link, c"sub"), Err(Errno::NOTDIR));
    assert_eq!(guest.create(link, c"new", WRITE, 0o600).unwrap_err(), Errno::NOTDIR);
    let input = RenameIn { newdir: link };
    let out = guest.ask(op::RENAME, ROOT, &[input.as_slice(), b"dir\0dir\0"]);
    assert_eq!(out, Err(Errno::NOTDIR));
    assert_eq!(guest.ask(op::UNLINK, link, &[b"sub\0"]), Err(Errno::NOTDIR));
}

/// One try to reach what is outside: by names that may change at any time, and by those that lead up.
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

/// Raises a flag when it goes, so that nobody waits for a thread that has failed.
struct Raise<'a>(&'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_race_with_the_host_leads_out() {
    let mut guest = guest();
    // So few descriptors that things are found again and again.
    let limits = Limits { nodes: 1000, descriptors: 4 };
    guest.share = Share::with_limits(&guest.path(""), Access::ReadWrite, limits).unwrap();
    let (dir, link) = (guest.path("dir"), guest.path("link"));
    let away = guest.dir.path().join("outside/dir");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let attacker = scope.spawn(|| {
            let _at_the_end = Raise(&over);
            let (mut read, mut missed) = (0, 0);
            while read < 1000 || missed < 1000 {
                match attack(&mut guest) {
                    Some(text) => {
                        assert_eq!(text, b"inside");
                        read += 1;
                    }
                    None => missed += 1,
                }
            }
        });
        while !over.load(Ordering::Relaxed) {
            fs::rename(&dir, &away).unwrap();
            fs::rename(&away, &dir).unwrap();
            // The folder is a link to what is outside, and a folder again.
            for _ in 0..2 {
                renameat_with(CWD, &dir, CWD, &link, RenameFlags::EXCHANGE).unwrap();
            }
        }
        attacker.join().unwrap();
    });
    assert_eq!(attack(&mut guest).unwrap(), b"inside");
}
