//! Kernels with sites and with bytes that look like sites, and what the changed kernels do.

mod kernel;
mod machine;
mod shared;

use proptest::prelude::*;

use self::kernel::{CSRS, KernelBuilder, OTHERS, mark_as_text};
use self::machine::Machine;
use super::distance::{BRANCH, JUMP, SHORT_BRANCH, SHORT_JUMP};
use super::encode::{SHORT_RET, addi, lui};
use super::*;

/// An order of [`OTHERS`].
const ORDER: [usize; 9] = [5, 0, 6, 2, 7, 1, 8, 3, 4];
const BASE: u64 = 0xffff_ffff_8020_0000;

fn refusal(kernel: &KernelBuilder) -> Refusal {
    let mut image = kernel.image.clone();
    let refusal = retarget(&mut image, 1).unwrap_err();
    assert_eq!(image, kernel.image, "a refused kernel stays as it is");
    refusal
}

/// Returns a kernel with an id and the switch, followed by what `rest` adds.
fn kernel_with(rest: impl FnOnce(&mut KernelBuilder)) -> KernelBuilder {
    let mut kernel = KernelBuilder::new(&ORDER);
    kernel.others(300).id(Register::A7, 0);
    kernel.others(300).switch(&CSRS, true);
    kernel.others(300);
    rest(&mut kernel);
    kernel.others(100).short(SHORT_RET);
    kernel
}

fn offsets(changed: &Retargeted) -> Vec<usize> {
    changed.changes.iter().map(|change| change.offset).collect()
}

#[test]
fn each_site_is_found_and_described() {
    let (kernel, sites) = KernelBuilder::whole(&ORDER);
    let mut image = kernel.image.clone();
    let changed = retarget(&mut image, 1).unwrap();
    assert!(changed.samples());
    assert_eq!(offsets(&changed), [sites.ids[0], sites.switch, sites.overflow, sites.ids[1]]);
    let log: Vec<String> = changed.changes.iter().map(ToString::to_string).collect();
    let [first, second] = sites.ids;
    assert_eq!(log[0], format!("{first:#x}: the SBI PMU extension's id in a7 is now 0x9504d55"));
    assert_eq!(log[1], format!("{0:#x}: 31 counters are read by the code at {0:#x}", sites.switch));
    let code = sites.switch + 32;
    assert_eq!(
        log[2],
        format!("{:#x}: the overflows are read into a3 by the code at {code:#x}", sites.overflow)
    );
    assert_eq!(log[3], format!("{second:#x}: the SBI PMU extension's id in a0 is now 0x9504d55"));
}

#[test]
fn a_retargeted_kernel_is_not_retargeted_again() {
    let (mut kernel, sites) = KernelBuilder::whole(&ORDER);
    retarget(&mut kernel.image, 1).unwrap();
    assert_eq!(refusal(&kernel), Refusal::Already { at: sites.ids[0] });
}

#[test]
fn every_counter_is_read_by_a_call_and_only_registers_that_a_call_clobbers_change() {
    for short in [true, false] {
        let mut kernel = KernelBuilder::new(&ORDER);
        kernel.others(300).id(Register::A7, 0);
        let switch = kernel.others(300).switch(&CSRS, short);
        kernel.others(100);
        retarget(&mut kernel.image, 1).unwrap();
        for (csr, at) in CSRS.into_iter().zip((switch..).step_by(if short { 6 } else { 8 })) {
            if !(0xc00..0xc20).contains(&csr) || csr == 0xc01 {
                continue;
            }
            let mut machine = Machine::new(&kernel.image, BASE);
            machine.answer = u64::MAX - u64::from(csr);
            let before = machine.registers;
            machine.run(at, None);
            assert_eq!(machine.calls, [[EXTENSION, READ_COUNTER, csr.into()]]);
            assert_eq!(machine.registers[10], machine.answer);
            let kept = |register: &usize| ![10, 11, 16, 17].contains(register);
            assert!((0..32).filter(kept).all(|register| machine.registers[register] == before[register]));
            assert!(machine.memory.is_empty());
        }
    }
}

#[test]
fn the_pair_that_reads_the_time_is_not_changed() {
    let (mut kernel, sites) = KernelBuilder::whole(&ORDER);
    let at = sites.switch + 63 * 6;
    let before = kernel.image[at..at + 6].to_vec();
    retarget(&mut kernel.image, 1).unwrap();
    assert_eq!(kernel.image[at..at + 6], before);
}

#[test]
fn overflows_are_read_into_any_register_and_all_others_are_kept() {
    for register in (0..32).filter(|register| *register != Register::SP.number()) {
        for base in [0, 0x8020_0000, BASE, 0xffff_ffff_ffff_0000] {
            let mut site = 0;
            let mut kernel = kernel_with(|kernel| site = kernel.read_overflows(register));
            retarget(&mut kernel.image, 1).unwrap();
            let mut machine = Machine::new(&kernel.image, base);
            machine.answer = 0x8000_0000_0000_0008;
            let mut expected = machine.registers;
            machine.run(site, Some(site + 4));
            if register != 0 {
                expected[register as usize] = machine.answer;
            }
            assert_eq!(machine.registers, expected, "into x{register}");
            assert_eq!(machine.calls.len(), 1);
            assert_eq!(machine.calls[0][..2], [EXTENSION, READ_OVERFLOWS]);
            assert!(
                machine.memory.keys().all(|address| *address < expected[2]),
                "what is on the stack is kept"
            );
        }
    }
}

#[test]
fn a_read_of_overflows_into_the_stack_pointer_is_refused() {
    let mut at = 0;
    let kernel = kernel_with(|kernel| at = kernel.read_overflows(2));
    assert_eq!(refusal(&kernel), Refusal::Register { at, register: Register::SP });
}

#[test]
fn a_kernel_that_does_not_read_overflows_counts_but_does_not_sample() {
    let mut kernel = kernel_with(|_| {});
    let changed = retarget(&mut kernel.image, 1).unwrap();
    assert_eq!(changed.changes.len(), 2);
    assert!(!changed.samples());
}

#[test]
fn an_image_of_nothing_but_sites_is_refused_before_each_is_looked_at() {
    let kernel = kernel_with(|kernel| {
        for _ in 0..MAX_SITES {
            kernel.id(Register::A7, 0);
        }
    });
    assert_eq!(refusal(&kernel), Refusal::TooMany { limit: MAX_SITES });
    let kernel = kernel_with(|kernel| {
        for _ in 0..=MAX_SITES {
            kernel.read_overflows(13);
        }
    });
    // The room for the new code ends earlier.
    assert!(matches!(refusal(&kernel), Refusal::NoRoom { .. }));
}

#[test]
fn a_refusal_names_what_is_missing() {
    let mut kernel = KernelBuilder::new(&ORDER);
    kernel.image.fill(0);
    assert_eq!(refusal(&kernel), Refusal::NoImage);
    let mut kernel = KernelBuilder::new(&ORDER);
    assert_eq!(refusal(&kernel), Refusal::NoDriver);
    kernel.others(300).switch(&CSRS, true);
    kernel.others(100);
    assert_eq!(refusal(&kernel), Refusal::NoDriver);

    let mut kernel = KernelBuilder::new(&ORDER);
    kernel.others(300).id(Register::A7, 0);
    // A function that reads the time is no switch.
    kernel.others(100).switch(&[0xc01], true);
    kernel.others(100);
    assert_eq!(refusal(&kernel), Refusal::NoSwitch);
    let at = kernel.switch(&CSRS[..40], true);
    kernel.others(100);
    assert_eq!(refusal(&kernel), Refusal::SwitchNotWhole { at, csr: 0xc00 });
}

#[test]
fn a_kernel_with_two_switches_is_refused() {
    let mut second = 0;
    let kernel = kernel_with(|kernel| {
        second = kernel.switch(&[0xc02], true);
    });
    assert!(matches!(refusal(&kernel), Refusal::SecondSwitch { second: found, .. } if found == second));
}

#[test]
fn without_enough_pairs_of_upper_halves_there_is_no_room() {
    let mut kernel = KernelBuilder::new(&ORDER);
    kernel.others(300).id(Register::A7, 0);
    let at = kernel.others(300).switch(&CSRS[32..], true);
    kernel.others(100);
    assert_eq!(refusal(&kernel), Refusal::NoRoom { at });
    // There is room for the counters and for two reads of overflows.
    let three = kernel_with(|kernel| {
        for register in 10..13 {
            kernel.read_overflows(register);
        }
    });
    assert!(matches!(refusal(&three), Refusal::NoRoom { .. }));
}

#[test]
fn a_read_of_overflows_too_far_from_the_switch_is_refused() {
    let mut at = 0;
    let kernel = kernel_with(|kernel| at = kernel.others(1 << 20).read_overflows(10));
    assert!(matches!(refusal(&kernel), Refusal::TooFar { at: found, .. } if found == at));
}

#[test]
fn the_second_half_of_an_instruction_is_left_alone() {
    let mut places = Vec::new();
    let mut kernel = kernel_with(|kernel| {
        // ADDI a0, a4, 0x58b and a compressed instruction. LUI a7, 0x505 seems to be in their middle. ADDI a7, a7, -683
        // is real.
        places.push(kernel.here() + 2);
        kernel.word(0x58b7_0513).short(0x0050).word(addi(Register::A7, Register::A7, -683)).others(200);
        // The same for CSRR a3, scountovf.
        places.push(kernel.here() + 2);
        kernel.word(0x26f3_0513).short(0xda00);
    });
    let text = Text::of(&kernel.image).unwrap();
    assert_eq!(text.word(places[0]), Some(lui(Register::A7, 0x505)));
    assert_eq!(text.word(places[1]), Some(0xda00_26f3));
    let before = kernel.image.clone();
    let changed = retarget(&mut kernel.image, 1).unwrap();
    assert_eq!(changed.changes.len(), 2);
    assert_eq!(kernel.image[places[0] - 2..], before[places[0] - 2..]);
}

#[test]
fn bytes_of_a_site_in_data_are_refused_unless_the_header_says_that_they_are_data() {
    let mut places = [0; 2];
    let add_id = |kernel: &mut KernelBuilder| {
        kernel.bytes(&[0; 300]);
        places[0] = kernel.id(Register::A7, 0);
        kernel.bytes(&[0; 300]);
    };
    let with_id = kernel_with(add_id);
    let add_read = |kernel: &mut KernelBuilder| {
        kernel.bytes(&[0; 300]);
        places[1] = kernel.read_overflows(13);
        kernel.bytes(&[0; 300]);
    };
    let with_read = kernel_with(add_read);
    for (mut kernel, place) in [with_id, with_read].into_iter().zip(places) {
        assert!(matches!(refusal(&kernel), Refusal::Undecided { at, .. } if at == place));
        mark_as_text(&mut kernel.image, 128, place - 100);
        assert_eq!(retarget(&mut kernel.image, 1).unwrap().changes.len(), 2);
    }
}

#[test]
fn a_lui_of_another_constant_is_left_alone() {
    let mut kernel = kernel_with(|kernel| {
        kernel.word(lui(Register::A7, 0x505)).word(addi(Register::A7, Register::A7, 5)).others(100);
        // The value of this LUI is overwritten before an ADDI.
        kernel.word(lui(Register::A6, 0x505)).word(lui(Register::A6, 0x123)).others(8);
    });
    assert_eq!(retarget(&mut kernel.image, 1).unwrap().changes.len(), 2);
}

#[test]
fn a_lui_whose_value_is_used_twice_or_elsewhere_is_refused() {
    let load = lui(Register::A6, 0x505);
    let second = addi(Register::A6, Register::A6, -683);
    let elsewhere = addi(Register::A7, Register::A6, -683);
    // SD a6, 0(a0); BEQZ a0, +8.
    for words in [&[load, elsewhere][..], &[load, 0x0105_3023, second], &[load, 0x0005_0463, second]] {
        let mut at = 0;
        let kernel = kernel_with(|kernel| {
            at = kernel.here();
            for word in words {
                kernel.word(*word);
            }
        });
        assert_eq!(refusal(&kernel), Refusal::Shared { at });
    }
}

#[test]
fn a_branch_between_the_halves_of_an_id_or_into_a_pair_is_refused() {
    let (kernel, sites) = KernelBuilder::whole(&ORDER);
    let into_id = sites.ids[1] + 4;
    let into_pair = sites.switch + 4;
    for (at, target) in [(sites.ids[1], into_id), (sites.switch, into_pair)] {
        let mut kernel = kernel.clone();
        let from = kernel.here();
        let back = i64::try_from(target).unwrap() - i64::try_from(from).unwrap();
        kernel.word(0x0005_0063 | BRANCH.scatter(back).unwrap());
        assert_eq!(refusal(&kernel), Refusal::Entered { at, target });
    }
}

#[test]
fn offsets_are_encoded_as_an_assembler_does() {
    // BEQZ a0, -2; JAL ra, 0x7fe; C.BEQZ a0, 16; C.J -344.
    assert_eq!(BRANCH.gather(0xfe05_0fe3), -2);
    assert_eq!(JUMP.gather(0x7fe0_00ef), 0x7fe);
    assert_eq!(SHORT_BRANCH.gather(0xc901), 16);
    assert_eq!(SHORT_JUMP.gather(0xb565), -344);
}

proptest! {
    #[test]
    fn an_encoded_offset_is_decoded_again_or_out_of_range(distance in -0x20_0000..0x20_0000_i64) {
        let even = distance & 1 == 0;
        for (format, reach) in [(&BRANCH, 1 << 12), (&JUMP, 1 << 20), (&SHORT_BRANCH, 1 << 8), (&SHORT_JUMP, 1 << 11)] {
            let scattered = format.scatter(distance);
            prop_assert_eq!(scattered.is_some(), even && (-reach..reach).contains(&distance));
            if let Some(bits) = scattered {
                prop_assert_eq!(i64::from(format.gather(bits)), distance);
            }
        }
    }

    #[test]
    fn sites_are_found_among_any_instructions(others in prop::collection::vec(0..OTHERS.len(), 1..50)) {
        let (kernel, sites) = KernelBuilder::whole(&others);
        let mut image = kernel.image.clone();
        let changed = retarget(&mut image, 1).unwrap();
        prop_assert_eq!(offsets(&changed), [sites.ids[0], sites.switch, sites.overflow, sites.ids[1]]);
        // Nothing else is touched.
        let mut expected = kernel.image;
        for (at, register) in sites.ids.into_iter().zip([Register::A7, Register::A0]) {
            expected[at..at + 4].copy_from_slice(&lui(register, 0x9505).to_le_bytes());
        }
        for range in [sites.switch..sites.switch + 64 * 6, sites.overflow..sites.overflow + 4] {
            expected[range.clone()].copy_from_slice(&image[range]);
        }
        prop_assert_eq!(image, expected);
    }

    #[test]
    fn whatever_a_kernel_consists_of_it_is_retargeted_as_a_whole_or_not_at_all(
        pieces in prop::collection::vec((0..8_usize, any::<u32>()), 0..60),
        header in prop::collection::vec(any::<u8>(), 0..80),
        marked in any::<bool>(),
    ) {
        let mut kernel = KernelBuilder::new(&ORDER);
        if marked {
            kernel.image[0x3c] = 64;
            kernel.bytes(b"PE\0\0").bytes(&header);
        }
        for (piece, value) in pieces {
            match piece {
                0 => kernel.word(value),
                1 => kernel.others(200),
                2 => kernel.word(lui(Register::field(value, 0), 0x505)),
                3 => kernel.word(addi(Register::field(value, 0), Register::field(value, 5), -683)),
                4 => kernel.short((value & 0xffff) as u16),
                5 => { kernel.id(Register::field(value, 0), 0); &mut kernel }
                6 => { kernel.switch(&CSRS, value & 1 == 0); &mut kernel }
                _ => { kernel.read_overflows(value & 0x1f); &mut kernel }
            };
        }
        let mut image = kernel.image.clone();
        match retarget(&mut image, 1) {
            Err(_) => prop_assert_eq!(image, kernel.image),
            Ok(changed) => {
                prop_assert!(changed.changes.len() >= 2);
                prop_assert!(retarget(&mut image, 1).is_err());
            }
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..600), magic in any::<bool>()) {
        let mut kernel = KernelBuilder::new(&ORDER);
        kernel.bytes(&bytes);
        if !magic {
            kernel.image.drain(..64);
        }
        refusal(&kernel);
    }
}
