//! The things that the guest knows by number.
//!
//! The one thing to know: a number stands for one thing for ever (see [`Identity`]), but its descriptor is only kept while there
//! are few. If it has been closed it is found again, by the name under which the guest last saw it, and has to be the same
//! thing; otherwise the guest gets ESTALE, and looks the name up anew. So a guest may know a million files, and take a few
//! hundred of the host's descriptors.

use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::sync::Arc;

use rustix::fs::Statx;
use rustix::io::Errno;

use super::host::{self, Host, Place};
use super::message::Name;
use super::wire::ROOT;

/// What makes a thing the same thing. The mount tells two views of one folder apart (they may differ in what is allowed), the
/// time of birth a new file from an old one whose inode number it got. Hosts that know no such mount or time say 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Identity {
    mount: u64,
    device: (u32, u32),
    inode: u64,
    born: (i64, u32),
}

impl Identity {
    fn of(stat: &Statx) -> Self {
        Self {
            mount: stat.stx_mnt_id,
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            born: (stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec),
        }
    }

    fn mount_differs(self, other: Self) -> bool {
        (self.mount, self.device) != (other.mount, other.device)
    }
}

#[derive(Debug)]
enum Where {
    /// The share itself.
    Root,
    /// The name, in the folder of that number.
    In(u64, CString),
}

#[derive(Debug)]
struct Node {
    identity: Identity,
    place: Where,
    open: Option<Arc<Place>>,
    /// Whether it was used since somebody last looked for descriptors to close.
    used: bool,
    /// How many answers told the guest of it, less those that it has forgotten.
    lookups: u64,
}

/// How many of what a guest may have. See [`super::Share`].
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub nodes: usize,
    pub descriptors: usize,
}

/// The table.
#[derive(Debug)]
pub struct Nodes {
    limits: Limits,
    known: HashMap<u64, Node>,
    numbers: HashMap<Identity, u64>,
    last: u64,
    /// Whose descriptors are open, the oldest first; some of them may be gone.
    open: VecDeque<u64>,
    /// The host's devices, in the order in which they were met.
    devices: Vec<(u32, u32)>,
}

/// As many names as a path of the longest kind has. Only a host that turns its folders inside out makes more.
const DEEPEST: usize = 2048;

impl Nodes {
    pub fn new(root: Place, limits: Limits) -> Result<Self, Errno> {
        let identity = Identity::of(&host::stat(&root)?);
        let root = Node { identity, place: Where::Root, open: Some(root.into()), used: true, lookups: 0 };
        Ok(Self {
            limits,
            known: HashMap::from([(ROOT, root)]),
            numbers: HashMap::from([(identity, ROOT)]),
            last: ROOT,
            open: VecDeque::new(),
            devices: vec![identity.device],
        })
    }

    /// Forgets all but the share itself, as if the guest had just started. Numbers are not used again even then.
    pub fn clear(&mut self) {
        self.known.retain(|&number, _| number == ROOT);
        self.numbers.retain(|_, &mut number| number == ROOT);
        self.open.clear();
    }

    /// The thing with that number.
    pub fn place(&mut self, number: u64) -> Result<Arc<Place>, Errno> {
        // From the thing up to a folder that is open, and down again.
        let mut closed = Vec::new();
        let mut at = number;
        let mut place = loop {
            let node = self.known.get_mut(&at).ok_or(Errno::STALE)?;
            node.used = true;
            match (&node.open, &node.place) {
                (Some(open), _) => break Arc::clone(open),
                (None, Where::In(folder, _)) if closed.len() < DEEPEST => {
                    closed.push(at);
                    at = *folder;
                }
                (None, _) => return Err(Errno::STALE),
            }
        };
        for number in closed.into_iter().rev() {
            place = self.reopen(number, &place)?;
        }
        Ok(place)
    }

    fn reopen(&mut self, number: u64, folder: &Place) -> Result<Arc<Place>, Errno> {
        self.make_room()?;
        let node = self.known.get_mut(&number).ok_or(Errno::STALE)?;
        let Where::In(_, name) = &node.place else { return Err(Errno::STALE) };
        let place = match Host::find(folder, Name::new(name)?) {
            Err(Errno::NOENT | Errno::NOTDIR) => Err(Errno::STALE),
            found => found,
        }?;
        if Identity::of(&host::stat(&place)?) != node.identity {
            return Err(Errno::STALE);
        }
        let place = Arc::new(place);
        node.open = Some(Arc::clone(&place));
        self.open.push_back(number);
        Ok(place)
    }

    /// Finds what has this name in a folder, and counts that the guest was told of it.
    pub fn look_up(&mut self, folder: u64, name: Name) -> Result<(u64, Statx), Errno> {
        let place = Host::find(&*self.place(folder)?, name)?;
        self.enter(place, folder, name)
    }

    /// Counts that the guest was told of a thing that has this name in a folder.
    pub fn enter(&mut self, place: Place, folder: u64, name: Name) -> Result<(u64, Statx), Errno> {
        let stat = host::stat(&place)?;
        let identity = Identity::of(&stat);
        let parent = self.known.get(&folder).ok_or(Errno::STALE)?;
        // A share may hold other mounts, but not this one: /proc/self there is this program.
        if parent.identity.mount_differs(identity) && host::is_proc(&place)? {
            return Err(Errno::ACCESS);
        }
        let number = self.numbers.get(&identity).copied();
        if number.is_none() && self.known.len() >= self.limits.nodes {
            return Err(Errno::NFILE);
        }
        let closed = number.is_none_or(|number| self.known[&number].open.is_none());
        if closed {
            self.make_room()?;
        }
        let number = number.unwrap_or_else(|| {
            self.last += 1;
            self.numbers.insert(identity, self.last);
            self.last
        });
        let node = self.known.entry(number).or_insert_with(|| Node {
            identity,
            place: Where::In(folder, CString::default()),
            open: None,
            used: true,
            lookups: 0,
        });
        node.lookups = node.lookups.saturating_add(1);
        node.used = true;
        if let Where::In(of, known) = &mut node.place {
            *of = folder;
            if known.as_c_str() != name.as_c_str() {
                name.as_c_str().clone_into(known);
            }
        }
        if closed {
            node.open = Some(place.into());
            self.open.push_back(number);
        }
        Ok((number, stat))
    }

    /// Notes that the guest has given this name to something that it may know.
    pub fn renamed(&mut self, folder: u64, name: Name) -> Result<(), Errno> {
        let place = Host::find(&*self.place(folder)?, name)?;
        let identity = Identity::of(&host::stat(&place)?);
        if let Some(node) = self.numbers.get(&identity).and_then(|number| self.known.get_mut(number))
            && let Where::In(of, known) = &mut node.place
        {
            *of = folder;
            name.as_c_str().clone_into(known);
        }
        Ok(())
    }

    /// The guest has forgotten as many answers.
    pub fn forget(&mut self, number: u64, lookups: u64) {
        let Some(node) = self.known.get_mut(&number) else { return };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0 && number != ROOT {
            let identity = node.identity;
            self.known.remove(&number);
            self.numbers.remove(&identity);
        }
    }

    /// The inode number that the guest is shown. It sees one device: numbers of the share's own are shown as they are, those of others
    /// get the device into their upper bits, so that no two files of two mounts are taken for one.
    pub fn shown_inode(&mut self, device: (u32, u32), inode: u64) -> u64 {
        let index = self.devices.iter().position(|&known| known == device).unwrap_or_else(|| {
            self.devices.push(device);
            self.devices.len() - 1
        });
        inode.wrapping_add((index as u64) << 48)
    }

    /// Sees to it that one more descriptor may be opened. What is in use elsewhere, such as by an open file, is not closed.
    fn make_room(&mut self) -> Result<(), Errno> {
        for _ in 0..2 * self.open.len() {
            if self.open.len() < self.limits.descriptors {
                break;
            }
            let Some(number) = self.open.pop_front() else { break };
            let Some(node) = self.known.get_mut(&number) else { continue };
            let in_use = node.open.as_ref().is_some_and(|place| Arc::strong_count(place) > 1);
            if in_use || node.used {
                node.used = false;
                self.open.push_back(number);
            } else {
                node.open = None;
            }
        }
        if self.open.len() < self.limits.descriptors { Ok(()) } else { Err(Errno::NFILE) }
    }

    /// How many things the guest knows, and how many of them are open.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        (self.known.len(), self.known.values().filter(|node| node.open.is_some()).count())
    }
}
