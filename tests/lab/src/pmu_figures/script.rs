//! The scripts that have the workload run, and look at it.

use std::fmt::Write;

use guest_images::Arch;

use super::{HOST, riscv64};

/// What both have: one event says where windows begin, and those who ask for exits get what there is from the first on.
const COMMON: &str = "
T=/sys/kernel/tracing
run() {
    exec ./tally run --append cryptomgr.notests --pmu $1 -- ./pmu-workload
}
trace() {
    echo 0 >$T/tracing_on
    for event in $MARK kvm/kvm_exit raw_syscalls/sys_enter; do
        echo $1 >$T/events/$event/enable
    done
}
exits() {
    echo >$T/trace
    trace 1
    (run $1) || exit
    trace 0
    cat $T/trace >$1.exits
}
print() {
    perf script -i data --ns -F time,event,period,trace >$1 2>errors || { cat errors >&2; exit 1; }
}
echo 16384 >$T/buffer_size_kb
echo traceon >$T/events/$MARK/trigger
";

/// Of a vCPU's thread.
const SAMPLE: &str = "
sample() {
    run $1 &
    until thread=$(grep -l vcpu0 /proc/$!/task/*/comm); do
        sleep 0.01
    done
    thread=${thread%/comm}
    perf record -q -o data -e \"$3\" -t ${thread##*/} && wait $! || exit
    print $1.$2
}
";

/// At the end, because how long output takes depends on who reads it. With dd, because cat splices, and what is spliced may
/// still be under way when the machine ends.
const PRINT: &str = "
for file in *.exits *.time *.instructions; do
    [ -e $file ] || continue
    echo begin $file
    dd if=$file bs=64k 2>errors || exit
    echo end
done
";

pub(super) fn script(arch: Arch, pmus: &[&str]) -> String {
    let mut script = match arch {
        Arch::X86_64 => format!("MARK=kvm/kvm_hypercall{COMMON}{SAMPLE}"),
        Arch::Riscv64 => format!("{}MARK=kprobes/mark{COMMON}", riscv64::PROBES),
    };
    for pmu in pmus {
        let step = match arch {
            Arch::X86_64 => format!(
                "exits {pmu}
                sample {pmu} time kvm:kvm_hypercall
                sample {pmu} instructions '{{kvm:kvm_hypercall,instructions:Hu,instructions:G}}:S'"
            ),
            Arch::Riscv64 if *pmu == HOST => format!(
                "perf record -q -o data -a -e kprobes:own_mark ./pmu-workload || exit
                print {pmu}.time"
            ),
            // A task's event would be one more for its switches.
            Arch::Riscv64 => format!(
                "exits {pmu}
                (perf record -q -o data -a -e kprobes:mark sh -c './tally run --pmu {pmu} -- ./pmu-workload') || exit
                print {pmu}.time"
            ),
        };
        writeln!(script, "{step}").expect("writing to a string cannot fail");
    }
    script + PRINT
}
