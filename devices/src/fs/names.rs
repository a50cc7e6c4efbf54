//! The requests that look up, create, rename and remove directory entries.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::RenameFlags;
use rustix::io::Errno;
use vm_memory::ByteValued;

use super::Server;
use super::host::{self, Host, PathFd};
use super::message::{Body, Name, Reply};
use super::wire::{
    BatchForgetIn, EntryOut, ForgetIn, ForgetOne, LinkIn, MkdirIn, MknodIn, ROOT, Rename2In, RenameIn,
};

impl Server {
    pub(super) fn look_up(&mut self, parent: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        self.reply_with_entry(parent, body.name()?, reply)
    }

    /// Returns the first part of a path at which the guest finds no directory.
    pub(super) fn first_missing(&mut self, path: &Path) -> Option<PathBuf> {
        let (mut at, mut walked) = (ROOT, PathBuf::new());
        path.components().filter(|component| *component != Component::RootDir).find_map(|component| {
            walked.push(component);
            let next = self.find_directory(at, component.as_os_str());
            at = next.unwrap_or(ROOT);
            next.is_err().then(|| walked.clone())
        })
    }

    fn find_directory(&mut self, parent: u64, name: &OsStr) -> Result<u64, Errno> {
        let name = CString::new(name.as_bytes()).map_err(|_| Errno::INVAL)?;
        let (id, stat) = self.nodes.look_up(parent, Name::new(&name)?)?;
        if host::is_directory(&stat) { Ok(id) } else { Err(Errno::NOTDIR) }
    }

    /// Replies with the inode that has this name now, which may have been created by the host in the meantime.
    fn reply_with_entry(&mut self, parent: u64, name: Name, reply: &mut Reply) -> Result<(), Errno> {
        let (id, stat) = self.nodes.look_up(parent, name)?;
        let entry = self.entry(id, &stat);
        reply.put(entry.as_slice())
    }

    /// Ensures that an entry that is created next can be returned to the guest: otherwise it would be left behind.
    /// Returns the path descriptor of its directory.
    fn reserve_entry(&mut self, parent: u64, name: Name, reply: &Reply) -> Result<Arc<PathFd>, Errno> {
        reply.require(size_of::<EntryOut>())?;
        let parent_fd = self.nodes.path_fd(parent)?;
        self.nodes.reserve(name)?;
        Ok(parent_fd)
    }

    pub(super) fn forget(&mut self, node: u64, body: &mut Body) -> Result<(), Errno> {
        let input: ForgetIn = body.take()?;
        self.nodes.forget(node, input.nlookup);
        Ok(())
    }

    pub(super) fn batch_forget(&mut self, body: &mut Body) -> Result<(), Errno> {
        let input: BatchForgetIn = body.take()?;
        for _ in 0..input.count {
            let one: ForgetOne = body.take()?;
            self.nodes.forget(one.nodeid, one.nlookup);
        }
        Ok(())
    }

    pub(super) fn read_link(&mut self, node: u64, reply: &mut Reply) -> Result<(), Errno> {
        reply.put(Host::read_link(&*self.nodes.path_fd(node)?)?.as_bytes())
    }

    pub(super) fn make_node(&mut self, parent: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let writable = self.writable()?;
        let input: MknodIn = body.take()?;
        let name = body.name()?;
        let parent_fd = self.reserve_entry(parent, name, reply)?;
        Host::make_node(writable, &parent_fd, name, input.mode)?;
        self.reply_with_entry(parent, name, reply)
    }

    pub(super) fn make_directory(
        &mut self,
        parent: u64,
        body: &mut Body,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let writable = self.writable()?;
        let input: MkdirIn = body.take()?;
        let name = body.name()?;
        let parent_fd = self.reserve_entry(parent, name, reply)?;
        Host::make_directory(writable, &parent_fd, name, input.mode)?;
        self.reply_with_entry(parent, name, reply)
    }

    pub(super) fn make_symlink(
        &mut self,
        parent: u64,
        body: &mut Body,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let writable = self.writable()?;
        let name = body.name()?;
        let target = body.text()?;
        let parent_fd = self.reserve_entry(parent, name, reply)?;
        Host::make_symlink(writable, &parent_fd, name, target)?;
        self.reply_with_entry(parent, name, reply)
    }

    pub(super) fn make_link(&mut self, parent: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let writable = self.writable()?;
        let input: LinkIn = body.take()?;
        let name = body.name()?;
        let what = self.nodes.path_fd(input.oldnodeid)?;
        let parent_fd = self.reserve_entry(parent, name, reply)?;
        self.host.make_link(writable, &what, &parent_fd, name)?;
        self.reply_with_entry(parent, name, reply)
    }

    pub(super) fn remove(&mut self, parent: u64, body: &mut Body) -> Result<(), Errno> {
        let writable = self.writable()?;
        let name = body.name()?;
        Host::remove(writable, &*self.nodes.path_fd(parent)?, name)
    }

    pub(super) fn remove_directory(&mut self, parent: u64, body: &mut Body) -> Result<(), Errno> {
        let writable = self.writable()?;
        let name = body.name()?;
        Host::remove_directory(writable, &*self.nodes.path_fd(parent)?, name)
    }

    pub(super) fn rename(&mut self, parent: u64, body: &mut Body) -> Result<(), Errno> {
        let input: RenameIn = body.take()?;
        self.move_name(parent, input.newdir, RenameFlags::empty(), body)
    }

    pub(super) fn rename2(&mut self, parent: u64, body: &mut Body) -> Result<(), Errno> {
        let input: Rename2In = body.take()?;
        let flags = RenameFlags::from_bits_retain(input.flags);
        // `RENAME_WHITEOUT` would create a device node.
        if !(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE).contains(flags) {
            return Err(Errno::INVAL);
        }
        self.move_name(parent, input.newdir, flags, body)
    }

    fn move_name(&mut self, from: u64, to: u64, flags: RenameFlags, body: &mut Body) -> Result<(), Errno> {
        let writable = self.writable()?;
        let (old, new) = (body.name()?, body.name()?);
        let (old_parent, new_parent) = (self.nodes.path_fd(from)?, self.nodes.path_fd(to)?);
        Host::rename(writable, (&*old_parent, old), (&*new_parent, new), flags)?;
        // The rename has succeeded, so errors are ignored from here on. They occur if the host has moved the entry in
        // the meantime. The guest's next lookup finds it then.
        let _ = self.nodes.record_rename(to, new);
        if flags.contains(RenameFlags::EXCHANGE) {
            let _ = self.nodes.record_rename(from, old);
        }
        Ok(())
    }
}
