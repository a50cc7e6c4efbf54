//! Whom a command runs as: a user of the root's, by its own lists of users and groups (passwd(5), group(5)).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Result};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::sys;

const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";
/// The most bytes of these lists that are looked at.
const LONGEST: u64 = 1 << 20;
/// The most groups that a user is in: as many as Linux has room for.
const MOST_GROUPS: usize = 65_536;

/// Whom a command runs as.
#[derive(Debug, PartialEq, Eq)]
pub struct Identity {
    pub user: u32,
    pub home: OsString,
    group: u32,
    /// The other groups that the user is in.
    groups: Vec<u32>,
}

impl Identity {
    /// Finds a user: a name or a number, and perhaps a group's after a colon. The error is for the user.
    pub fn of(text: &OsStr) -> std::result::Result<Self, String> {
        Self::find(text.as_bytes(), &read(USERS), &read(GROUPS))
    }

    fn find(text: &[u8], users: &[u8], groups: &[u8]) -> std::result::Result<Self, String> {
        let mut parts = text.splitn(2, |byte| *byte == b':');
        let (name, group) =
            (parts.next().unwrap_or_default(), parts.next().filter(|group| !group.is_empty()));
        let by_number = number(name);
        let is_named = |user: &Vec<&[u8]>| user.len() > 2 && user.first() == Some(&name);
        let has_number = |user: &Vec<&[u8]>| by_number.is_some() && field(user, 2) == by_number;
        let known = lines(users).find(|user| is_named(user) || has_number(user));
        let user = known.as_ref().map_or_else(|| number(name), |user| field(user, 2));
        let no =
            |what: &str, name: &[u8]| format!("the guest has no {what} {}", String::from_utf8_lossy(name));
        let user = user.ok_or_else(|| no("user", name))?;
        let is_given = group.is_some();
        let own = known.as_ref().and_then(|user| field(user, 3)).unwrap_or(0);
        let group = match group {
            None => own,
            Some(name) => lines(groups)
                .find(|group| group.first() == Some(&name))
                .and_then(|group| field(&group, 2))
                .or_else(|| number(name))
                .ok_or_else(|| no("group", name))?,
        };
        let login = known.as_ref().and_then(|user| user.first()).copied();
        let has_member = |group: &Vec<&[u8]>| {
            let mut members = group.get(3).copied().unwrap_or_default().split(|byte| *byte == b',');
            login.is_some_and(|login| members.any(|member| member == login))
        };
        // Who names a group is in no others.
        let others = lines(groups).filter(|line| !is_given && has_member(line));
        let groups = others.filter_map(|group| field(&group, 2)).take(MOST_GROUPS).collect();
        let home = known.and_then(|user| user.get(5).copied()).filter(|home| !home.is_empty());
        Ok(Self { user, home: OsString::from_vec(home.unwrap_or(b"/").to_vec()), group, groups })
    }

    /// Has a command become this user, when all else is prepared.
    pub fn take_on(&self, command: &mut Command) {
        let (user, group, groups) = (self.user, self.group, self.groups.clone());
        let become_user = move || sys::become_user(user, group, &groups);
        // SAFETY: between fork and exec, it only makes system calls. It neither allocates nor locks.
        unsafe { command.pre_exec(become_user) };
    }
}

/// Reads the beginning of a list. One that is not there is empty.
fn read(path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = |bytes: &mut Vec<u8>| -> Result<usize> { File::open(path)?.take(LONGEST).read_to_end(bytes) };
    let _ = read(&mut bytes);
    bytes
}

/// Returns the fields of each line.
fn lines(list: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    list.split(|byte| *byte == b'\n').map(|line| line.split(|byte| *byte == b':').collect())
}

fn field(fields: &[&[u8]], at: usize) -> Option<u32> {
    number(fields.get(at)?)
}

fn number(text: &[u8]) -> Option<u32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &[u8] =
        b"root:x:0:0:root:/root:/bin/sh\n\n# comment\nweb:x:33:34:Web:/var/www:/bin/false\n\nbroken\n";
    const GROUPS: &[u8] = b"root:x:0:\nwww:x:34:\nlogs:x:40:root,web\ndisk:x:6:web\nx:x:y:web\n";

    fn find(text: &str) -> std::result::Result<Identity, String> {
        Identity::find(text.as_bytes(), USERS, GROUPS)
    }

    fn identity(user: u32, home: &str, group: u32, groups: &[u32]) -> Identity {
        Identity { user, home: home.into(), group, groups: groups.to_vec() }
    }

    #[test]
    fn a_user_is_found_by_name_or_number_and_a_group_too() {
        for (text, expected) in [
            ("web", identity(33, "/var/www", 34, &[40, 6])),
            ("33", identity(33, "/var/www", 34, &[40, 6])),
            ("web:disk", identity(33, "/var/www", 6, &[])),
            ("web:77", identity(33, "/var/www", 77, &[])),
            ("web:", identity(33, "/var/www", 34, &[40, 6])),
            ("1000", identity(1000, "/", 0, &[])),
            ("1000:www", identity(1000, "/", 34, &[])),
            ("root", identity(0, "/root", 0, &[40])),
        ] {
            assert_eq!(find(text), Ok(expected), "{text}");
        }
        assert_eq!(find("nobody"), Err("the guest has no user nobody".into()));
        assert_eq!(find("web:none"), Err("the guest has no group none".into()));
        assert_eq!(find(""), Err("the guest has no user ".into()));
    }
}
