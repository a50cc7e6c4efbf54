use std::ffi::CString;

use super::super::super::MEMORY;
use super::*;

const MIB: usize = 1 << 20;

fn inode_id(inode: u64) -> InodeId {
    InodeId { inode, created: 0, file_system: 0 }
}

fn table(limits: Limits) -> Table {
    let root = rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    Table::new(limits, Identity::Inode, inode_id(0), root.into())
}

fn name(number: u64, length: usize) -> CString {
    CString::new(format!("{number:0length$}")).unwrap()
}

fn add(table: &mut Table, inode: u64, length: usize) -> Result<u64, Errno> {
    let name = name(inode, length);
    table.reserve(Name::new(&name).unwrap())?;
    Ok(table.insert(inode_id(inode), Kind::Other, ROOT, &name))
}

/// Returns the number of bytes that a table has allocated.
fn held(table: &Table) -> usize {
    let names = table.slots.iter().flatten().map(|node| allocated(&node.name)).sum::<usize>();
    assert_eq!(names, table.name_bytes);
    table.slots.capacity() * size_of::<Option<Node>>()
        + table.free.capacity() * size_of::<u32>()
        + table.index.allocation_size()
        + names
}

#[test]
fn a_guest_that_never_forgets_makes_the_host_remember_less_than_forty_mebibytes() {
    let mut table = table(MEMORY);
    // As many nodes as possible, then as long names as possible.
    for inode in 1..600_000 {
        add(&mut table, inode, if inode < 300_000 { 10 } else { 255 }).unwrap();
        if inode.is_multiple_of(50_000) {
            assert!(held(&table) < 40 * MIB, "{} bytes after {inode} lookups", held(&table));
        }
    }
    assert_eq!(size_of::<Option<Node>>(), 80);
}

#[test]
fn a_quarter_of_a_million_files_of_common_names_are_remembered() {
    let mut table = table(MEMORY);
    let ids: Vec<u64> = (1..250_000).map(|inode| add(&mut table, inode, 30).unwrap()).collect();
    assert!(ids.iter().all(|id| table.get(*id).is_some()));
}

#[test]
fn node_ids_are_never_reused() {
    let mut table = table(Limits { nodes: 5, ..MEMORY });
    let mut seen = std::collections::HashSet::from([ROOT]);
    for inode in 1..100 {
        if inode == 50 {
            table.clear();
        }
        let id = add(&mut table, inode, 5).unwrap();
        assert!(seen.insert(id));
        if inode.is_multiple_of(3) {
            table.remove(id);
        }
        table.remove(id + 1);
    }
    assert_eq!(table.find(Key { inode_id: inode_id(0), place: (0, c"") }), Some(ROOT));
}

#[test]
fn directories_are_evicted_last() {
    let mut table = table(Limits { nodes: 10, ..MEMORY });
    let directory = table.insert(inode_id(1), Kind::Directory, ROOT, c"current");
    for inode in 10..100 {
        add(&mut table, inode, 5).unwrap();
    }
    assert!(table.get(directory).is_some());
    for inode in 100..200 {
        table.reserve(Name::new(c"name").unwrap()).unwrap();
        table.insert(inode_id(inode), Kind::Directory, ROOT, c"name");
    }
    assert!(table.get(directory).is_none());
}

#[test]
fn nodes_that_are_used_or_have_children_stay() {
    let mut table = table(Limits { nodes: 10, ..MEMORY });
    let directory = add(&mut table, 1, 5).unwrap();
    let child = table.insert(inode_id(2), Kind::Other, directory, c"child");
    let used = add(&mut table, 3, 5).unwrap();
    for inode in 10..100 {
        for id in [child, used] {
            table.get_mut(id).unwrap().mark_used();
        }
        add(&mut table, inode, 5).unwrap();
    }
    assert!([directory, child, used].iter().all(|id| table.get(*id).is_some()));
    table.set_location(child, ROOT, Name::new(c"moved").unwrap());
    for inode in 100..200 {
        add(&mut table, inode, 5).unwrap();
    }
    assert!([directory, child, used].iter().all(|id| table.get(*id).is_none()));
}
