//! Small images in which the bytes of RDPMC occur in instructions, across instructions and in data.

use proptest::prelude::*;

use super::*;

const TEXT: u64 = 0xffff_ffff_8100_0000;
/// An address for 32-bit code.
const LOW_TEXT: u64 = 0x10_0000;
const TABLES: u64 = 0xffff_ffff_8200_0000;
const RDPMC_FUNCTION: &[u8] = &[0x89, 0xf9, 0x0f, 0x33, 0xc3];

fn section<'a>(name: &'a str, address: u64, bytes: &'a [u8], content: Content) -> Section<'a> {
    Section { name, address, bytes, content }
}

fn function(name: &str, offset: u64, len: u64) -> Symbol<'_> {
    Symbol { name, address: TEXT + offset, len, content: Content::Code }
}

/// Searches the text of a Linux kernel with these symbols. Returns the offsets of RDPMC instructions and of undecided
/// occurrences.
fn with_symbols(text: &[u8], symbols: &[Symbol]) -> (Vec<u64>, Vec<u64>) {
    let sections = vec![section(".text", TEXT, text, Content::Code)];
    offsets(&find(&Image { sections, symbols: symbols.to_vec(), kind: Kind::Linux }))
}

fn offsets(findings: &Findings) -> (Vec<u64>, Vec<u64>) {
    let sites = findings.sites.iter().map(|site| site.address - TEXT).collect();
    (sites, findings.undecided.iter().map(|address| address - TEXT).collect())
}

/// Encodes an address as the kernel's tables do: a 32-bit offset from the address of the field.
fn relative_to(at: u64, address: u64) -> [u8; 4] {
    u32::try_from(address.wrapping_sub(at) & 0xffff_ffff).unwrap().to_le_bytes()
}

fn unwind_table(offsets: &[u64]) -> Vec<u8> {
    let places = (TABLES..).step_by(4);
    offsets.iter().zip(places).flat_map(|(offset, at)| relative_to(at, TEXT + offset)).collect()
}

fn with_unwind_table(text: &[u8], entries: &[u64]) -> (Vec<u64>, Vec<u64>) {
    let table = unwind_table(entries);
    let sections = vec![
        section(".text", TEXT, text, Content::Code),
        section(".orc_unwind_ip", TABLES, &table, Content::Data),
    ];
    offsets(&find(&Image { sections, symbols: Vec::new(), kind: Kind::Linux }))
}

/// Searches a bare-metal image without symbols that starts at its first byte.
fn by_flow(text: &[u8]) -> (Vec<u64>, Vec<u64>) {
    let sections = vec![section("", LOW_TEXT, text, Content::Code)];
    let findings = find(&Image { sections, symbols: Vec::new(), kind: Kind::BareMetal { entry: LOW_TEXT } });
    assert!(findings.sites.iter().all(|site| site.proof == Proof::Flow));
    let sites = findings.sites.iter().map(|site| site.address - LOW_TEXT).collect();
    (sites, findings.undecided.iter().map(|address| address - LOW_TEXT).collect())
}

#[test]
fn an_rdpmc_is_found_and_its_function_named() {
    let sections = vec![section(".text", TEXT, RDPMC_FUNCTION, Content::Code)];
    let symbols = vec![function("native_read_pmc", 0, 5)];
    let site = Site {
        address: TEXT + 2,
        byte: TEXT + 3,
        function: Some("native_read_pmc".into()),
        proof: Proof::Function,
    };
    let findings = find(&Image { sections, symbols, kind: Kind::Linux });
    assert_eq!(findings, Findings { sites: vec![site], undecided: vec![] });
}

#[test]
fn an_image_that_would_be_decoded_again_and_again_is_undecided_from_some_point_on() {
    // Each of the occurrences needs all of the function.
    let text: Vec<u8> = [0x0f, 0x33].repeat(4096);
    for kind in [Kind::Linux, Kind::BareMetal { entry: TEXT }] {
        let find = |steps| {
            let sections = vec![section(".text", TEXT, &text, Content::Code)];
            let symbols = vec![function("f", 0, text.len() as u64)];
            offsets(&find_in(&Image { sections, symbols, kind }, steps))
        };
        let (sites, undecided) = find(100_000);
        assert_eq!(undecided, [2 * sites.len() as u64], "{kind:?}");
        assert!(sites.len() < 50, "{kind:?}: {}", sites.len());
        assert_eq!(find(0), (vec![], vec![0]), "{kind:?}");
    }
}

#[test]
fn a_prefix_belongs_to_the_instruction_and_is_left_alone() {
    let text = [0x48, 0x0f, 0x33, 0xc3];
    let sections = vec![section(".text", TEXT, &text, Content::Code)];
    let findings = find(&Image { sections, symbols: vec![function("f", 0, 4)], kind: Kind::Linux });
    assert_eq!((findings.sites[0].address, findings.sites[0].byte), (TEXT, TEXT + 2));
}

#[test]
fn the_bytes_in_other_instructions_are_left_alone() {
    let nothing = (vec![], vec![]);
    for text in [
        // MOV EAX, 0x330f
        &[0xb8, 0x0f, 0x33, 0, 0, 0xc3][..],
        // MOV RSI, [RIP - 0x21ccf1]
        &[0x48, 0x8b, 0x35, 0x0f, 0x33, 0xde, 0xff, 0xc3],
        // MOV EAX, 0x0f000000; XOR EAX, [RAX]
        &[0xb8, 0, 0, 0, 0x0f, 0x33, 0x00, 0xc3],
        // JMP +0x330f
        &[0xe9, 0x0f, 0x33, 0, 0],
    ] {
        let len = text.len() as u64;
        assert_eq!(with_symbols(text, &[function("f", 0, len)]), nothing, "{text:x?}");
        assert_eq!(with_unwind_table(text, &[0, 0, len]).0, [0; 0], "{text:x?}");
    }
}

#[test]
fn data_in_the_text_is_left_alone_if_a_symbol_says_that_it_is_data() {
    let text = [&[0xc3, 0, 0, 0, 0x0f, 0x33, 0, 0][..], RDPMC_FUNCTION].concat();
    let functions = [function("jumps", 0, 1), function("reads", 8, 5)];
    let table = Symbol { name: "table", address: TEXT + 4, len: 4, content: Content::Data };
    assert_eq!(with_symbols(&text, &[functions[0], table, functions[1]]), (vec![10], vec![]));
    assert_eq!(with_symbols(&text, &functions), (vec![10], vec![4]));
}

#[test]
fn an_rdpmc_that_a_branch_cuts_in_two_is_undecided() {
    // JMP to the second byte of the RDPMC, where XOR EAX, [RAX] would begin.
    let text = [0xeb, 1, 0x0f, 0x33, 0x00, 0xc3];
    assert_eq!(with_symbols(&text, &[function("f", 0, 6)]), (vec![], vec![2]));
    assert_eq!(by_flow(&text), (vec![], vec![]), "only XOR is ever reached");
    // With a conditional jump both are reached.
    assert_eq!(by_flow(&[0x74, 1, 0x0f, 0x33, 0x00, 0xc3]), (vec![], vec![2]));
}

#[test]
fn a_function_that_does_not_end_where_its_last_instruction_does_proves_nothing() {
    let text = [RDPMC_FUNCTION, &[0xe8, 0, 0, 0, 0]].concat();
    assert_eq!(with_symbols(&text, &[function("f", 0, 8)]), (vec![], vec![2]));
    assert_eq!(with_symbols(&text, &[function("f", 0, 10)]), (vec![2], vec![]));
}

#[test]
fn invalid_instructions_prove_nothing() {
    // 0x06 is PUSH ES, which 64-bit mode does not have.
    let text = [&[0x06], RDPMC_FUNCTION].concat();
    assert_eq!(with_symbols(&text, &[function("f", 0, 6)]), (vec![], vec![3]));
}

#[test]
fn two_entries_of_the_unwind_table_have_to_agree() {
    let text = [&[0x53], RDPMC_FUNCTION].concat();
    assert_eq!(with_unwind_table(&text, &[0, 1, 6]), (vec![3], vec![]));
    assert_eq!(with_unwind_table(&text, &[0, 6]), (vec![], vec![3]));
    // The third is wrong: in the middle of MOV ECX, EDI there is STC.
    assert_eq!(with_unwind_table(&text, &[0, 1, 2, 6]), (vec![3], vec![]));
    // The last is wrong: no instruction ends there.
    assert_eq!(with_unwind_table(&text, &[0, 1, 4]), (vec![], vec![3]));
}

/// Searches an image with one alternative: a call in the text, and its replacement.
fn with_alternative(layout: usize, replacement: &[u8]) -> Findings {
    let (table_at, replacements_at) = (TABLES + 0x1000, TABLES + 0x2000);
    // MOV EAX, 0x330f; then CALL [RIP], which is replaced.
    let text = [0x90, 0x90, 0xb8, 0x0f, 0x33, 0, 0, 0xff, 0x15, 0, 0, 0, 0, 0xc3];
    let mut entry = [relative_to(table_at, TEXT + 7), relative_to(table_at + 4, replacements_at)].concat();
    entry.resize(layout, 0);
    entry[if layout == 14 { 12 } else { 10 }] = 6;
    // The unwind table has an address in the middle of the call: that of the replacement's second instruction.
    let unwind = unwind_table(&[0, 1, 8, 9, 13]);
    let sections = vec![
        section(".text", TEXT, &text, Content::Code),
        section(".orc_unwind_ip", TABLES, &unwind, Content::Data),
        section(".altinstructions", table_at, &entry, Content::Data),
        section(".altinstr_replacement", replacements_at, replacement, Content::Code),
    ];
    find(&Image { sections, symbols: Vec::new(), kind: Kind::Linux })
}

#[test]
fn an_unwind_entry_of_a_replacement_is_not_used_for_the_original_code() {
    for layout in [12, 13, 14] {
        assert_eq!(with_alternative(layout, &[0x9c, 0x58]), Findings::default());
    }
}

#[test]
fn an_rdpmc_in_the_replacement_of_an_alternative_is_found() {
    for layout in [12, 13, 14] {
        let findings = with_alternative(layout, RDPMC_FUNCTION);
        assert_eq!(findings.sites[0].proof, Proof::Alternative);
        assert_eq!(findings.sites[0].address, TABLES + 0x2002);
    }
    // Entries of an unknown length: the section must then consist of code only.
    assert_eq!(with_alternative(16, RDPMC_FUNCTION).sites[0].proof, Proof::WholeSection);
}

#[test]
fn without_any_table_a_section_of_code_only_is_a_proof() {
    let text = [RDPMC_FUNCTION, &[0x74, 0xf9, 0xb8, 0x0f, 0x33, 0, 0, 0xc3]].concat();
    assert_eq!(with_symbols(&text, &[]), (vec![2], vec![]));
    let branch_into_middle = [RDPMC_FUNCTION, &[0x74, 0xfa, 0xb8, 0x0f, 0x33, 0, 0, 0xc3]].concat();
    assert_eq!(with_symbols(&branch_into_middle, &[]), (vec![], vec![2, 8]));
    let with_data = [RDPMC_FUNCTION, &[0x06]].concat();
    assert_eq!(with_symbols(&with_data, &[]), (vec![], vec![2]));
}

#[test]
fn sections_of_data_are_not_searched() {
    let sections = vec![section(".rodata", TEXT, RDPMC_FUNCTION, Content::Data)];
    let findings = find(&Image { sections, symbols: Vec::new(), kind: Kind::Linux });
    assert_eq!(findings, Findings::default());
}

#[test]
fn a_bare_metal_rdpmc_is_found_on_paths_from_the_entry_point_only() {
    // CALL over a string to POP; RDPMC; JNE to HLT; JMP SHORT -2; data; HLT.
    let text =
        [0xe8, 2, 0, 0, 0, 0x0f, 0x33, 0x58, 0x0f, 0x33, 0x75, 4, 0xeb, 0xfe, 0x0f, 0x33, 0xf4, 0xeb, 0xfd];
    let (sites, undecided) = by_flow(&text);
    // Calls are assumed to return, so the bytes after the first one are taken for code.
    assert_eq!((sites, undecided), (vec![5, 8], vec![14]));
}

#[test]
fn a_bare_metal_image_may_switch_to_64_bit_mode() {
    // JMP FAR to the seventh byte; there MOV RAX, RCX and RDPMC.
    let mut text = vec![0xea];
    text.extend_from_slice(&u32::try_from(LOW_TEXT + 7).unwrap().to_le_bytes());
    text.extend_from_slice(&[8, 0, 0x48, 0x89, 0xc8, 0x0f, 0x33, 0xf4]);
    assert_eq!(by_flow(&text), (vec![10], vec![]));
}

#[test]
fn a_bare_metal_function_that_is_only_called_by_pointer_is_found_by_its_symbol() {
    let text = [&[0xf4, 0xeb, 0xfd], RDPMC_FUNCTION].concat();
    let sections = vec![section(".text", TEXT, &text, Content::Code)];
    let kind = Kind::BareMetal { entry: TEXT };
    let image = Image { sections, symbols: vec![function("handler", 3, 5)], kind };
    assert_eq!(offsets(&find(&image)), (vec![5], vec![]));
}

/// Searches the only function of a bare-metal kernel.
fn in_bare_metal_function(text: &[u8]) -> (Vec<u64>, Vec<u64>) {
    // HLT at the entry, so that the control flow leads nowhere.
    let text = [&[0xf4, 0xeb, 0xfd], text].concat();
    let sections = vec![section(".text", TEXT, &text, Content::Code)];
    let symbols = vec![function("f", 3, text.len() as u64 - 3)];
    let image = Image { sections, symbols, kind: Kind::BareMetal { entry: TEXT } };
    let (sites, undecided) = offsets(&find(&image));
    (sites.iter().map(|site| site - 3).collect(), undecided.iter().map(|at| at - 3).collect())
}

#[test]
fn kvms_forced_emulation_prefix_is_known() {
    // The prefix, then WRMSR. Without the prefix, IMUL would swallow the first byte of WRMSR.
    let forced = [0x0f, 0x0b, b'k', b'v', b'm', 0x0f, 0x30];
    let text = [&forced[..], RDPMC_FUNCTION].concat();
    assert_eq!(in_bare_metal_function(&text), (vec![9], vec![]));
}

#[test]
fn a_bare_metal_function_is_code_of_the_mode_in_which_it_decodes() {
    // In 64-bit mode MOV RAX, 0x0606060606060606; in 32-bit mode DEC EAX, then MOV and PUSH ES: both decode.
    let wide = [&[0x48, 0xb8], &[0x06; 8][..], RDPMC_FUNCTION].concat();
    assert_eq!(in_bare_metal_function(&wide), (vec![12], vec![]));
    // PUSH ES exists in 32-bit mode only.
    assert_eq!(in_bare_metal_function(&[&[0x06], RDPMC_FUNCTION].concat()), (vec![3], vec![]));
    // In 32-bit mode DEC EAX; MOV EAX, 0x330f9090. In 64-bit mode the bytes after the constant are no instruction.
    let narrow = [0x48, 0xb8, 0x90, 0x90, 0x0f, 0x33, 0x60, 0x90, 0x90, 0x90, 0x61, 0xc3];
    assert_eq!(in_bare_metal_function(&narrow), (vec![], vec![]));
}

#[test]
fn a_bare_metal_function_needs_to_decode_only_around_an_rdpmc() {
    const NO_INSTRUCTION: &[u8] = &[0x0f, 0x04, 0x0f, 0x04, 0x0f, 0x04, 0x0f, 0x04];
    let decodes = |text: &[&[u8]]| in_bare_metal_function(&text.concat());
    assert_eq!(decodes(&[RDPMC_FUNCTION, NO_INSTRUCTION]), (vec![2], vec![]), "up to a return");
    let nops: &[u8] = &[0x90; 8];
    assert_eq!(decodes(&[&[0x0f, 0x33], nops, NO_INSTRUCTION]), (vec![0], vec![]), "eight instructions");
    assert_eq!(decodes(&[&[0x0f, 0x33], &nops[1..], NO_INSTRUCTION]), (vec![], vec![0]), "only seven");
    assert_eq!(decodes(&[NO_INSTRUCTION, RDPMC_FUNCTION]), (vec![], vec![10]), "nothing leads to it");
    assert_eq!(decodes(&[&[0xb8, 0x0f, 0x33, 0, 0], nops, NO_INSTRUCTION]), (vec![], vec![]), "a constant");
    // JMP to the second byte of RDPMC.
    let cut = [0xeb, 1, 0x0f, 0x33, 0x00];
    assert_eq!(decodes(&[&cut, nops, NO_INSTRUCTION]), (vec![], vec![2]));
    // Linux has to decode from end to end.
    let text = [RDPMC_FUNCTION, NO_INSTRUCTION].concat();
    assert_eq!(with_symbols(&text, &[function("f", 0, text.len() as u64)]), (vec![], vec![2]));
}

/// Instructions, most of which contain the bytes of RDPMC, or begin or end with one of them.
const INSTRUCTIONS: [&[u8]; 10] = [
    &[0x0f, 0x33],
    &[0x48, 0x0f, 0x33],
    &[0x90],
    &[0xb8, 0x0f, 0x33, 0x0f, 0x33],
    &[0xb8, 0x33, 0x0f, 0x33, 0x0f],
    &[0x33, 0x00],
    &[0x48, 0xb8, 0x0f, 0x33, 0x0f, 0x33, 0x0f, 0x33, 0x0f, 0x33],
    &[0x48, 0x8b, 0x05, 0x0f, 0x33, 0x0f, 0x33],
    &[0x0f, 0x1f, 0x84, 0x00, 0x0f, 0x33, 0x33, 0x0f],
    &[0x6a, 0x0f],
];

proptest! {
    #[test]
    fn exactly_the_rdpmc_instructions_are_found(chosen in prop::collection::vec(0..INSTRUCTIONS.len(), 1..64)) {
        let mut text = Vec::new();
        let mut expected = Vec::new();
        for index in chosen {
            if index < 2 {
                expected.push(text.len() as u64);
            }
            text.extend_from_slice(INSTRUCTIONS[index]);
        }
        let found = with_symbols(&text, &[function("f", 0, text.len() as u64)]);
        prop_assert_eq!(found, (expected.clone(), vec![]));
        prop_assert_eq!(with_symbols(&text, &[]), (expected, vec![]));
    }

    #[test]
    fn whatever_the_tables_say_every_site_has_the_bytes_of_rdpmc(
        text in prop::collection::vec(prop::sample::select(vec![0x0f, 0x33, 0x48, 0xe8, 0x74, 0xea, 0xc3, 0x90]), 1..200),
        unwind in prop::collection::vec(any::<u8>(), 0..64),
        alternatives in prop::collection::vec(any::<u8>(), 0..64),
        functions in prop::collection::vec((0..200_u64, 0..20_u64), 0..8),
        bare_metal in any::<bool>(),
    ) {
        let kind = if bare_metal { Kind::BareMetal { entry: TEXT } } else { Kind::Linux };
        let sections = vec![
            section(".text", TEXT, &text, Content::Code),
            section(".orc_unwind_ip", TABLES, &unwind, Content::Data),
            section(".altinstructions", TABLES, &alternatives, Content::Data),
            section(".altinstr_replacement", TEXT + 0x1000, &text, Content::Code),
        ];
        let symbols = functions.iter().map(|(offset, len)| function("f", *offset, *len)).collect();
        for site in find(&Image { sections, symbols, kind }).sites {
            let offset = usize::try_from((site.byte - TEXT) & 0xfff).unwrap();
            prop_assert_eq!(&text[offset - 1..=offset], &[Site::ESCAPE, Site::BEFORE]);
        }
    }
}
