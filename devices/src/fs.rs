//! A directory of the host that is shared with a guest: a FUSE server for virtio-fs (Linux 5.4 and later, without DAX).
//!
//! **Security.** Neither the guest nor the content of the directory is trusted. Every field of a request is checked,
//! and inodes are found as [`host`] describes, so that no request reaches anything outside of the directory. There is
//! one exception: if the host moves an inode out of the directory while the guest has a reference to it, the guest
//! keeps access to that inode, as any process would. It does not get access to what is above or beside the inode.
//! Mounts inside of the directory are shared too, except for procfs. Of a directory that becomes a guest's root, the
//! guest does not see some things ([`view`]).
//!
//! **Owners and types.** Files of the user and of the group that run this program belong to root in the guest, so that
//! git and perf treat them as the guest's own. Other files keep their numeric IDs. Files that the guest creates belong
//! to the user who runs this program, regardless of the guest's user, with the permissions that both umasks leave. The
//! guest cannot change owners and cannot set the set-user-ID and set-group-ID bits. A file loses these bits when the
//! guest opens it for writing. The guest cannot create device nodes and sockets. The server only opens regular files
//! and directories; the guest's kernel opens FIFOs and device nodes itself, as its own. The server never follows
//! symbolic links; the guest resolves them in its own namespace.
//!
//! **Caching.** The guest caches names and attributes for one second. It drops the cached data of a file when it opens
//! the file, and when it sees that the size or the time of the last change differs. Of a root's files, it keeps what
//! has not changed since it last opened them ([`kept`]). Writes reach the host at once. Locks are local to the guest.
//!
//! **Limits.** All shares of a guest together use at most a quarter of the file descriptors that the process may have
//! (`RLIMIT_NOFILE` when the share is opened). Each share gets an equal part: half of that for open files and
//! directories, half for inodes that the guest has looked up (see [`nodes`]). All shares of a guest together remember
//! at most 262,144 inodes, in less than 40 MiB of memory; beyond that, inodes that the guest has not used for long are
//! evicted. Requests for which a limit leaves no room fail with ENFILE, before anything is created. The reply buffer
//! takes one mebibyte of memory. Disk space is limited by what the user who runs this program may use.

use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use vm_memory::ByteValued;

mod attributes;
mod files;
mod folders;
mod handles;
mod host;
mod kept;
mod message;
mod names;
mod nodes;
mod state;
#[cfg(test)]
mod tests;
mod transfer;
mod view;
mod wire;

use crate::access::Access;
use crate::state::DeviceError;

pub use attributes::FileOwner;
use attributes::Owner;
use folders::Entries;
use handles::Handles;
use host::{Host, PathFd, Writable};
use kept::Kept;
use message::{Body, MAX_TRANSFER, Reply};
use nodes::{Limits, Nodes};
pub use state::ShareState;
pub use transfer::Transfer;
use view::View;
pub use view::{Mounts, Root, is_of_a_kernel};
use wire::{InHeader, InitIn, InitOut, ROOT, init, op};

/// Error: a directory cannot be shared.
#[derive(Debug, thiserror::Error)]
#[error("{option} {}: {cause}", path.display())]
pub struct ShareError {
    option: &'static str,
    path: PathBuf,
    cause: Cause,
}

#[derive(Debug, thiserror::Error)]
enum Cause {
    #[error("no such directory")]
    Missing,
    #[error("not a directory")]
    NotDirectory,
    #[error("permission denied: the user who runs this program must be able to list and enter the directory")]
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

/// A shared directory.
#[derive(Debug)]
pub struct Share {
    server: Server,
    reply: Reply,
    held: Option<std::fs::File>,
}

/// The state that requests work on.
#[derive(Debug)]
struct Server {
    access: Access,
    owner: Owner,
    host: Host,
    nodes: Nodes,
    handles: Handles,
    kept: Kept,
}

/// Outcome of a request.
enum Response {
    /// The guest waits for this reply.
    Reply(Result<(), Errno>),
    /// The guest does not wait for a reply.
    NoReply,
}

/// The oldest supported version of the protocol, that of Linux 5.4.
const VERSION: (u32, u32) = (7, 31);
const PAGE: usize = 4096;
/// Limits for what all shares of a guest remember.
const MEMORY: Limits = Limits { nodes: 1 << 18, name_bytes: 12 << 20, descriptors: usize::MAX };

impl Share {
    /// Maximum length of a request: a WRITE or two names, and the headers.
    pub const MAX_REQUEST: usize = MAX_TRANSFER + 2 * PAGE;

    /// Shares a directory with a guest. `shares` is the number of shares of that guest.
    pub fn open(path: &Path, access: Access, shares: usize) -> Result<Self, ShareError> {
        let everything = |_: &PathFd| Ok(View::of_everything());
        Self::with_limits(path, access, everything, limits(shares)).map_err(|cause| ShareError {
            option: "--share",
            path: path.into(),
            cause,
        })
    }

    /// Shares a directory that becomes the guest's root, to be read only. `shares` is the number of shares of that
    /// guest, with this one.
    pub fn open_root(root: &Root, shares: usize) -> Result<Self, ShareError> {
        let view = |opened: &PathFd| View::of_root(root, opened);
        let share = Self::with_limits(root.path, Access::ReadOnly, view, limits(shares));
        let with_owners = |mut share: Self| {
            let opened = share.server.nodes.path_fd(ROOT)?;
            share.server.owner.keep(&opened, root.owners.to_vec())?;
            Ok(share)
        };
        share.and_then(with_owners).map_err(|cause| ShareError {
            option: "--root",
            path: root.path.into(),
            cause,
        })
    }

    /// Returns the first part of a path in the directory at which the guest finds no directory, if there is one. Must
    /// be called before the guest uses the share.
    pub fn first_missing(&mut self, path: &Path) -> Option<PathBuf> {
        let missing = self.server.first_missing(path);
        self.server.reset();
        missing
    }

    fn with_limits(
        path: &Path,
        access: Access,
        view: impl FnOnce(&PathFd) -> Result<View, Errno>,
        limits: Limits,
    ) -> Result<Self, Cause> {
        let root = Host::open_root(path).map_err(|errno| match errno {
            Errno::NOENT => Cause::Missing,
            Errno::NOTDIR => Cause::NotDirectory,
            Errno::ACCESS => Cause::Denied,
            other => Cause::Other(other),
        })?;
        let host = Host::new().map_err(|_| Cause::NoProc)?;
        if host::is_proc(&root)? {
            return Err(Cause::ProcessTable);
        }
        host.access(&root, rustix::fs::Access::READ_OK | rustix::fs::Access::EXEC_OK)
            .map_err(|_| Cause::Denied)?;
        Host::check_openat2(&root).map_err(|_| Cause::NoOpenat2)?;
        let view = view(&root)?;
        let server = Server {
            access,
            owner: Owner::current(),
            host,
            nodes: Nodes::new(root, view, limits)?,
            handles: Handles::new(limits.descriptors / Handles::DESCRIPTORS),
            kept: Kept::default(),
        };
        Ok(Self { server, reply: Reply::new(), held: None })
    }

    /// Keeps a file open as long as the share is, for its lock.
    pub fn hold(&mut self, file: std::fs::File) {
        self.held = Some(file);
    }

    /// Drops all inodes and handles of the guest, after the guest has restarted.
    pub fn reset(&mut self) {
        self.server.reset();
    }

    /// Returns what the guest has looked up and opened, for a snapshot.
    pub fn save(&mut self) -> Result<ShareState, DeviceError> {
        self.server.save()
    }

    /// Restores what the guest has looked up and opened, by the paths at which it was.
    pub fn restore(&mut self, saved: &ShareState) -> Result<(), DeviceError> {
        self.server.restore(saved)
    }

    /// Processes a request. Returns the reply, which has at most `max_len` bytes, or nothing if the guest waits for no
    /// reply.
    pub fn serve(&mut self, request: &[u8], max_len: usize) -> &[u8] {
        let mut body = Body(request);
        let Ok(header) = body.take::<InHeader>() else { return &[] };
        self.reply.begin(max_len);
        let response = match request.get(size_of::<InHeader>()..header.len as usize) {
            Some(body) => self.server.serve(&header, &mut Body(body), &mut self.reply),
            None => Response::Reply(Err(Errno::INVAL)),
        };
        match response {
            Response::Reply(result) => self.reply.finish(header.unique, result),
            Response::NoReply => &[],
        }
    }
}

/// Returns the limits for each of this number of shares.
fn limits(shares: usize) -> Limits {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    Limits {
        nodes: MEMORY.nodes / shares.max(1),
        name_bytes: MEMORY.name_bytes / shares.max(1),
        descriptors: descriptors_per_share(limit, shares),
    }
}

/// Returns the number of file descriptors that one share may use for handles, and again for inodes, if the process is
/// limited to `limit`.
fn descriptors_per_share(limit: u64, shares: usize) -> usize {
    let count = usize::try_from(limit / 8).unwrap_or(usize::MAX) / shares.max(1);
    // At least 8: walking down a path needs one descriptor for the directory and one for the entry that is opened.
    count.clamp(8, 1 << 16)
}

impl Server {
    /// Returns the token that operations that change the share require, or the error for the guest.
    fn writable(&self) -> Result<Writable, Errno> {
        Writable::from_access(self.access)
    }

    fn reset(&mut self) {
        self.handles.clear();
        self.nodes.clear();
        self.kept.clear();
    }

    fn serve(&mut self, header: &InHeader, body: &mut Body, reply: &mut Reply) -> Response {
        let node = header.nodeid;
        Response::Reply(match header.opcode {
            // FORGET and BATCH_FORGET have no reply, so errors are ignored.
            op::FORGET => {
                let _ = self.forget(node, body);
                return Response::NoReply;
            }
            op::BATCH_FORGET => {
                let _ = self.batch_forget(body);
                return Response::NoReply;
            }
            // Requests are processed one after the other, so the one to be interrupted has been processed already.
            op::INTERRUPT => return Response::NoReply,
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
            op::MKDIR => self.make_directory(node, body, reply),
            op::LINK => self.make_link(node, body, reply),
            op::UNLINK => self.remove(node, body),
            op::RMDIR => self.remove_directory(node, body),
            op::RENAME => self.rename(node, body),
            op::RENAME2 => self.rename2(node, body),
            op::OPEN => self.open(node, body, reply),
            op::CREATE => self.create(node, body, reply),
            op::READ => self.read(header, body, reply),
            op::WRITE => self.write(header, body, reply),
            op::FSYNC => self.sync(node, body),
            op::FALLOCATE => self.allocate(node, body),
            op::LSEEK => self.seek(node, body, reply),
            op::RELEASE | op::RELEASEDIR => self.release(body),
            op::OPENDIR => self.open_directory(node, reply),
            op::READDIR => self.read_directory(node, Entries::Names, body, reply),
            op::READDIRPLUS => self.read_directory(node, Entries::NamesAndAttributes, body, reply),
            op::FSYNCDIR => self.sync_directory(node, body),
            op::ACCESS => self.check_access(node, body),
            op::STATFS => self.stat_file_system(node, reply),
            // This includes FLUSH: writes are not buffered. After ENOSYS, the guest does not send such a request again.
            _ => Err(Errno::NOSYS),
        })
    }

    /// Handles INIT, which the guest sends at each mount.
    fn init(&mut self, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let input: InitIn = body.take()?;
        if (input.major, input.minor) < VERSION {
            return Err(Errno::PROTO);
        }
        self.reset();
        let supported = init::ASYNC_READ
            | init::BIG_WRITES
            | init::AUTO_INVAL_DATA
            | init::DO_READDIRPLUS
            | init::READDIRPLUS_AUTO
            | init::PARALLEL_DIROPS
            | init::MAX_PAGES;
        let output = InitOut {
            major: VERSION.0,
            minor: VERSION.1,
            max_readahead: input.max_readahead,
            flags: input.flags & supported,
            max_write: u32::try_from(MAX_TRANSFER).expect("it is 1 MiB"),
            time_gran: 1,
            max_pages: u16::try_from(MAX_TRANSFER / PAGE).expect("it is 256"),
            ..InitOut::default()
        };
        reply.put(output.as_slice())
    }
}
