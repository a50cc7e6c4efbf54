use super::super::Entry;
use super::super::testing::*;
use super::*;
use crate::kernel::Kernel;

fn start(kernel: &Kernel, ram: &GuestRam, command_line: &str, initrd: Option<&Path>) -> (u32, u32) {
    match kernel.load(&Boot { ram, command_line, initrd, initrd_prefix: &[] }).unwrap() {
        Entry::Protected { eip, multiboot_info } => (eip, multiboot_info),
        Entry::Long { .. } => panic!("started as Linux"),
    }
}

fn word(ram: &GuestRam, at: u32) -> u32 {
    ram.mapped.read_obj(GuestAddress(at.into())).unwrap()
}

fn text(ram: &GuestRam, at: u32) -> String {
    let byte = |i| ram.mapped.read_obj::<u8>(GuestAddress(i)).unwrap();
    String::from_utf8(
        (at.into()..memory::low_end(ram.size())).map(byte).take_while(|byte| *byte != 0).collect(),
    )
    .unwrap()
}

fn refused(file: &[u8], ram: &GuestRam) -> String {
    read(file)
        .unwrap()
        .load(&Boot { ram, command_line: "", initrd: None, initrd_prefix: &[] })
        .unwrap_err()
        .to_string()
}

#[test]
fn an_elf_image_starts_at_its_entry() {
    let ram = ram(8);
    for (bits, machine) in [(32, 3), (64, 62)] {
        let file = ElfFile { bits, machine, ..multiboot_elf(0x40_0000) };
        let kernel = read(&file.build()).unwrap();
        assert!(!kernel.is_linux());
        let (eip, info) = start(&kernel, &ram, "", None);
        assert_eq!((eip, u64::from(info)), (0x40_000c, low::MULTIBOOT_INFO));
        assert_eq!(word(&ram, 0x40_0000), HEADER_MAGIC);
    }
}

#[test]
fn an_image_that_is_not_elf_is_loaded_by_its_header_s_addresses() {
    let ram = ram(8);
    // The header is 16 bytes into the file, the image begins 8 bytes into it.
    let header = multiboot_header(1 << 16, &[0x10_0008, 0x10_0000, 0x10_0048, 0x10_2000, 0x10_0030]);
    let file = [vec![1; 8], vec![2; 8], header, vec![0xf4; 200]].concat();
    let (eip, _) = start(&read(&file).unwrap(), &ram, "", None);
    assert_eq!(eip, 0x10_0030);
    assert_eq!(word(&ram, 0x10_0004), 0x0202_0202);
    assert_eq!(word(&ram, 0x10_0044), 0xf4f4_f4f4);
    assert_eq!(word(&ram, 0x10_0048), 0, "load_end_addr is the end");
}

#[test]
fn addresses_that_contradict_each_other_are_refused() {
    for addresses in [
        [0x10_0000, 0x10_0020, 0, 0, 0x10_0030],
        [0x20_0000, 0x10_0000, 0, 0, 0x10_0030],
        [0x10_0000, 0x10_0000, 0x1000, 0, 0x10_0000],
        [0x10_0000, 0x10_0000, 0x10_0040, 0x10_0010, 0x10_0000],
    ] {
        let file = [multiboot_header(1 << 16, &addresses), vec![0; 64]].concat();
        assert!(refusal(&file).contains("contradict"), "{addresses:x?}");
    }
    let beyond = multiboot_header(1 << 16, &[0x10_0000, 0x10_0000, 0x20_0000, 0, 0x10_0000]);
    assert!(refusal(&[beyond, vec![0; 64]].concat()).contains("truncated"));
}

#[test]
fn the_command_line_begins_with_the_kernel_s_path() {
    let ram = ram(8);
    let (_, info) = start(&read(&multiboot_elf(0x40_0000).build()).unwrap(), &ram, "one two", None);
    assert_eq!(word(&ram, info) & (1 << 2), 1 << 2);
    assert_eq!(text(&ram, word(&ram, info + 16)), "kernel one two");
    assert_eq!(text(&ram, word(&ram, info + 64)), "tally");
}

#[test]
fn the_multiboot_memory_map_is_the_machine_s() {
    let ram = ram(5 << 10);
    let (_, info) = start(&read(&multiboot_elf(0x40_0000).build()).unwrap(), &ram, "", None);
    assert_eq!((word(&ram, info + 4), word(&ram, info + 8)), (639, (3 << 20) - 1024));
    let (len, map) = (word(&ram, info + 44), word(&ram, info + 48));
    let mut ranges = Vec::new();
    let mut at = map;
    while at < map + len {
        let long = |at| u64::from(word(&ram, at)) | u64::from(word(&ram, at + 4)) << 32;
        ranges.push((long(at + 4), long(at + 12), word(&ram, at + 20)));
        at += word(&ram, at) + 4;
    }
    let kind = |range: &memory::Range| if range.kind == RangeKind::Ram { 1 } else { 2 };
    let expected: Vec<_> =
        memory::map(ram.size()).iter().map(|range| (range.start, range.len, kind(range))).collect();
    assert_eq!(ranges, expected);
}

#[test]
fn modules_lie_on_pages_above_the_image_each_with_its_arguments() {
    let ram = ram(8);
    let (first, second) = (file(&[0xaa; 5000]), file(b"second"));
    let list = format!("{} one,  {} two,", first.path().display(), second.path().display());
    let kernel = read(&multiboot_elf(0x40_0000).build()).unwrap();
    let (_, info) = start(&kernel, &ram, "", Some(Path::new(&list)));
    let (count, table) = (word(&ram, info + 20), word(&ram, info + 24));
    assert_eq!(count, 2);
    assert_eq!((word(&ram, table), word(&ram, table + 4)), (0x40_2000, 0x40_2000 + 5000));
    assert_eq!((word(&ram, table + 16), word(&ram, table + 20)), (0x40_4000, 0x40_4006));
    assert_eq!(text(&ram, word(&ram, table + 8)), format!("{} one", first.path().display()));
    assert_eq!(text(&ram, word(&ram, table + 24)), format!("{} two", second.path().display()));
    assert_eq!(text(&ram, 0x40_4000), "second");
}

#[test]
fn a_doubled_comma_is_one_in_a_file_s_name() {
    let split = |list: &str| -> Vec<_> {
        split_modules(Path::new(list)).into_iter().map(|module| String::from_utf8(module).unwrap()).collect()
    };
    assert_eq!(split("a,,b c,d"), ["a,b c", "d"]);
    assert_eq!(split(" a ,, , b"), ["a , ", "b"]);
    assert_eq!(split(""), [""; 0]);
}

#[test]
fn an_image_below_1_mib_moves_the_information_structure_above_it() {
    let ram = ram(8);
    let low_image = ElfFile { memory_len: 0x8000, ..multiboot_elf(0x4000) };
    let (_, info) = start(&read(&low_image.build()).unwrap(), &ram, "", None);
    assert_eq!(u64::from(info), HIGH_RAM);
    let long = "x".repeat(40_000);
    let (_, info) = start(&read(&multiboot_elf(0x40_0000).build()).unwrap(), &ram, &long, None);
    assert_eq!(info, 0x40_2000);
    assert_eq!(text(&ram, word(&ram, info + 16)), format!("kernel {long}"));
}

#[test]
fn images_and_modules_that_do_not_fit_are_refused() {
    let ram = ram(8);
    let text = refused(&ElfFile { memory_len: 8 << 20, ..multiboot_elf(0x40_0000) }.build(), &ram);
    assert!(text.contains("needs --memory 12M"), "{text}");
    for address in [0, 0x500, 0xa_0000] {
        let text = refused(&multiboot_elf(address).build(), &ram);
        assert!(text.contains("where the guest has no free memory"), "{text}");
    }
    let module = file(&[]);
    module.as_file().set_len(4 << 20).unwrap();
    let kernel = read(&multiboot_elf(0x40_0000).build()).unwrap();
    let text = kernel
        .load(&Boot { ram: &ram, command_line: "", initrd: Some(module.path()), initrd_prefix: &[] })
        .unwrap_err()
        .to_string();
    assert!(text.starts_with(module.path().to_str().unwrap()), "{text}");
    assert!(text.contains("the module does not fit: it needs --memory 9M"), "{text}");
}

#[test]
fn a_header_that_requires_unsupported_features_is_refused() {
    let file = [multiboot_header(1 << 2 | 1 << 16, &[0; 5]), vec![0; 64]].concat();
    assert!(refusal(&file).contains("features that Tally does not have (header flags 0x10004)"));
    let neither = [multiboot_header(0, &[]), vec![0; 64]].concat();
    assert!(refusal(&neither).contains("no load addresses"));
}

#[test]
fn a_header_is_found_on_every_word_of_the_first_8192_bytes() {
    let header = multiboot_header(0, &[]);
    let at = |offset: usize| {
        let mut file = vec![0; offset];
        file.extend_from_slice(&header);
        Header::find(&file[..file.len().min(8192)])
    };
    assert!(at(0).is_some() && at(4096).is_some() && at(8192 - 12).is_some());
    assert!(at(2).is_none() && at(8192 - 8).is_none());
    let mut wrong = header.clone();
    wrong[8] ^= 1;
    assert!(Header::find(&wrong).is_none());
}
