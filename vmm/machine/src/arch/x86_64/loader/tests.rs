//! Tests of the loader with whole files: valid, invalid and damaged ones.
//!
//! `testdata/payload` was compressed as the kernel's `scripts/Makefile.lib` does it, from standard input:
//! `lz4 -l -9`, `zstd -22 --ultra`, `xz --check=crc32 --x86 --lzma2=dict=32MiB`, `gzip -n -9`.

use std::ops::Range;

use super::testing::*;
use super::*;
use crate::kernel::Kernel;
use crate::memory::GuestRam;

const PACKED: [(&str, &[u8]); 4] = [
    ("lz4", include_bytes!("testdata/payload.lz4")),
    ("zstd", include_bytes!("testdata/payload.zst")),
    ("xz", include_bytes!("testdata/payload.xz")),
    ("gzip", include_bytes!("testdata/payload.gz")),
];
const INIT_SIZE: u32 = 0x10_0000;

/// Returns the payloads as a bzImage contains them.
fn payloads() -> impl Iterator<Item = (&'static str, Vec<u8>)> {
    PACKED.into_iter().map(|(name, packed)| match name {
        "gzip" => (name, packed.to_vec()),
        _ => (name, with_size(packed, VMLINUX.len())),
    })
}

/// Returns a valid file of each format, with its name.
fn good_files() -> Vec<(String, Vec<u8>)> {
    let with_addresses = multiboot_header(1 << 16, &[0x10_0000, 0x10_0000, 0, 0x10_1000, 0x10_0020]);
    let mut files: Vec<_> =
        payloads().map(|(name, payload)| (name.to_owned(), bzimage(&payload, INIT_SIZE))).collect();
    files.push(("vmlinux".to_owned(), VMLINUX.to_vec()));
    files.push(("multiboot ELF".to_owned(), multiboot_elf(0x10_0000).build()));
    files.push(("multiboot addresses".to_owned(), [with_addresses, vec![0xf4; 64]].concat()));
    files
}

#[test]
fn a_bzimage_of_each_compression_unpacks_to_its_vmlinux() {
    for (name, payload) in payloads() {
        let kernel = read(&bzimage(&payload, INIT_SIZE)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(kernel.is_linux());
        assert_eq!(kernel.image, VMLINUX, "{name}");
    }
}

#[test]
fn a_bzimage_of_several_lz4_blocks_unpacks() {
    let content: Vec<u8> = (0..5 << 10).flat_map(|page: u32| [page.to_le_bytes()[0]; 4096]).collect();
    let file = ElfFile { content, memory_len: 32 << 20, ..ElfFile::default() }.build();
    let mut packed = vec![0x02, 0x21, 0x4c, 0x18];
    for block in file.chunks(8 << 20) {
        let block = lz4_flex::block::compress(block);
        packed.extend_from_slice(&u32::try_from(block.len()).unwrap().to_le_bytes());
        packed.extend_from_slice(&block);
    }
    let kernel = read(&bzimage(&with_size(&packed, file.len()), 32 << 20)).unwrap();
    assert!(kernel.image == file);
}

#[test]
fn compressions_that_tally_does_not_know_are_named() {
    for (magic, name) in [(&b"BZh9"[..], "bzip2"), (b"\x5d\0\0\x80", "lzma"), (b"\x89LZO", "lzo")] {
        let text = refusal(&bzimage(&[magic, &[0; 32]].concat(), INIT_SIZE));
        assert!(text.contains(&format!("compressed with {name}")), "{text}");
    }
    let text = refusal(&bzimage(&[0x11; 32], INIT_SIZE));
    assert!(text.contains("in no known way"), "{text}");
}

#[test]
fn a_payload_that_unpacks_to_more_or_less_than_it_says_is_damaged() {
    for (name, packed) in PACKED {
        for size in [VMLINUX.len() - 1, VMLINUX.len() + 1] {
            let mut payload = with_size(packed, size);
            if name == "gzip" {
                payload = packed.to_vec();
                payload.truncate(packed.len() - 4);
                payload.extend_from_slice(&u32::try_from(size).unwrap().to_le_bytes());
            }
            let text = refusal(&bzimage(&payload, INIT_SIZE));
            assert!(text.contains("damaged"), "{name}: {text}");
        }
    }
}

#[test]
fn a_payload_that_would_fill_the_host_s_memory_is_not_unpacked() {
    let payload = with_size(PACKED[0].1, 0xffff_ffff);
    for init_size in [INIT_SIZE, u32::MAX] {
        assert!(refusal(&bzimage(&payload, init_size)).contains("too large"));
    }
}

#[test]
fn a_changed_byte_in_a_payload_with_a_checksum_is_noticed() {
    for (name, payload) in payloads().filter(|(name, _)| *name != "lz4") {
        let mut file = bzimage(&payload, INIT_SIZE);
        let middle = 1024 + 16 + payload.len() / 2;
        file[middle] ^= 0x10;
        assert!(refusal(&file).contains("damaged"), "{name}");
    }
}

#[test]
fn a_file_that_is_not_a_kernel_is_refused() {
    let zeroes = vec![0; 20_000];
    for content in [&b""[..], b"MZ", b"#!/bin/sh\n", &zeroes] {
        assert_eq!(
            refusal(content),
            "kernel: not a kernel: neither a bzImage, nor a vmlinux, nor a multiboot image"
        );
    }
}

#[test]
fn a_file_that_cannot_be_opened_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let text = Kernel::read(directory.path()).err().unwrap().to_string();
    assert!(text.ends_with("not a regular file"), "{text}");
    let text = Kernel::read(&directory.path().join("missing")).err().unwrap().to_string();
    assert!(text.contains("missing: cannot read it: No such file"), "{text}");
}

#[test]
fn a_truncated_kernel_is_reported_as_truncated() {
    for (name, file) in good_files() {
        let len = match name.as_str() {
            // This file has no fixed length: a shorter one is complete, too.
            "multiboot addresses" => continue,
            "vmlinux" | "multiboot ELF" => file.len() - 1,
            _ => file.len() - 65,
        };
        let text = refusal(&file[..len]);
        assert!(text.contains("truncated") && text.contains(&len.to_string()), "{name}: {text}");
    }
}

#[test]
fn kernels_for_other_architectures_are_named() {
    let elf = |machine| ElfFile { machine, ..ElfFile::default() }.build();
    let mut arm64_image = vec![0; 4096];
    arm64_image[56..60].copy_from_slice(b"ARM\x64");
    let mut riscv_image = vec![0; 4096];
    riscv_image[48..60].copy_from_slice(b"RISCV\0\0\0RSC\x05");
    let zboot = |machine: u16| {
        let mut zboot = vec![0; 4096];
        zboot[..8].copy_from_slice(b"MZ\0\0zimg");
        zboot[60] = 0x80;
        zboot[0x80..0x84].copy_from_slice(b"PE\0\0");
        zboot[0x84..0x86].copy_from_slice(&machine.to_le_bytes());
        zboot
    };
    let mut big_endian = elf(22_u16.swap_bytes());
    big_endian[5] = 2;
    for (file, name) in [
        (elf(183), "aarch64"),
        (elf(243), "RISC-V"),
        (arm64_image, "aarch64"),
        (riscv_image, "RISC-V"),
        (zboot(0xaa64), "aarch64"),
        (zboot(0x5064), "RISC-V"),
        (big_endian, "s390"),
    ] {
        assert_eq!(refusal(&file), format!("kernel: built for {name}, this host is x86-64"));
    }
}

#[test]
fn the_error_names_the_type_of_an_elf_file_that_is_not_a_kernel() {
    let kind = |kind| refusal(&ElfFile { kind, ..ElfFile::default() }.build());
    assert!(kind(1).contains("relocatable object"));
    assert!(kind(3).contains("shared object"));
    assert!(kind(4).contains("core dump"));
    let program = ElfFile { virtual_address: 0x40_0000, ..ElfFile::default() };
    assert!(refusal(&program.build()).contains("an ELF program"));
    let narrow = ElfFile { bits: 32, machine: 3, ..ElfFile::default() };
    assert!(refusal(&narrow.build()).contains("32-bit kernel"));
    let outside = ElfFile { entry: 0x50_0000, ..ElfFile::default() };
    assert!(refusal(&outside.build()).contains("entry point 0x500000"));
}

#[test]
fn old_and_32_bit_bzimages_are_refused() {
    let mut old = bzimage(&[], 0);
    old[0x206] = 0x0a;
    old[0x207] = 0x02;
    assert!(refusal(&old).contains("boot protocol 2.10"));
    let mut narrow = bzimage(&[], 0);
    narrow[0x236] = 0;
    assert!(refusal(&narrow).contains("32-bit kernel"));
}

/// Reads a damaged file and, if it is still accepted as a kernel, retargets and loads it. Nothing may panic.
fn survive(content: &[u8], ram: &GuestRam) {
    if let Ok(mut kernel) = read(content) {
        let _ = kernel.retarget_rdpmc();
        // An error is as acceptable as success.
        let _ = kernel.load(&Boot { ram, command_line: "console=ttyS0", initrd: None, initrd_prefix: &[] });
    }
}

fn headers(file: &[u8]) -> Range<usize> {
    if bzimage::is_bzimage(file) { 0x1f1..0x26c } else { 0..ElfFile::CONTENT.min(file.len()) }
}

#[test]
fn no_truncation_of_a_file_or_its_payload_panics() {
    let ram = ram(4);
    for (_, file) in good_files() {
        (0..file.len()).for_each(|len| survive(&file[..len], &ram));
    }
    for (_, payload) in payloads() {
        (0..payload.len()).for_each(|len| survive(&bzimage(&payload[..len], INIT_SIZE), &ram));
    }
}

#[test]
fn no_change_of_a_byte_panics() {
    let ram = ram(4);
    for (_, file) in good_files() {
        let payload = if bzimage::is_bzimage(&file) { 1024..file.len() } else { 0..0 };
        let mut file = file;
        for at in headers(&file).chain(payload) {
            let good = file[at];
            for bad in [0, 0xff, good ^ 1, good ^ 0x80] {
                file[at] = bad;
                survive(&file, &ram);
            }
            file[at] = good;
        }
    }
}

#[test]
fn no_change_of_a_number_in_a_header_panics() {
    let ram = ram(4);
    for (name, file) in good_files() {
        let header = headers(&file);
        let mut file = file;
        for at in header.start..header.end - 8 {
            let good: [u8; 8] = file[at..at + 8].try_into().unwrap();
            for bad in [0, 1, u64::MAX, i64::MAX as u64, 1 << 63, 0xffff_f000, 0x1_0000_0000, u64::MAX << 12]
            {
                for len in [2, 4, 8] {
                    file[at..at + len].copy_from_slice(&bad.to_le_bytes()[..len]);
                    survive(&file, &ram);
                    file[at..at + 8].copy_from_slice(&good);
                }
            }
        }
        assert!(read(&file).is_ok(), "{name} was not put back together");
    }
}
