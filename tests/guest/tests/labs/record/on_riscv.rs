//! `tally record` on a RISC-V host, which has one boot for these tests: some two minutes of a core.

use std::sync::LazyLock;

use guest_images::payloads::riscv64::LOOP;
use guest_tests::lab::{Results, Steps};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

use super::{FUNCTIONS, WAIT, are_known, are_the_same, functions_of_fuse, own_and_ours, reads};

/// The tests of this file.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        every_sample_has_its_instruction_and_its_callers,
        callers_are_those_of_the_guests_own_perf,
        functions_of_modules_are_named_as_the_guests_own_perf_names_them,
        functions_of_programs_on_a_share_have_their_file,
    ])
}

/// Address at which programs are loaded, and where their code begins in the file.
const BASE: u64 = 0x1_0000;
const CODE: usize = 4 * 30;
/// Instructions that [`NEST`] executes.
const NEST_INSTRUCTIONS: u64 = 20_000_024;
/// Counts between two samples of it. The loop has two instructions, and 13 come before it, so an even number is always
/// at the second one.
const PERIOD: u64 = 19_998;
/// Where that is, and where the two callers go on, behind the begin of the code.
const SAMPLED: [u64; 3] = [0x54, 0x28, 0x08];

/// The code of a program with two functions that have frames.
const NEST: [u32; 26] = [
    0x0000_0413, // li s0, 0: nobody calls the first function
    0x0100_00ef, // jal outer
    0x0000_0513, // li a0, 0
    0x05d0_0893, // li a7, 93: the system call exit
    0x0000_0073, // ecall
    0xff01_0113, // outer: addi sp, sp, -16
    0x0011_3423, // sd ra, 8(sp)
    0x0081_3023, // sd s0, 0(sp)
    0x0101_0413, // addi s0, sp, 16
    0x0140_00ef, // jal inner
    0x0081_3083, // ld ra, 8(sp)
    0x0001_3403, // ld s0, 0(sp)
    0x0101_0113, // addi sp, sp, 16
    0x0000_8067, // ret
    0xff01_0113, // inner: addi sp, sp, -16
    0x0011_3423, // sd ra, 8(sp)
    0x0081_3023, // sd s0, 0(sp)
    0x0101_0413, // addi s0, sp, 16
    0x0098_9537, // lui a0, 0x989
    0x6805_0513, // addi a0, a0, 0x680: ten million
    0xfff5_0513, // addi a0, a0, -1
    0xfe05_1ee3, // bnez a0, -4
    0x0081_3083, // ld ra, 8(sp)
    0x0001_3403, // ld s0, 0(sp)
    0x0101_0113, // addi sp, sp, 16
    0x0000_8067, // ret
];

/// Returns the program, with the headers of another one.
fn nest() -> Vec<u8> {
    /// Where the segment's sizes are, in the file and in memory.
    const SIZES: [usize; 2] = [64 + 32, 64 + 40];
    let code = NEST.iter().flat_map(|word| word.to_le_bytes());
    let mut program: Vec<u8> = LOOP[..CODE].iter().copied().chain(code).collect();
    let size = (program.len() as u64).to_le_bytes();
    for at in SIZES {
        program[at..at + 8].copy_from_slice(&size);
    }
    program
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let own = format!(
        "perf stat -x, -e instructions:u ./nest 2>&1; echo; \
         perf record -q -o /tmp/data --call-graph fp -e instructions:u -c {PERIOD} ./nest; perf script -i /tmp/data -F ip"
    );
    Steps::on_riscv("record on RISC-V")
        .in_guest("nest", nest())
        .configure_host(|scenario| scenario.program(nest(), "nest"))
        .step(
            "chains",
            &format!(
                "{FUNCTIONS} guest chains '{own}; {WAIT} ./nest; echo done; sleep 9'; \
                 record chains -e instructions:u -c {PERIOD} --call-graph fp && sed /ready/q chains.said && echo && \
                 samples chains comm,ip"
            ),
        )
        .step("modules", &reads("modules", ""))
        .step(
            "programs",
            &format!(
                "{FUNCTIONS} guest programs '{WAIT} ./nest; echo done; sleep 9' --share .; \
                 record programs -e instructions:u -c {PERIOD} --call-graph no && \
                 perf script -i programs.data --show-mmap-events | grep MMAP2"
            ),
        )
        .run()
});

fn printed(name: &str) -> String {
    RESULTS.of(name).printed(name)
}

fn every_sample_has_its_instruction_and_its_callers() {
    let text = printed("chains");
    let (own, ours) = text.split_once("ready").expect("it has waited");
    // perf prints addresses of a program that it knows without where the program is.
    let address = |word: &str| u64::from_str_radix(word, 16).expect("an address") % BASE;
    let chain = |block: &str| block.split_whitespace().map(address).collect::<Vec<_>>();
    let (counted, own) = own.split_once("\n\n").expect("it counts first");
    let own: Vec<_> = own.split("\n\n").filter(|block| !block.trim().is_empty()).map(chain).collect();
    let ours: Vec<_> =
        ours.split("\n\n").filter_map(|block| block.trim().strip_prefix("nest")).map(chain).collect();
    let expected = SAMPLED.map(|at| at + CODE as u64).to_vec();
    let samples = usize::try_from(NEST_INSTRUCTIONS / PERIOD).expect("they are few");
    // Other programs have counted before, so all may be at the loop's other instruction.
    let other = [vec![expected[0] - 4], expected[1..].to_vec()].concat();
    assert_eq!(counted.split(',').next(), Some(NEST_INSTRUCTIONS.to_string().as_str()), "{counted}");
    assert_eq!(own, vec![expected.clone(); samples], "{text}");
    assert!([expected, other].iter().any(|chain| ours == vec![chain.clone(); samples]), "{text}");
}

fn callers_are_those_of_the_guests_own_perf() {
    let text = printed("modules");
    let [own, ours] = own_and_ours(&text);
    assert!(own.keys().any(|chain| chain.len() > 5), "{own:#?}");
    are_known(&own, &ours, 60);
    // On RISC-V an overflow's interrupt waits while the kernel lets none in, so the guest's own perf is not there.
    let entry = ["handle_exception"];
    assert!(ours.contains_key(&entry[..]) && !own.contains_key(&entry[..]), "{ours:#?}");
}

fn functions_of_modules_are_named_as_the_guests_own_perf_names_them() {
    are_the_same(&functions_of_fuse(&printed("modules")), 30);
}

fn functions_of_programs_on_a_share_have_their_file() {
    let text = printed("programs");
    assert!(text.lines().any(|line| line.ends_with("/nest")), "{text}");
}
