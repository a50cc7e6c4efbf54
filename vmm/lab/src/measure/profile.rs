//! Where the instructions go that an overflow costs: all that host and guest execute while a guest of Tally samples,
//! counted by function.

mod host;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;

use guest_images::{Arch, Progress};

use crate::error::{Error, Result};
use crate::measure::bench::{Programs, Row, Workload};
use crate::scenario::symbols::{Function, Symbols};
use crate::scenario::trace::{Flags, Side, Trace};
use crate::scenario::{Scenario, Streams};
use crate::simulator::board::Processor;

/// Number of instructions that are traced.
const TRACED: u64 = 20_000_000;
/// Number of overflows after which the trace begins: rates have found their periods by then.
const OVERFLOWS_BEFORE: u32 = 300;
/// Functions with fewer instructions for an overflow are not in the table.
const LEAST: u64 = 60;
/// Number of things whose times are counted by the calls of a function.
const COUNTED: usize = 3;

/// A host that can be profiled.
struct ProfiledHost {
    processor: Processor,
    /// Where a guest's kernel begins to handle an overflow.
    handler: &'static str,
    /// What is counted by the calls of a function of the host's kernel.
    counted: [(&'static str, &'static str); COUNTED],
    /// How QEMU's flags tell who executes a block.
    flags: fn(&Symbols) -> Option<Flags>,
    /// Returns the scenario that runs a row's workload, and begins the trace while it is sampled.
    scenario: fn(Row, &Programs, &mut Progress) -> Result<Scenario>,
}

/// Parts of a kernel, each with what the names of its functions begin with. The first that fits counts. The last but
/// one also has all functions of KVM's modules.
const PARTS: [(&str, &str); 6] = [
    (
        "interrupts",
        "asm_ exc_nmi default_do_nmi nmi_ ct_nmi irq __irq error_ paranoid_ native_apic __sysvec sysvec do_irq \
         handle_riscv_irq riscv_intc handle_exception ret_from_exception generic_handle handle_percpu",
    ),
    (
        "perf",
        "perf _perf __perf arch_perf riscv_pmu pmu_sbi rvpmu x86_pmu x86_perf amd_pmu __amd_pmu amd_ event_ ctx_ visit_ merge_ \
         native_read_pmc find_get_context rb_ ring_buffer calc_timer cyc2ns native_sched_clock sched_clock local_clock \
         kvm_sched_clock pvclock __output_copy __task_pid_nr",
    ),
    (
        "signals",
        "send_sig __send_sig kill_ do_send prepare_signal complete_signal signal_ dequeue_ next_signal recalc_sig \
         do_sigtimedwait __x64_sys_rt_sig collect_signal __sigqueue copy_siginfo get_signal sigprocmask __set_task \
         retarget_shared inc_rlimit do_dec_rlimit __wake_up fasync",
    ),
    (
        "system calls",
        "entry_SYSCALL do_trap_ecall __riscv_sys do_syscall syscall_ x64_sys_call __x64_sys __fdget __fget exit_to_user fput security_ tomoyo \
         __secure_computing __seccomp seccomp populate_seccomp bpf_ ___bpf migrate_ _copy_ copy_ do_vfs_ioctl",
    ),
    (
        "KVM",
        "kvm_riscv __kvm_riscv fpu __fstate switch_fpu save_fpregs restore_fpregs xfd_ native_load_tr load_fixmap load_direct get_cpu_entry \
         x86_virt_spec __srcu preempt_notifier rcu_note_context __local_bh xfer_to_guest",
    ),
    ("the rest", ""),
];
const KVM: usize = PARTS.len() - 2;
const REST: usize = PARTS.len() - 1;

/// Profiles rows of the benchmark that have one workload, on the host with an architecture. Returns a table of the
/// kernels' parts with a column for each row, and a table of functions for each row if that is wanted.
pub fn measure(
    rows: &[Row],
    with_functions: bool,
    arch: Arch,
    programs: &Programs,
    progress: &mut Progress,
) -> Result<String> {
    if let Some(row) = rows.iter().find(|row| !row.measure.samples()) {
        return Err(Error::NoSamples(row.measure.to_string()));
    }
    if arch == Arch::Riscv64 && rows.iter().any(|row| row.workload != Workload::Loop) {
        return Err(Error::NotProfiled("on the RISC-V host the workload is `loop`".to_owned()));
    }
    let host = host::of(arch);
    let symbols = host.symbols(progress)?;
    let tally = fs::read(&programs.tally).map_err(Error::file("read", &programs.tally))?;
    let of_tally = Symbols::of_program(&tally);
    let mut profiles = Vec::new();
    for &row in rows {
        progress.step(format!("profiling {} {}", row.workload, row.measure));
        let (trace, begin) = trace(host, &symbols, &(host.scenario)(row, programs, progress)?, progress)?;
        let tally = Placed { symbols: &of_tally, begin: begin.filter(|_| arch == Arch::X86_64) };
        profiles.push((row, Profile::new(host, &trace, &symbols, tally)?));
    }
    let mut text = table_of_parts(&profiles);
    for (row, profile) in profiles.iter().filter(|_| with_functions) {
        text = format!("{text}\n{} {}:\n\n{}", row.workload, row.measure, profile.table_of_functions());
    }
    Ok(text)
}

/// Traces a host and a guest of Tally while a workload is sampled. Returns where Tally is in memory, too.
fn trace(
    host: &ProfiledHost,
    symbols: &Symbols,
    scenario: &Scenario,
    progress: &mut Progress,
) -> Result<(Trace, Option<u64>)> {
    let flags =
        (host.flags)(symbols).ok_or_else(|| Error::NotProfiled("its kernel has no KVM".to_owned()))?;
    let (mut trace, mut stdout, mut stderr) = (Trace::new(TRACED, flags), Vec::new(), Vec::new());
    let streams =
        Streams { input: None, stdout: &mut stdout, stderr: &mut stderr, out: None, trace: Some(&mut trace) };
    let status = scenario.run_on(streams, progress)?;
    if status == 0 && trace.is_complete() {
        let begin = String::from_utf8_lossy(&stdout).lines().find_map(|line| {
            let begin = line.strip_prefix(host::PLACE)?.split('-').next()?;
            u64::from_str_radix(begin, 16).ok()
        });
        Ok((trace, begin))
    } else {
        let said = String::from_utf8_lossy(&stderr);
        Err(Error::NotProfiled(said.trim().to_owned()))
    }
}

/// Tally's functions, if the program has their names, and where it is in memory.
#[derive(Clone, Copy)]
struct Placed<'a> {
    symbols: &'a Symbols,
    begin: Option<u64>,
}

impl<'a> Placed<'a> {
    /// Returns the function at an address, and whether that is its first.
    fn function(self, address: u64) -> Option<(&'a Function, bool)> {
        let address = address.checked_sub(self.begin?)?;
        let function = self.symbols.function(address)?;
        Some((function, function.start == address))
    }
}

/// What overflows cost.
struct Profile<'a> {
    host: &'static ProfiledHost,
    /// Number of interrupts for overflows that the guest handled.
    interrupts: u64,
    counted: [u64; COUNTED],
    /// Instructions by part; programs have one part.
    parts: BTreeMap<(Side, usize), u64>,
    functions: BTreeMap<(Side, &'a Function), Cost>,
}

#[derive(Default)]
struct Cost {
    instructions: u64,
    /// Number of times that the function's first instruction was executed.
    calls: u64,
}

impl<'a> Profile<'a> {
    fn new(
        host: &'static ProfiledHost,
        trace: &Trace,
        symbols: &'a Symbols,
        tally: Placed<'a>,
    ) -> Result<Self> {
        let calls = |side, name| {
            let address = symbols.address(name);
            address
                .map(|address| trace.times(side, address))
                .ok_or_else(|| Error::NotProfiled(format!("there is no function {name}")))
        };
        let interrupts = calls(Side::Guest, host.handler)?;
        if interrupts == 0 {
            return Err(Error::NotProfiled("no overflow interrupts it".to_owned()));
        }
        let mut profile = Self {
            host,
            interrupts,
            counted: [0; COUNTED],
            parts: BTreeMap::new(),
            functions: BTreeMap::new(),
        };
        for (number, (_, name)) in profile.counted.iter_mut().zip(host.counted) {
            *number = calls(Side::Host, name)?;
        }
        for (side, address, times) in trace.all() {
            let function = match side {
                Side::Host | Side::Guest => {
                    symbols.function(address).map(|function| (function, function.start == address))
                }
                Side::HostProgram => tally.function(address),
                Side::GuestProgram | Side::Firmware => None,
            };
            let part = match (side, function) {
                (Side::Host | Side::Guest, Some((function, _))) => part(side, function),
                _ => 0,
            };
            *profile.parts.entry((side, part)).or_default() += times;
            if let Some((function, is_called)) = function {
                let cost = profile.functions.entry((side, function)).or_default();
                cost.instructions += times;
                cost.calls += if is_called { times } else { 0 };
            }
        }
        Ok(profile)
    }

    fn each(&self, number: u64) -> f64 {
        let [number, interrupts] =
            [number, self.interrupts].map(|number| u32::try_from(number).unwrap_or(u32::MAX));
        f64::from(number) / f64::from(interrupts)
    }

    fn table_of_functions(&self) -> String {
        let mut functions: Vec<_> = self.functions.iter().collect();
        functions.retain(|(_, cost)| cost.instructions >= LEAST * self.interrupts);
        functions.sort_by_key(|(_, cost)| Reverse(cost.instructions));
        let line = |((side, function), cost): (&(Side, &Function), &Cost)| {
            let whose = match side {
                Side::Host => "the host",
                Side::HostProgram => "Tally",
                _ => "the guest",
            };
            let [instructions, calls] = [cost.instructions, cost.calls].map(|number| self.each(number));
            format!("| `{}` | {whose} | {instructions:.0} | {calls:.1} |\n", function.name)
        };
        let lines: Vec<String> = functions.into_iter().map(line).collect();
        format!("| function | of | instructions | calls |\n|---|---|---:|---:|\n{}", lines.concat())
    }
}

fn table_of_parts(profiles: &[(Row, Profile)]) -> String {
    let line = |name: &str, cell: &dyn Fn(&Profile) -> String| {
        let cells: Vec<String> = profiles.iter().map(|(_, profile)| cell(profile)).collect();
        format!("| {name} | {} |", cells.join(" | "))
    };
    let instructions =
        |profile: &Profile, part| profile.each(profile.parts.get(&part).copied().unwrap_or_default());
    let measures: Vec<String> = profiles.iter().map(|(row, _)| format!("`{}`", row.measure)).collect();
    let workload = profiles.first().map_or(String::new(), |(row, _)| row.workload.to_string());
    let mut lines = vec![
        format!("| {workload}: for each interrupt | {} |", measures.join(" | ")),
        format!("|---|{}", "---:|".repeat(measures.len())),
    ];
    for side in [Side::Firmware, Side::Host, Side::HostProgram, Side::Guest] {
        for (number, (part, _)) in PARTS.iter().enumerate() {
            let name = match side {
                Side::Host => format!("the host's kernel: {part}"),
                Side::Guest => format!("the guest's kernel: {part}"),
                Side::HostProgram | Side::GuestProgram => "Tally".to_owned(),
                Side::Firmware => "the firmware".to_owned(),
            };
            let of_part = |profile: &Profile| instructions(profile, (side, number));
            if profiles.iter().any(|(_, profile)| of_part(profile) >= 0.5) {
                lines.push(line(&name, &|profile| format!("{:.0}", of_part(profile))));
            }
        }
    }
    lines.push(line("together", &|profile| {
        let all = profile.parts.iter().filter(|((side, _), _)| *side != Side::GuestProgram);
        format!("{:.0}", profile.each(all.map(|(_, instructions)| instructions).sum()))
    }));
    let counted = profiles.first().map(|(_, profile)| profile.host.counted);
    for (number, (name, _)) in counted.into_iter().flatten().enumerate() {
        lines.push(line(name, &|profile| format!("{:.1}", profile.each(profile.counted[number]))));
    }
    lines.push(line("interrupts in the profile", &|profile| profile.interrupts.to_string()));
    lines.join("\n") + "\n"
}

/// Returns the number of the part that a function belongs to. Only the host has KVM.
fn part(side: Side, function: &Function) -> usize {
    if function.module.as_deref().is_some_and(|module| module.starts_with("kvm")) {
        return KVM;
    }
    let is_of = |(_, starts): &(&str, &str)| starts.split(' ').any(|start| function.name.starts_with(start));
    let part = PARTS.iter().position(is_of).expect("all names begin with nothing");
    if (side, part) == (Side::Guest, KVM) { REST } else { part }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::bench::Length;

    const SYMBOLS: &str = "\
        1000 T asm_exc_nmi\n2000 T entry_SYSCALL_64\n3000 T perf_event_overflow\n4000 T memcpy\n\
        5000 t __svm_vcpu_run [kvm_amd]\n6000 t kvm_arch_vcpu_ioctl_run [kvm]\n";

    fn profiled(executed: &[(&str, u32, u64)]) -> String {
        let mut trace = Trace::new(executed.iter().map(|(.., times)| times).sum(), Flags::Amd);
        for (address, flags, times) in executed {
            for _ in 0..*times {
                trace.add(format!("Trace 0: 0x0 [0/{address}/{flags:x}/0] \n").as_bytes());
            }
        }
        let symbols = Symbols::parse(SYMBOLS);
        let of_tally = Symbols::parse("200 t after_exit\n");
        let tally = Placed { symbols: &of_tally, begin: Some(0x40_0000) };
        let row = Row::new(Workload::Loop, "rate:4000:1".parse().expect("a measure"), Length::Usual);
        let profile =
            Profile::new(host::of(Arch::X86_64), &trace, &symbols, tally).expect("the guest is interrupted");
        let functions = profile.table_of_functions();
        table_of_parts(&[(row, profile)]) + &functions
    }

    #[test]
    fn each_side_and_part_has_its_instructions_for_each_interrupt() {
        const GUEST: u32 = 1 << 21;
        const USER: u32 = 3;
        let text = profiled(&[
            ("1000", GUEST, 2),
            ("3004", GUEST, 10),
            ("400000", GUEST | USER, 1000),
            ("3000", 0, 4),
            ("3008", 0, 16),
            ("5000", 0, 6),
            ("5004", 0, 8),
            ("6000", 0, 2),
            ("400000", USER, 40),
            ("400200", USER, 2),
            ("400204", USER, 138),
        ]);
        for line in [
            "| the host's kernel: perf | 10 |",
            "| the host's kernel: KVM | 8 |",
            "| Tally | 90 |",
            "| the guest's kernel: interrupts | 1 |",
            "| the guest's kernel: perf | 5 |",
            "| together | 114 |",
            "| entries into the guest | 3.0 |",
            "| exits to user space | 1.0 |",
            "| system calls | 0.0 |",
            "| interrupts in the profile | 2 |",
            "| `after_exit` | Tally | 70 | 1.0 |",
        ] {
            assert!(text.lines().any(|this| this == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("the rest"), "nothing of it was executed");
        assert!(!text.contains("`perf_event_overflow`"), "it has few instructions");
    }

    #[test]
    fn only_measures_that_take_samples_can_be_profiled() {
        let row = Row::new(Workload::Loop, "stat:1".parse().expect("a measure"), Length::Usual);
        let programs = Programs { tally: "tally".into(), workload: "workload".into() };
        let refused = measure(&[row], false, Arch::X86_64, &programs, &mut Progress::stderr("test"));
        let text = refused.err().map(|error| error.to_string());
        assert_eq!(text.as_deref(), Some("stat:1 takes no samples that could be profiled"));
    }
}
