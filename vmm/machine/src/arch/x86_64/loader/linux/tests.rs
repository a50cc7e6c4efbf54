use vm_memory::ByteValued;

use super::super::testing::*;
use super::*;

fn boot<'a>(ram: &'a GuestRam, command_line: &'a str, initrd: Option<&'a Path>) -> Boot<'a> {
    Boot { ram, command_line, initrd, initrd_prefix: &[] }
}

fn zero_page(ram: &GuestRam) -> boot_params {
    let mut params = boot_params::default();
    ram.mapped.read_slice(params.as_mut_slice(), GuestAddress(low::ZERO_PAGE)).unwrap();
    params
}

fn at(ram: &GuestRam, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    ram.mapped.read_slice(&mut bytes, GuestAddress(address)).unwrap();
    bytes
}

#[test]
fn a_vmlinux_is_loaded_at_its_link_address() {
    let ram = ram(8);
    let entry = read(VMLINUX).unwrap().load(&boot(&ram, "", None)).unwrap();
    assert_eq!(entry, Entry::Long { rip: VMLINUX_ENTRY, boot_params: low::ZERO_PAGE });
    let text = &VMLINUX[ElfFile::CONTENT..];
    assert_eq!(at(&ram, VMLINUX_MEMORY.start, text.len()), text);
}

#[test]
fn the_zero_page_has_the_memory_map_command_line_and_acpi_tables() {
    let ram = ram(5 << 10);
    read(VMLINUX).unwrap().load(&boot(&ram, "console=ttyS0 quiet", None)).unwrap();
    let params = zero_page(&ram);
    let header = params.hdr;
    assert_eq!({ params.acpi_rsdp_addr }, low::ACPI);
    assert_eq!({ header.type_of_loader }, 0xff);
    assert_eq!({ header.boot_flag }, 0xaa55);
    assert_eq!({ header.header }, HEADER_MAGIC);
    assert_eq!({ header.ramdisk_size }, 0);
    assert_eq!(u64::from(header.cmd_line_ptr), low::COMMAND_LINE);
    assert_eq!(at(&ram, low::COMMAND_LINE, 20), b"console=ttyS0 quiet\0");
    let ranges: Vec<_> = params.e820_table[..usize::from(params.e820_entries)]
        .iter()
        .map(|entry| (entry.addr, entry.size, entry.r#type))
        .collect();
    assert_eq!(ranges.len(), memory::map(ram.size()).len());
    assert!(ranges.contains(&(HIGH_RAM, (3 << 30) - HIGH_RAM, 1)));
    assert!(ranges.contains(&(4 << 30, 2 << 30, 1)));
    assert_eq!(ranges[1].2, 2);
}

#[test]
fn the_setup_header_of_a_bzimage_comes_from_its_file() {
    let ram = ram(8);
    let mut file = bzimage(&with_size(include_bytes!("../testdata/payload.lz4"), VMLINUX.len()), 0x10_0000);
    file[0x211] |= KASLR_FLAG;
    file[0x250] = 0x11;
    read(&file).unwrap().load(&boot(&ram, "", None)).unwrap();
    let header = zero_page(&ram).hdr;
    assert_eq!({ header.init_size }, 0x10_0000);
    assert_eq!({ header.version }, 0x20f);
    assert_eq!({ header.loadflags }, LOADED_HIGH, "nobody applied KASLR");
    assert_eq!({ header.setup_data }, 0, "there is none");
}

#[test]
fn the_initrd_is_at_the_highest_possible_address() {
    let (ram, initrd) = (ram(8), file(b"an initrd"));
    read(VMLINUX).unwrap().load(&boot(&ram, "", Some(initrd.path()))).unwrap();
    let header = zero_page(&ram).hdr;
    assert_eq!((u64::from(header.ramdisk_image), header.ramdisk_size), ((8 << 20) - 4096, 9));
    assert_eq!(at(&ram, (8 << 20) - 4096, 10), b"an initrd\0");
}

#[test]
fn the_archive_in_front_of_the_initrd_is_part_of_it() {
    let (ram, initrd) = (ram(8), file(b"an initrd"));
    let boot = Boot { initrd_prefix: b"modules.", ..boot(&ram, "", Some(initrd.path())) };
    read(VMLINUX).unwrap().load(&boot).unwrap();
    assert_eq!(at(&ram, (8 << 20) - 4096, 18), b"modules.an initrd\0");
}

#[test]
fn the_initrd_stays_below_initrd_addr_max() {
    let (ram, initrd) = (ram(3 << 10), file(&[7; 5000]));
    read(VMLINUX).unwrap().load(&boot(&ram, "", Some(initrd.path()))).unwrap();
    assert_eq!(u64::from(zero_page(&ram).hdr.ramdisk_image), (2 << 30) - 8192);
}

#[test]
fn an_initrd_that_does_not_fit_says_how_much_memory_it_needs() {
    let ram = ram(4);
    let initrd = file(&[]);
    initrd.as_file().set_len(5 << 20).unwrap();
    let text = read(VMLINUX).unwrap().load(&boot(&ram, "", Some(initrd.path()))).unwrap_err().to_string();
    assert!(text.starts_with(initrd.path().to_str().unwrap()), "{text}");
    assert!(text.contains("the initrd does not fit: it needs --memory 7M"), "{text}");
    initrd.as_file().set_len(5 << 30).unwrap();
    let text = read(VMLINUX).unwrap().load(&boot(&ram, "", Some(initrd.path()))).unwrap_err().to_string();
    assert!(text.contains("too large an initrd"), "{text}");
}

#[test]
fn an_initrd_that_just_fits_is_loaded() {
    let ram = ram(4);
    let initrd = file(&[]);
    initrd.as_file().set_len(2 << 20).unwrap();
    read(VMLINUX).unwrap().load(&boot(&ram, "", Some(initrd.path()))).unwrap();
    assert_eq!(u64::from(zero_page(&ram).hdr.ramdisk_image), VMLINUX_MEMORY.end);
}

#[test]
fn a_kernel_that_does_not_fit_says_how_much_memory_it_needs() {
    let ram = ram(8);
    let file = ElfFile { memory_len: 100 << 20, ..ElfFile::default() }.build();
    let text = read(&file).unwrap().load(&boot(&ram, "", None)).unwrap_err().to_string();
    assert!(text.contains("the kernel does not fit: it needs --memory 101M, the guest has 8M"), "{text}");
}

#[test]
fn a_guest_with_less_memory_than_a_bzimage_requires_is_refused() {
    let ram = ram(8);
    let payload = with_size(include_bytes!("../testdata/payload.lz4"), VMLINUX.len());
    let text =
        read(&bzimage(&payload, 32 << 20)).unwrap().load(&boot(&ram, "", None)).unwrap_err().to_string();
    assert!(text.contains("needs --memory 33M"), "{text}");
}

#[test]
fn a_kernel_may_not_load_over_low_memory() {
    let ram = ram(8);
    let low = ElfFile { physical_address: 0x8000, entry: 0x8000, ..ElfFile::default() };
    let text = read(&low.build()).unwrap().load(&boot(&ram, "", None)).unwrap_err().to_string();
    assert!(text.contains("0x8000..0xa000, where the guest has no free memory"), "{text}");
}

#[test]
fn a_command_line_longer_than_the_kernel_allows_is_refused() {
    let ram = ram(8);
    let longest = "x".repeat(2047);
    let kernel = read(VMLINUX).unwrap();
    kernel.load(&boot(&ram, &longest, None)).unwrap();
    let text = kernel.load(&boot(&ram, &format!("{longest}x"), None)).unwrap_err().to_string();
    assert!(text.contains("2048 bytes: this kernel takes at most 2047"), "{text}");
}

#[test]
fn the_error_for_a_kernel_that_does_not_fit_below_the_hole_does_not_ask_for_more_memory() {
    let ram = ram(5 << 10);
    let file = ElfFile { memory_len: 4 << 30, ..ElfFile::default() }.build();
    let text = read(&file).unwrap().load(&boot(&ram, "", None)).unwrap_err().to_string();
    assert!(
        text.contains("would end at 0x100100000, and the memory below the devices ends at 0xc0000000"),
        "{text}"
    );
}
