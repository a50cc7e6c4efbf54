//! Which files a guest's programs have mapped where, as its Linux keeps it: the process' tree of regions (a maple tree,
//! since Linux 6.1), the names of files from the root down, and their pages that are in memory (an xarray). The offsets
//! of all members are those of BTF.
//!
//! The guest may have written anything there, and may change it at any time, also while it is read: every walk has an
//! end, and what does not fit together is not there.

use super::btf::Types;

/// Maximum depth of a tree: one of all regions that a process may have is lower.
const MAX_DEPTH: u32 = 12;
/// Maximum number of pivots in a node: Linux has 15.
const MAX_PIVOTS: u64 = 64;
/// Maximum number of names and mounts in a path.
const MAX_STEPS: u32 = 256;
/// Maximum length of a path, which is Linux' own.
const MAX_PATH: usize = 4095;
/// Maximum length of a name.
const MAX_NAME: u32 = 255;
/// Reference to a node: it says what the node is, and the node is aligned.
const NODE: u64 = !0xff;
const NODE_TYPE_SHIFT: u32 = 3;
const NODE_TYPES: u64 = 0xf;
/// Types of nodes: leaves, and those above them without and with the sizes of gaps.
const LEAF: u64 = 1;
const RANGES: u64 = 2;
const RANGES_WITH_GAPS: u64 = 3;
/// What an entry is, by its last two bits, if it is a reference to a node.
const IS_NODE: u64 = 2;
/// The file is the one below an overlay (`FMODE_BACKING`): the bit that Linux 6.14 has moved, before and after that.
const IS_BACKING: [u32; 2] = [1 << 25, 1 << 24];
const MOVED: [u32; 2] = [6, 14];
const PAGE_SHIFT: u32 = 12;

/// Reads bytes at an address of the kernel's.
pub type Read<'a> = dyn Fn(u64, &mut [u8]) -> Option<()> + 'a;

/// A region of a process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Region {
    /// First address, and the one behind the last.
    pub start: u64,
    pub end: u64,
    /// Where it begins in the file.
    pub offset: u64,
    /// Address of the open file; 0 if there is none.
    pub file: u64,
    /// Address of the process' description of its memory.
    memory: u64,
}

/// Where a kind of nodes has its parts.
#[derive(Debug)]
struct Node {
    /// The last address of each slot but the last, and how many of these there are.
    pivots: u64,
    count: u64,
    slots: u64,
    /// Number of the last slot in use.
    end: u64,
}

impl Node {
    fn find(types: &Types, structure: &str) -> Option<Self> {
        let offset = |member| types.offset(structure, member);
        let [pivots, slots] = [offset("pivot")?, offset("slot")?];
        let count =
            slots.checked_sub(pivots).map(|size| size / 8).filter(|count| (1..=MAX_PIVOTS).contains(count));
        Some(Self { pivots, count: count?, slots, end: offset("meta")? })
    }

    /// Returns the slot of an address in the node at another.
    fn slot(&self, read: &Read, node: u64, address: u64) -> Option<u64> {
        let at = |offset: u64, number: u64| node.wrapping_add(offset).wrapping_add(8 * number);
        // The last pivot of a node that is not full is 0.
        let end = if word(read, at(self.pivots, self.count - 1))? == 0 {
            let mut end = [0];
            read(node.wrapping_add(self.end), &mut end)?;
            u64::from(end[0]).min(self.count)
        } else {
            self.count
        };
        let is_behind =
            |number: &u64| word(read, at(self.pivots, *number)).is_some_and(|pivot| pivot < address);
        let number = (0..end).take_while(is_behind).count() as u64;
        word(read, at(self.slots, number))
    }
}

/// Where Linux has what a process has mapped.
#[derive(Debug)]
pub struct Mappings {
    /// Of a thread: its memory, and its root.
    memory: u64,
    fs: u64,
    root: u64,
    /// Of a process' memory: the root of the tree.
    tree: u64,
    leaf: Node,
    with_gaps: Node,
    /// Of a region.
    start: u64,
    end: u64,
    offset: u64,
    file: u64,
    /// Of a file: its path, its mode, and its path above an overlay.
    path: u64,
    mode: u64,
    is_backing: u32,
    above: Option<u64>,
    /// Of a file: its inode, and the size in that.
    inode: u64,
    size: u64,
    /// Of a file: its content; of that, the root of the tree of its pages; and of a node there, its first child.
    content: u64,
    pages: u64,
    first_child: u64,
    /// Of a path.
    mount: u64,
    name: u64,
    /// Of a name: its parent, its text and the length of that.
    parent: u64,
    text: u64,
    length: u64,
    /// Of a mount: the part to which a path leads, and in relation to that its root, the mount in which it is, and
    /// where there.
    shared_part: u64,
    mount_root: u64,
    mount_parent: u64,
    mount_point: u64,
}

impl Mappings {
    /// Finds out where a kernel with these types, of this version, has it.
    pub fn find(types: &Types, version: [u32; 2]) -> Option<Self> {
        let offset = |structure, member| types.offset(structure, member);
        let name = offset("dentry", "d_name")?;
        let shared_part = offset("mount", "mnt")?;
        let of_mount = |member| Some(offset("mount", member)?.wrapping_sub(shared_part));
        Some(Self {
            memory: offset("task_struct", "mm")?,
            fs: offset("task_struct", "fs")?,
            root: offset("fs_struct", "root")?,
            tree: offset("mm_struct", "mm_mt")? + offset("maple_tree", "ma_root")?,
            leaf: Node::find(types, "maple_range_64")?,
            with_gaps: Node::find(types, "maple_arange_64")?,
            start: offset("vm_area_struct", "vm_start")?,
            end: offset("vm_area_struct", "vm_end")?,
            offset: offset("vm_area_struct", "vm_pgoff")?,
            file: offset("vm_area_struct", "vm_file")?,
            path: offset("file", "f_path")?,
            mode: offset("file", "f_mode")?,
            is_backing: IS_BACKING[usize::from(version >= MOVED)],
            above: offset("backing_file", "user_path"),
            inode: offset("file", "f_inode")?,
            size: offset("inode", "i_size")?,
            content: offset("file", "f_mapping")?,
            pages: offset("address_space", "i_pages")? + offset("xarray", "xa_head")?,
            first_child: offset("xa_node", "slots")?,
            mount: offset("path", "mnt")?,
            name: offset("path", "dentry")?,
            parent: offset("dentry", "d_parent")?,
            text: name + offset("qstr", "name")?,
            length: name + offset("qstr", "len")?,
            shared_part,
            mount_root: offset("vfsmount", "mnt_root")?,
            mount_parent: of_mount("mnt_parent")?,
            mount_point: of_mount("mnt_mountpoint")?,
        })
    }

    /// Returns the region of a thread's process in which an address is. `thread` is the address of its description.
    pub fn region(&self, read: &Read, thread: u64, address: u64) -> Option<Region> {
        let member = |of: u64, offset: u64| word(read, of.wrapping_add(offset));
        let memory = member(thread, self.memory)?;
        let region = self.entry(read, member(memory, self.tree)?, address)?;
        let [start, end] = [member(region, self.start)?, member(region, self.end)?];
        let (page, file) = (member(region, self.offset)?, member(region, self.file)?);
        let offset = page.checked_mul(1 << PAGE_SHIFT)?;
        (start..end).contains(&address).then_some(Region { start, end, offset, file, memory })
    }

    /// Returns the entry of an address in a tree.
    fn entry(&self, read: &Read, root: u64, address: u64) -> Option<u64> {
        let mut next = (root & 3 == IS_NODE).then_some(root)?;
        for _ in 0..MAX_DEPTH {
            let node = next & NODE;
            let kind = next >> NODE_TYPE_SHIFT & NODE_TYPES;
            let parts = if kind == RANGES_WITH_GAPS { &self.with_gaps } else { &self.leaf };
            next = parts.slot(read, node, address)?;
            match kind {
                LEAF => return (next != 0).then_some(next),
                RANGES | RANGES_WITH_GAPS => {}
                _ => return None,
            }
        }
        None
    }

    /// Returns the path of an open file, as the thread would name it.
    pub fn path(&self, read: &Read, thread: u64, file: u64) -> Option<Vec<u8>> {
        let member = |of: u64, offset: u64| word(read, of.wrapping_add(offset));
        let path = |at: u64| Some([member(at, self.mount)?, member(at, self.name)?]);
        let mut mode = [0; 4];
        read(file.wrapping_add(self.mode), &mut mode)?;
        let above = self.above.filter(|_| u32::from_le_bytes(mode) & self.is_backing != 0);
        let root = path(member(thread, self.fs)?.wrapping_add(self.root))?;
        let [mut mount, mut name] = path(file.wrapping_add(above.unwrap_or(self.path)))?;
        let (mut names, mut length) = (Vec::new(), 0);
        for _ in 0..MAX_STEPS {
            let parent = member(name, self.parent)?;
            let above = member(mount, self.mount_parent)?.wrapping_add(self.shared_part);
            let is_root_of_mount = member(mount, self.mount_root)? == name;
            if [mount, name] == root || if is_root_of_mount { above == mount } else { parent == name } {
                names.reverse();
                return (!names.is_empty()).then(|| names.concat());
            }
            if is_root_of_mount {
                [mount, name] = [above, member(mount, self.mount_point)?];
            } else {
                let text = self.text(read, name)?;
                length += 1 + text.len();
                if length > MAX_PATH {
                    return None;
                }
                names.push([&b"/"[..], &text].concat());
                name = parent;
            }
        }
        None
    }

    /// Returns a file's size.
    pub fn size(&self, read: &Read, file: u64) -> Option<u64> {
        word(read, word(read, file.wrapping_add(self.inode))?.wrapping_add(self.size))
    }

    /// Returns the address of the description of a file's first page, if that is in memory.
    pub fn first_page(&self, read: &Read, file: u64) -> Option<u64> {
        let content = word(read, file.wrapping_add(self.content))?;
        let mut next = word(read, content.wrapping_add(self.pages))?;
        for _ in 0..MAX_DEPTH {
            match next & 3 {
                // A page.
                0 => return (next != 0).then_some(next),
                IS_NODE => next = word(read, (next & !3).wrapping_add(self.first_child))?,
                _ => return None,
            }
        }
        None
    }

    fn text(&self, read: &Read, name: u64) -> Option<Vec<u8>> {
        let mut length = [0; 4];
        read(name.wrapping_add(self.length), &mut length)?;
        let length = u32::from_le_bytes(length);
        let mut text = vec![0; (1..=MAX_NAME).contains(&length).then_some(usize::try_from(length).ok()?)?];
        read(word(read, name.wrapping_add(self.text))?, &mut text)?;
        let is_name = !text.contains(&b'/') && !matches!(&text[..], b"." | b"..");
        is_name.then_some(text)
    }
}

/// Reads a word at an address.
pub fn word(read: &Read, address: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    read(address, &mut bytes)?;
    Some(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Where the kernel's memory of these tests begins.
    const BASE: u64 = 0xffff_8880_0000_0000;
    const SIZE: usize = 16 << 10;

    /// Memory of a kernel whose structures have their members where [`layout`] says.
    struct Memory(Vec<u8>);

    impl Memory {
        fn write(&mut self, at: u64, words: &[u64]) {
            for (word, at) in words.iter().zip((usize::try_from(at).unwrap()..).step_by(8)) {
                self.0[at..at + 8].copy_from_slice(&word.to_le_bytes());
            }
        }

        fn read(&self, address: u64, bytes: &mut [u8]) -> Option<()> {
            let start = usize::try_from(address.checked_sub(BASE)?).ok()?;
            bytes.copy_from_slice(self.0.get(start..start.checked_add(bytes.len())?)?);
            Some(())
        }
    }

    /// The offsets of members: threads have memory and fs, files have mode, path, path above and content, names have
    /// parent, text and length, mounts have their shared part (the root) at 16, behind what they are mounted in and
    /// where.
    fn layout() -> Mappings {
        let node = |slots| Node { pivots: 8, count: (slots - 8) / 8, slots, end: 248 };
        Mappings {
            memory: 0,
            fs: 8,
            root: 0,
            tree: 0,
            leaf: node(128),
            with_gaps: Node { end: 240, ..node(80) },
            start: 0,
            end: 8,
            offset: 16,
            file: 24,
            path: 8,
            mode: 0,
            is_backing: IS_BACKING[1],
            above: Some(24),
            inode: 48,
            size: 0,
            content: 40,
            pages: 0,
            first_child: 8,
            mount: 0,
            name: 8,
            parent: 0,
            text: 8,
            length: 16,
            shared_part: 16,
            mount_root: 0,
            mount_parent: 0_u64.wrapping_sub(16),
            mount_point: 0_u64.wrapping_sub(8),
        }
    }

    const THREAD: u64 = 0;
    const REGION: u64 = 0x180;
    const FILE: u64 = 0x1c0;
    const PAGE: u64 = 0xffff_ea00_0000_0040;

    /// A process with one region, of the file `/srv/bin/prog`, where `/srv` is a mount.
    fn process() -> Memory {
        let (fs, memory, node, leaf, above, content) = (0x100, 0x140, 0x400, 0x500, 0x600, 0xa00);
        let (root_mount, mount, names) = (0x700, 0x740, 0x800);
        let mut kernel = Memory(vec![0; SIZE]);
        let at = |offset: u64| BASE + offset;
        let name = |number: u64| names + 0x40 * number;
        kernel.write(THREAD, &[at(memory), at(fs)]);
        kernel.write(fs, &[at(root_mount + 16), at(name(0))]);
        kernel.write(memory, &[at(node) | RANGES_WITH_GAPS << NODE_TYPE_SHIFT | 6]);
        // Three children, of which the last has no pivot. The region is in the second.
        kernel.write(node + 8, &[0x3f_ffff, 0x4f_ffff]);
        kernel.write(node + 80, &[0, at(leaf) | LEAF << NODE_TYPE_SHIFT | 4, 0]);
        kernel.write(node + 240, &[2]);
        // A full leaf: the last slot is behind the last pivot.
        kernel.write(leaf + 8, &(0..15).map(|number| 0x40_0fff + 0x1000 * number).collect::<Vec<_>>());
        kernel.write(leaf + 128 + 8 * 15, &[at(REGION)]);
        kernel.write(REGION, &[0x40_f000, 0x41_2000, 3, at(FILE)]);
        kernel.write(
            FILE,
            &[0, at(mount + 16), at(name(4)), at(mount + 16), at(name(3)), at(content), at(content + 0x30)],
        );
        // Two nodes above the first page.
        kernel.write(content, &[at(content + 0x10) | IS_NODE]);
        kernel.write(content + 0x18, &[at(content + 0x20) | IS_NODE]);
        kernel.write(content + 0x28, &[PAGE, 12_345]);
        kernel.write(root_mount, &[at(root_mount), at(name(0)), at(name(0))]);
        kernel.write(mount, &[at(root_mount), at(name(1)), at(name(2))]);
        for (number, (parent, text)) in
            [(0, "/"), (0, "srv"), (2, "/"), (2, "bin"), (3, "prog")].into_iter().enumerate()
        {
            let text_at = above + 0x10 * number as u64;
            let start = usize::try_from(text_at).unwrap();
            kernel.0[start..start + text.len()].copy_from_slice(text.as_bytes());
            kernel.write(name(number as u64), &[at(name(parent)), at(text_at), text.len() as u64]);
        }
        kernel
    }

    fn region(kernel: &Memory, address: u64) -> Option<Region> {
        layout().region(&|address, bytes| kernel.read(address, bytes), BASE + THREAD, address)
    }

    fn path(kernel: &Memory) -> Option<String> {
        let path =
            layout().path(&|address, bytes| kernel.read(address, bytes), BASE + THREAD, BASE + FILE)?;
        Some(String::from_utf8(path).unwrap())
    }

    #[test]
    fn a_region_is_found_by_each_of_its_addresses() {
        let kernel = process();
        let found = region(&kernel, 0x40_f000).expect("it is there");
        assert_eq!(
            (found.start, found.end, found.offset, found.file),
            (0x40_f000, 0x41_2000, 0x3000, BASE + FILE)
        );
        assert_eq!(region(&kernel, 0x41_1fff), Some(found));
        for address in [0, 0x40_efff, 0x41_2000, 0x50_0000, u64::MAX] {
            assert_eq!(region(&kernel, address), None, "{address:#x}");
        }
    }

    #[test]
    fn a_path_leads_from_the_threads_root_over_mounts_to_the_file() {
        let mut kernel = process();
        assert_eq!(path(&kernel).as_deref(), Some("/srv/bin/prog"));
        // The thread's root is the mount.
        let [mount, name] = [BASE + 0x740 + 16, BASE + 0x800 + 0x80];
        kernel.write(0x100, &[mount, name]);
        assert_eq!(path(&kernel).as_deref(), Some("/bin/prog"));
        // The file that is open is below an overlay.
        kernel.write(FILE, &[u64::from(IS_BACKING[1])]);
        assert_eq!(path(&kernel).as_deref(), Some("/bin"));
        kernel.0[0x630..0x633].copy_from_slice(b"b/n");
        assert_eq!(path(&kernel), None);
        // A folder that contains itself.
        kernel.0[0x630..0x633].copy_from_slice(b"bin");
        kernel.write(0x800 + 0xc0, &[name + 0x80]);
        kernel.write(0x800 + 0x100, &[name + 0x40]);
        assert_eq!(path(&kernel), None);
    }

    #[test]
    fn a_files_first_page_is_found_if_it_is_in_memory() {
        let page =
            |kernel: &Memory| layout().first_page(&|address, bytes| kernel.read(address, bytes), BASE + FILE);
        let mut kernel = process();
        assert_eq!(page(&kernel), Some(PAGE));
        let size = layout().size(&|address, bytes| kernel.read(address, bytes), BASE + FILE);
        assert_eq!(size, Some(12_345));
        // It was swapped out; it was never there; a node that contains itself.
        for entry in [PAGE | 1, 0, (BASE + 0xa20) | IS_NODE] {
            kernel.write(0xa28, &[entry]);
            assert_eq!(page(&kernel), None, "{entry:#x}");
        }
        kernel.write(0xa00, &[PAGE]);
        assert_eq!(page(&kernel), Some(PAGE), "a file of one page");
    }

    proptest! {
        #[test]
        fn whatever_a_guest_writes_there_is_no_trouble(
            changes in prop::collection::vec((0..0xa40_usize, any::<u8>()), 0..40),
            address in any::<u64>(),
        ) {
            let mut kernel = process();
            for (at, byte) in changes {
                kernel.0[at] = byte;
            }
            for address in [address, 0x41_0000] {
                if let Some(found) = region(&kernel, address) {
                    prop_assert!((found.start..found.end).contains(&address));
                }
            }
            let path = layout().path(&|address, bytes| kernel.read(address, bytes), BASE + THREAD, BASE + FILE);
            prop_assert!(path.is_none_or(|path| path.len() <= MAX_PATH));
            let _ = layout().first_page(&|address, bytes| kernel.read(address, bytes), BASE + FILE);
        }
    }
}
