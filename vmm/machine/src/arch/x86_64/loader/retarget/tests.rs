use std::ops::Range;

use guest_images::cache::Cache;
use guest_images::payloads::BARE_METAL;
use guest_images::{Progress, Suite};
use vpmu_retarget::x86::Proof;

use super::super::testing::*;
use super::*;

/// MOV ECX, EDI; RDPMC; RET.
const RDPMC: [u8; 5] = [0x89, 0xf9, 0x0f, 0x33, 0xc3];
const RDMSR: [u8; 5] = [0x89, 0xf9, 0x0f, 0x32, 0xc3];

fn linux(content: &[u8]) -> ElfFile {
    ElfFile { content: content.to_vec(), ..ElfFile::default() }
}

fn on_disk(path: &std::path::Path) -> Kernel {
    Kernel::read(path).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn an_rdpmc_of_the_kernel_becomes_an_rdmsr() {
    let mut kernel = read(&linux(&RDPMC).build()).unwrap();
    let retargeted = kernel.retarget_rdpmc().unwrap();
    assert_eq!(retargeted.sites.iter().map(|site| site.address).collect::<Vec<_>>(), [0xffff_ffff_8010_0002]);
    assert_eq!(kernel.image, linux(&RDMSR).build());
    assert_eq!(kernel.retarget_rdpmc().unwrap(), Retargeted { sites: vec![], left: vec![] });
}

#[test]
fn a_linux_with_a_doubtful_rdpmc_is_refused_and_stays_as_it_was() {
    // The byte after the first RDPMC's function is not a valid instruction, so the segment is not only code.
    let file = linux(&[&RDPMC[..], &[0x06], &RDPMC].concat()).build();
    let mut kernel = read(&file).unwrap();
    assert_eq!(
        kernel.retarget_rdpmc().unwrap_err().to_string(),
        "kernel: the bytes 0f 33 at 0xffffffff80100002 may be an RDPMC instruction or not, and Tally's PMU has to know: \
         --pmu kvm and --pmu none do without"
    );
    assert_eq!(kernel.image, file);
}

#[test]
fn a_flat_image_keeps_an_rdpmc_that_no_code_leads_to() {
    let header = multiboot_header(1 << 16, &[0x10_0000, 0x10_0000, 0, 0, 0x10_0020]);
    let mut kernel = read(&[&header[..], &RDPMC, &RDPMC].concat()).unwrap();
    let retargeted = kernel.retarget_rdpmc().unwrap();
    assert_eq!(retargeted.left, [0x10_0027]);
    let expected = [&header[..], &RDMSR, &RDPMC].concat();
    assert_eq!(kernel.image, expected);
}

/// Returns the bytes of numbers, each with its length in bytes.
fn numbers(numbers: &[(u64, usize)]) -> Vec<u8> {
    numbers.iter().flat_map(|(value, len)| value.to_le_bytes().into_iter().take(*len)).collect()
}

/// Returns a file with two sections, one of code and one of data, and a symbol for the first bytes of the code.
fn with_sections(file: &ElfFile, code: Range<u64>) -> Vec<u8> {
    const NAMES: &[u8] = b"\0.text\0.rodata\0read_counter\0";
    const CONTENT: u64 = ElfFile::CONTENT as u64;
    let wide = file.bits == 64;
    let word = if wide { 8 } else { 4 };
    let data = code.end..file.content.len() as u64;
    let (base, address, len) = (file.virtual_address, file.virtual_address + code.start, RDPMC.len() as u64);

    let mut bytes = file.build();
    let names = bytes.len() as u64;
    bytes.extend_from_slice(NAMES);
    let symbols = bytes.len() as u64;
    bytes.extend(if wide {
        numbers(&[(15, 4), (2, 1), (0, 1), (1, 2), (address, 8), (len, 8)])
    } else {
        numbers(&[(15, 4), (address, 4), (len, 4), (2, 1), (0, 1), (1, 2)])
    });
    let table = bytes.len() as u64;
    // Name, type, flags, address, offset, length. All links are to the first section, which has the names.
    for [name, kind, flags, address, offset, len] in [
        [0, 3, 0, 0, names, NAMES.len() as u64],
        [1, 1, 6, address, CONTENT + code.start, code.end - code.start],
        [7, 1, 2, base + data.start, CONTENT + data.start, data.end - data.start],
        [0, 2, 0, 0, symbols, table - symbols],
    ] {
        let fields = [(name, 4), (kind, 4), (flags, word), (address, word), (offset, word), (len, word)];
        bytes.extend(numbers(&[&fields[..], &[(0, 4), (0, 4), (0, word), (0, word)]].concat()));
    }
    let (table_at, count_at) = if wide { (40, 58) } else { (32, 46) };
    bytes[table_at..table_at + word].copy_from_slice(&numbers(&[(table, word)]));
    bytes[count_at..count_at + 6].copy_from_slice(&numbers(&[
        (if wide { 64 } else { 40 }, 2),
        (4, 2),
        (0, 2),
    ]));
    bytes
}

/// Returns a Linux and a bare-metal image with a function that reads a counter, and with the same bytes as data.
fn files_with_sections() -> [Vec<u8>; 2] {
    let content = [RDPMC, RDPMC].concat();
    let bare_metal = multiboot_elf(0x10_0000);
    let code = bare_metal.content.len() as u64;
    let content_behind = [&bare_metal.content[..], &content].concat();
    [
        with_sections(&linux(&content), 0..5),
        with_sections(&ElfFile { content: content_behind, ..bare_metal }, code..code + 5),
    ]
}

#[test]
fn an_rdpmc_in_code_is_changed_and_its_bytes_in_data_are_not() {
    for file in files_with_sections() {
        let mut kernel = read(&file).unwrap();
        let retargeted = kernel.retarget_rdpmc().unwrap();
        assert_eq!(retargeted.left, [0; 0]);
        let [site] = &retargeted.sites[..] else { panic!("{retargeted:?}") };
        assert_eq!(site.function.as_deref(), Some("read_counter"));
        let changed: Vec<usize> =
            (0..kernel.image.len()).filter(|at| kernel.image[*at] != file[*at]).collect();
        assert_eq!(changed, [kernel.image.len() - 7]);
    }
}

#[test]
fn no_change_of_a_number_in_a_section_header_panics() {
    for mut file in files_with_sections() {
        let headers = file.len() - if file[4] == 2 { 256 } else { 160 };
        // Segment addresses are changed as well, since a file without valid sections is read by its segments.
        for at in (16..ElfFile::CONTENT - 8).chain(headers - 40..file.len() - 8) {
            let good: [u8; 8] = file[at..at + 8].try_into().unwrap();
            for bad in [0, u64::MAX, 1 << 63, 0xffff_ffff_ffff_f000, u64::from_le_bytes(good) ^ 1] {
                file[at..at + 8].copy_from_slice(&bad.to_le_bytes());
                if let Ok(mut kernel) = read(&file) {
                    // A refusal is as good as a change.
                    let _ = kernel.retarget_rdpmc();
                }
                file[at..at + 8].copy_from_slice(&good);
            }
        }
        assert_eq!(read(&file).unwrap().retarget_rdpmc().unwrap().sites.len(), 1);
    }
}

#[test]
fn the_bare_metal_payload_reads_counters_in_one_place() {
    let mut kernel = read(BARE_METAL).unwrap();
    let retargeted = kernel.retarget_rdpmc().unwrap();
    assert_eq!(retargeted.sites.len(), 1);
    assert_eq!(retargeted.left, [0; 0]);
}

/// Returns the addresses at which the pattern of the code alone suggests the read of a counter: RDPMC, and soon after
/// it SHL RDX, 32, which combines the halves of the value.
fn likely_reads(kernel: &Kernel) -> Vec<u64> {
    const SHIFT: [u8; 4] = [0x48, 0xc1, 0xe2, 0x20];
    let description = kernel.describe();
    let code = description.sections.iter().filter(|section| section.content == Content::Code);
    let likely_addresses = code.flat_map(|section| {
        let windows = (section.address..).zip(section.bytes.windows(16));
        windows.filter(|(_, bytes)| bytes.starts_with(&[0x0f, 0x33]) && bytes.windows(4).any(|w| w == SHIFT))
    });
    likely_addresses.map(|(address, _)| address).collect()
}

fn changed(kernel: &mut Kernel) -> Vec<(u64, Proof)> {
    let retargeted = kernel.retarget_rdpmc().unwrap_or_else(|error| panic!("{error}"));
    retargeted.sites.into_iter().map(|site| (site.address, site.proof)).collect()
}

#[test]
fn the_distribution_s_kernels_read_counters_in_one_place_each() {
    let cache = Cache::open().unwrap();
    for suite in [Suite::Bookworm, Suite::Trixie, Suite::Sid] {
        let image = guest_images::kernel(&cache, suite, &mut Progress::stderr("test")).unwrap().image;
        let mut kernel = on_disk(&image);
        let likely = likely_reads(&kernel);
        assert_eq!(likely.len(), 1, "{suite}");
        assert_eq!(changed(&mut kernel), [(likely[0], Proof::Unwind)], "{suite}");
        assert_eq!(changed(&mut kernel), [], "{suite}");
    }
}

#[test]
#[ignore = "compiles a kernel; `cargo sweep` runs it"]
fn the_same_rdpmcs_are_changed_with_and_without_symbols() {
    let cache = Cache::open().unwrap();
    let small = guest_images::small_kernel(&cache, &mut Progress::stderr("test")).unwrap();
    let (mut packed, mut with_symbols) = (on_disk(&small.image), on_disk(&small.vmlinux));
    let likely = likely_reads(&packed);
    assert!(likely.len() > 1);
    let retargeted = with_symbols.retarget_rdpmc().unwrap_or_else(|error| panic!("{error}"));
    assert!(retargeted.sites.iter().any(|site| site.function.as_deref() == Some("x86_perf_event_update")));
    let by_symbols: Vec<_> = retargeted.sites.iter().map(|site| (site.address, site.proof)).collect();
    assert_eq!(by_symbols, likely.iter().map(|address| (*address, Proof::Function)).collect::<Vec<_>>());
    assert_eq!(changed(&mut packed), likely.iter().map(|at| (*at, Proof::WholeSection)).collect::<Vec<_>>());
}
