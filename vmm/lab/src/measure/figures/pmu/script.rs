//! The scripts that run the workload and count what the host does meanwhile.

use std::fmt::Write;

use super::{HOST, ON_INTEL, riscv64};
use crate::simulator::board::Processor;

/// The functions for both architectures. Tracing starts at the first mark, by a trigger of the mark's event.
/// `NAME,unconfined` is the PMU without Tally's sandbox. `$WORDS` are the workload's arguments. It waits until perf has
/// started, whose tables of events are long on an Intel host.
const COMMON: &str = "
T=/sys/kernel/tracing
run() {
    case $1 in *,unconfined) sandbox=off ;; *) sandbox=on ;; esac
    exec ./tally run --pmu ${1%,*} --sandbox $sandbox -- sh -c 'sleep 2; exec ./pmu-workload '$WORDS
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

/// Function that counts events of a vCPU's thread, with a sample at each mark.
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

/// Prints all results. This is done last, as the time that output takes depends on its reader. It is done with dd, as
/// cat splices, and spliced data may be lost when the machine ends.
const PRINT: &str = "
for file in *.exits *.time *.instructions; do
    [ -e $file ] || continue
    echo begin $file
    dd if=$file bs=64k 2>errors || exit
    echo end
done
";

/// Returns the script that measures these PMUs.
pub(super) fn script(processor: Processor, pmus: &[&str]) -> String {
    let mut script = match processor {
        Processor::Amd => format!("MARK=kvm/kvm_hypercall WORDS={COMMON}{SAMPLE}"),
        Processor::Intel => format!("MARK=kvm/kvm_hypercall WORDS={ON_INTEL}{COMMON}{SAMPLE}"),
        Processor::Riscv64 => format!("{}MARK=kprobes/mark WORDS={COMMON}", riscv64::PROBES),
    };
    for pmu in pmus {
        let step = match processor {
            Processor::Amd | Processor::Intel => format!(
                "exits {pmu}
                sample {pmu} time kvm:kvm_hypercall
                sample {pmu} instructions '{{kvm:kvm_hypercall,instructions:Hu,instructions:G}}:S'"
            ),
            Processor::Riscv64 if *pmu == HOST => format!(
                "perf record -q -o data -a -e kprobes:own_mark ./pmu-workload || exit
                print {pmu}.time"
            ),
            // The event is for all CPUs (`-a`). An event of the task would add to the cost of task switches.
            Processor::Riscv64 => format!(
                "exits {pmu}
                (perf record -q -o data -a -e kprobes:mark sh -c './tally run --pmu {pmu} -- ./pmu-workload') || exit
                print {pmu}.time"
            ),
        };
        writeln!(script, "{step}").expect("writing to a string cannot fail");
    }
    script + PRINT
}
