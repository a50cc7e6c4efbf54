use guest_images::cache::Cache;
use guest_images::{Progress, Suite};
use vm_memory::{Bytes, GuestAddress};
use vpmu::model::amd::Version;

use super::super::testing::*;
use super::*;
use crate::loader::error::LoadError;
use crate::loader::kernel::Boot;

const CPUS: u8 = 3;

fn registers() -> Registers {
    Version::V2(6).page_registers().expect("PerfMonV2 can freeze counters")
}

fn add(kernel: &mut Kernel) -> Result<Option<Added>, LoadError> {
    let sites = kernel.retarget_rdpmc()?.sites;
    Ok(kernel.add_shared_pages(&registers(), &sites, CPUS))
}

#[test]
fn the_distribution_s_kernels_get_the_stub_in_padding_and_a_table_that_leads_to_it() {
    let cache = Cache::open().unwrap();
    for suite in [Suite::Bookworm, Suite::Trixie, Suite::Sid] {
        let image = guest_images::kernel(&cache, suite, &mut Progress::stderr("test")).unwrap().image;
        let mut kernel = Kernel::read(&image).unwrap();
        kernel.retarget_rdpmc().unwrap();
        let before = kernel.image.clone();
        let sites = Kernel::read(&image).unwrap().retarget_rdpmc().unwrap().sites;
        let added = kernel.add_shared_pages(&registers(), &sites, CPUS).unwrap_or_else(|| panic!("{suite}"));

        let table = kernel.bytes_mut(added.table, 40).unwrap().to_vec();
        let leads_to = |index: usize| u64::from_le_bytes(table[index * 8..][..8].try_into().unwrap());
        let end = added.code + 4096;
        for index in [0, 1, 4] {
            assert!((added.code..end).contains(&leads_to(index)), "{suite}");
        }
        let changed = (0..before.len()).filter(|at| kernel.image[*at] != before[*at]);
        let (words, code): (Vec<_>, Vec<_>) = changed.partition(|at| before[*at] != 0xcc);
        assert!(words.len() <= 3 * 8 && words[words.len() - 1] - words[0] < 40, "{suite}: {words:x?}");
        assert!(code.len() > 100 && code[code.len() - 1] - code[0] < 4096, "{suite}");
    }
}

#[test]
fn linux_reserves_the_shared_pages_as_setup_data() {
    let cache = Cache::open().unwrap();
    let kernel = guest_images::kernel(&cache, Suite::Bookworm, &mut Progress::stderr("test")).unwrap();
    let mut kernel = Kernel::read(&kernel.image).unwrap();
    add(&mut kernel).unwrap().expect("it can have them");
    let ram = ram(128);
    kernel.load(&Boot { ram: &ram, command_line: "", initrd: None, initrd_prefix: &[] }).unwrap();
    let number = |at| ram.mapped.read_obj::<u64>(GuestAddress(at)).unwrap();
    let setup_data = number(low::ZERO_PAGE + 0x250);
    assert_eq!((setup_data, number(setup_data)), (low::SHARED_PAGES, 0), "one, and no other");
    let len = number(setup_data + 8) >> 32;
    assert!(setup_data + 16 <= shared_page(0));
    assert_eq!(setup_data + 16 + len, shared_page(CPUS - 1) + Page::STRIDE as u64);
}

#[test]
fn a_kernel_without_a_table_of_register_functions_stays_unchanged() {
    let mut kernel = read(VMLINUX).unwrap();
    let before = kernel.image.clone();
    assert_eq!(add(&mut kernel).unwrap(), None);
    assert_eq!(kernel.image, before);
    assert!(!kernel.has_shared_pages());
    let ram = ram(8);
    kernel.load(&Boot { ram: &ram, command_line: "", initrd: None, initrd_prefix: &[] }).unwrap();
    assert_eq!(ram.mapped.read_obj::<u64>(GuestAddress(low::ZERO_PAGE + 0x250)).unwrap(), 0);
}

#[test]
fn shared_pages_fit_below_the_bios_data_area() {
    assert!(shared_page(u8::MAX) + Page::STRIDE as u64 <= 0x9_fc00);
}
