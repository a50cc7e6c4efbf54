//! A folder of the host's, shared with a guest: a FUSE server, as virtio-fs carries it (Linux 5.4 and later; no DAX).
//!
//! The one thing to know: the guest is not trusted, and neither is what the host has in the folder. Requests are bytes that are checked
//! one by one, and things are found as [`host`] describes, so no request reaches anything outside the folder, except
//! what the host moves out of it while the guest holds it: that the guest keeps, as any process would, but not what lies
//! above or beside it. Mounts inside the folder belong to it, but for the kernel's process table.
//!
//! **What the guest sees.** What belongs to the user who runs this program belongs to root there (the same for the group), so that
//! git and perf take it for the guest's own; everything else has its owner's number. What the guest makes belongs to that
//! user, whoever made it in the guest, with the access bits that both umasks leave. Owners cannot be changed, set-user-ID and
//! set-group-ID bits not be set, and those of a file that the guest opens for writing are taken away. Device
//! nodes and sockets cannot be made, and nothing but regular files and folders can be opened here: pipes and devices a
//! guest's kernel opens itself, as its own. Symbolic links are text to the server; the guest follows them among its own files.
//!
//! **How old it may be.** The guest believes names and attributes for one second. What it has cached of a file it drops when
//! the file is opened, and when its size or time of change turns out to be another one. Writes go to the host at once. Locks are
//! the guest's own.
//!
//! **How much the guest may take.** Of the host's descriptors (`RLIMIT_NOFILE` when the share was opened) all shares of a guest
//! together take a quarter at most, and each has an equal part of that: half for what is open there, half for what the guest
//! knows (see [`nodes`]). It may know a million things. Beyond that it gets ENFILE. A mebibyte of memory holds an answer,
//! and some hundred bytes each thing that it knows. Of the disk, what its user may take.

use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use vm_memory::ByteValued;

mod attributes;
mod files;
mod folders;
mod handles;
mod host;
mod message;
mod names;
mod nodes;
#[cfg(test)]
mod tests;
mod wire;

use crate::Access;

use attributes::Owner;
use folders::Entries;
use handles::Handles;
use host::{Host, Writable};
use message::{Body, MOST, Reply};
use nodes::{Limits, Nodes};
use wire::{InHeader, InitIn, InitOut, init, op};

/// Why a folder cannot be shared.
#[derive(Debug, thiserror::Error)]
#[error("--share {}: {why}", path.display())]
pub struct ShareError {
    path: PathBuf,
    why: Why,
}

#[derive(Debug, thiserror::Error)]
enum Why {
    #[error("no such directory")]
    Missing,
    #[error("not a directory")]
    NotDirectory,
    #[error("permission denied; its user must be able to list and enter it")]
    Denied,
    #[error("the kernel's process table cannot be shared")]
    ProcessTable,
    #[error("sharing needs /proc, which is not mounted here")]
    NoProc,
    #[error("sharing needs the system call openat2: Linux 5.6 or later, and a container that allows it")]
    NoOpenat2,
    #[error(transparent)]
    Other(#[from] Errno),
}

/// A folder that is shared.
#[derive(Debug)]
pub struct Share {
    server: Server,
    reply: Reply,
}

/// All that a request works with.
#[derive(Debug)]
struct Server {
    access: Access,
    owner: Owner,
    host: Host,
    nodes: Nodes,
    handles: Handles,
}

/// Whether the guest waits for an answer.
enum Answer {
    Wanted(Result<(), Errno>),
    None,
}

/// The first protocol with all that is relied on: Linux 5.4's.
const VERSION: (u32, u32) = (7, 31);
const PAGE: usize = 4096;
const MOST_NODES: usize = 1 << 20;

impl Share {
    /// The longest request: a WRITE, or two names, with what goes before it.
    pub const LONGEST_REQUEST: usize = MOST + 2 * PAGE;

    /// Shares a folder with a guest that is given so many.
    pub fn open(path: &Path, access: Access, shares: usize) -> Result<Self, ShareError> {
        let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let limits = Limits { nodes: MOST_NODES, descriptors: part(most, shares) };
        Self::with_limits(path, access, limits).map_err(|why| ShareError { path: path.into(), why })
    }

    fn with_limits(path: &Path, access: Access, limits: Limits) -> Result<Self, Why> {
        let root = Host::folder(path).map_err(|errno| match errno {
            Errno::NOENT => Why::Missing,
            Errno::NOTDIR => Why::NotDirectory,
            Errno::ACCESS => Why::Denied,
            other => Why::Other(other),
        })?;
        let host = Host::new().map_err(|_| Why::NoProc)?;
        if host::is_proc(&root)? {
            return Err(Why::ProcessTable);
        }
        host.access(&root, rustix::fs::Access::READ_OK | rustix::fs::Access::EXEC_OK)
            .map_err(|_| Why::Denied)?;
        Host::can_find(&root).map_err(|_| Why::NoOpenat2)?;
        let server = Server {
            access,
            owner: Owner::current(),
            host,
            nodes: Nodes::new(root, limits)?,
            handles: Handles::new(limits.descriptors / Handles::DESCRIPTORS),
        };
        Ok(Self { server, reply: Reply::new() })
    }

    /// Forgets all that the guest knows and has open, for it has started anew.
    pub fn reset(&mut self) {
        self.server.reset();
    }

    /// Answers a request. The answer has at most `room` bytes, and none if the guest waits for none.
    pub fn serve(&mut self, request: &[u8], room: usize) -> &[u8] {
        let mut body = Body(request);
        let Ok(header) = body.take::<InHeader>() else { return &[] };
        self.reply.begin(room);
        let answer = match request.get(size_of::<InHeader>()..header.len as usize) {
            Some(body) => self.server.serve(&header, &mut Body(body), &mut self.reply),
            None => Answer::Wanted(Err(Errno::INVAL)),
        };
        match answer {
            Answer::Wanted(result) => self.reply.end(header.unique, result),
            Answer::None => &[],
        }
    }
}

/// How many descriptors one share has for what is open, and for what is known, where the process may have so many.
fn part(most: u64, shares: usize) -> usize {
    let part = usize::try_from(most / 8).unwrap_or(usize::MAX) / shares.max(1);
    // A path is followed with one descriptor in use and one to come.
    part.clamp(8, 1 << 16)
}

impl Server {
    /// The proof that the guest may change the share, or its error.
    fn writable(&self) -> Result<Writable, Errno> {
        Writable::by(self.access)
    }

    fn reset(&mut self) {
        self.handles.clear();
        self.nodes.clear();
    }

    fn serve(&mut self, header: &InHeader, body: &mut Body, reply: &mut Reply) -> Answer {
        let node = header.nodeid;
        Answer::Wanted(match header.opcode {
            // A guest is told of no error in these: there is nothing that it could do.
            op::FORGET => {
                let _ = self.forget(node, body);
                return Answer::None;
            }
            op::BATCH_FORGET => {
                let _ = self.forget_many(body);
                return Answer::None;
            }
            // Each request is served before the next one is looked at: none can be interrupted.
            op::INTERRUPT => return Answer::None,
            op::INIT => self.init(body, reply),
            op::DESTROY => {
                self.reset();
                Ok(())
            }
            op::LOOKUP => self.look_up(node, body, reply),
            op::GETATTR => self.get_attributes(node, body, reply),
            op::SETATTR => self.set_attributes(node, body, reply),
            op::READLINK => self.read_link(node, reply),
            op::SYMLINK => self.make_symlink(node, body, reply),
            op::MKNOD => self.make_node(node, body, reply),
            op::MKDIR => self.make_folder(node, body, reply),
            op::LINK => self.make_link(node, body, reply),
            op::UNLINK => self.remove(node, body),
            op::RMDIR => self.remove_folder(node, body),
            op::RENAME => self.rename(node, body),
            op::RENAME2 => self.rename_as(node, body),
            op::OPEN => self.open(node, body, reply),
            op::CREATE => self.create(node, body, reply),
            op::READ => self.read(node, body, reply),
            op::WRITE => self.write(node, body, reply),
            op::FSYNC => self.sync(node, body),
            op::FALLOCATE => self.allocate(node, body),
            op::LSEEK => self.seek(node, body, reply),
            op::RELEASE | op::RELEASEDIR => self.release(body),
            op::OPENDIR => self.open_folder(node, reply),
            op::READDIR => self.read_folder(node, Entries::Names, body, reply),
            op::READDIRPLUS => self.read_folder(node, Entries::NamesAndAttributes, body, reply),
            op::FSYNCDIR => self.sync_folder(node, body),
            op::ACCESS => self.may_access(node, body),
            op::STATFS => self.file_system(node, reply),
            // FLUSH among them: writes are with the host already, and a guest that is told this does not ask again.
            _ => Err(Errno::NOSYS),
        })
    }

    /// The guest has mounted the share, perhaps not for the first time.
    fn init(&mut self, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let input: InitIn = body.take()?;
        if (input.major, input.minor) < VERSION {
            return Err(Errno::PROTO);
        }
        self.reset();
        let wanted = init::ASYNC_READ
            | init::BIG_WRITES
            | init::AUTO_INVAL_DATA
            | init::DO_READDIRPLUS
            | init::READDIRPLUS_AUTO
            | init::PARALLEL_DIROPS
            | init::MAX_PAGES;
        let answer = InitOut {
            major: VERSION.0,
            minor: VERSION.1,
            max_readahead: input.max_readahead,
            flags: input.flags & wanted,
            max_write: u32::try_from(MOST).expect("it is small"),
            time_gran: 1,
            max_pages: u16::try_from(MOST / PAGE).expect("it is small"),
            ..InitOut::default()
        };
        reply.put(answer.as_slice())
    }
}
