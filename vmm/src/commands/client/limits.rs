//! Limits of what a VM may answer. Root's commands ask the VMs of all users, and a process that another user calls a VM
//! answers what that user likes. No real VM exceeds these limits, but for names, which are cut off.

use std::collections::{BTreeMap, BTreeSet};

use tally_machine::kvm::MAX_CPUS;
use tally_machine::{Function, MAX_MODULE_NAME, MAX_MODULES, Module, VcpuReport, is_of_name};

use crate::protocol::message::Answer;
use crate::protocol::printable::{short, shorter};
use crate::protocol::recording::{Functions, MAX_ADDRESSES, MAX_PART, Samples, SymbolsPart};
use crate::protocol::status::{Hardware, VcpuStatus, VmStatus};

const MAX_VCPUS: usize = MAX_CPUS as usize;
/// Maximum number of counters of a vCPU, and of a host CPU.
const MAX_COUNTERS: usize = 64;
/// Maximum number of the counts that KVM keeps of a vCPU.
const MAX_KVM_COUNTS: usize = 512;
/// Maximum length of the name of an event, a function or a count of KVM's, in characters.
const MAX_NAME: usize = 200;

/// Maximum number of files that come with a sample, and length of the path of one.
const MAX_MAPPINGS: usize = 64;
const MAX_PATH: usize = 4095;
/// Maximum number of callers in a sample (`kernel.perf_event_max_stack`).
const MAX_CALLERS: usize = 127;
/// Maximum length of a thread's name (`TASK_COMM_LEN` without the zero).
const MAX_THREAD_NAME: usize = 15;

/// An answer exceeds a limit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}, which no VM has")]
pub struct Exceeded(&'static str);

impl Answer {
    /// Checks an answer, and cuts off its names.
    pub fn limited(self) -> Result<Self, Exceeded> {
        Ok(match self {
            Self::Hello(about) => Self::Hello(about.printable()),
            Self::Status(status) => Self::Status(Box::new(limited_status(*status)?)),
            Self::Report(mut report) => {
                limit_reports(report.vcpus.iter_mut())?;
                Self::Report(report)
            }
            Self::Samples(samples) => Self::Samples(limited_samples(samples)),
            Self::Symbols(SymbolsPart { text, modules, more }) => {
                at_most(MAX_PART, text.len(), "longer parts of symbols")?;
                at_most(MAX_MODULES, modules.len(), "more modules")?;
                let modules = modules.into_iter().map(limited_module).collect();
                Self::Symbols(SymbolsPart { text: text.lines().map(line).collect(), modules, more })
            }
            Self::Functions(Functions { found }) => {
                at_most(MAX_ADDRESSES, found.len(), "more functions than addresses")?;
                let limited =
                    |function: Function| Function { name: shorter(&function.name, MAX_NAME), ..function };
                Self::Functions(Functions { found: found.into_iter().map(limited).collect() })
            }
            other @ (Self::Policy(_)
            | Self::Snapshot(_)
            | Self::Recording(_)
            | Self::Recorded(_)
            | Self::Done
            | Self::Error(_)) => other,
        })
    }
}

/// Replaces what no name of a thread or a file has, so that none can draw on a terminal.
fn limited_samples(mut samples: Samples) -> Samples {
    for sample in &mut samples.taken {
        if let Some(task) = &mut sample.task {
            task.name = shorter(&task.name, MAX_THREAD_NAME);
        }
        sample.mappings.truncate(MAX_MAPPINGS);
        sample.kernel.truncate(MAX_CALLERS);
        sample.user.truncate(MAX_CALLERS);
        for mapping in &mut sample.mappings {
            mapping.path = shorter(&mapping.path, MAX_PATH);
        }
    }
    samples
}

/// Returns a line of symbols without control characters, but for the tabulator in front of a module's name.
fn line(line: &str) -> String {
    let (symbol, module) = line.split_once('\t').unwrap_or((line, ""));
    let tabulator = if module.is_empty() { "" } else { "\t" };
    format!("{}{tabulator}{}\n", short(symbol), short(module))
}

/// Replaces what no name of a module has: perf takes it for a part of a path.
fn limited_module(mut module: Module) -> Module {
    let name = module.name.chars().take(MAX_MODULE_NAME);
    module.name = name.map(|c| if is_of_name(c) { c } else { '?' }).collect();
    module
}

fn limited_status(mut status: VmStatus) -> Result<VmStatus, Exceeded> {
    status.about = status.about.printable();
    at_most(MAX_VCPUS, status.paused_by.len(), "more paused vCPUs than it has")?;
    limit_reports(status.vcpus.iter_mut().map(|vcpu| &mut vcpu.report))?;
    for VcpuStatus { kvm, interval, hardware, .. } in &mut status.vcpus {
        for counts in [kvm, &mut interval.kvm].into_iter().flatten() {
            limit_counts(counts)?;
        }
        if let Some(Hardware { held, holders, .. }) = hardware {
            at_most(MAX_COUNTERS, held.len(), "more counters of the host than it has")?;
            // Whoever asks finds them.
            holders.clear();
        }
    }
    Ok(status)
}

/// Checks the reports of a VM's vCPUs.
fn limit_reports<'a>(reports: impl Iterator<Item = &'a mut VcpuReport>) -> Result<(), Exceeded> {
    let mut vcpus = BTreeSet::new();
    for VcpuReport { vcpu, counters, .. } in reports {
        if !vcpus.insert(*vcpu) {
            return Err(Exceeded("two vCPUs of one number"));
        }
        at_most(MAX_VCPUS, vcpus.len(), "too many vCPUs")?;
        at_most(MAX_COUNTERS, counters.len(), "too many counters")?;
        let numbers: BTreeSet<usize> = counters.iter().map(|counter| counter.counter).collect();
        if numbers.len() < counters.len() {
            return Err(Exceeded("two counters of one number"));
        }
        for counter in counters {
            for text in [&mut counter.event, &mut counter.refusal].into_iter().flatten() {
                *text = shorter(text, MAX_NAME);
            }
        }
    }
    Ok(())
}

fn limit_counts(counts: &mut BTreeMap<String, u64>) -> Result<(), Exceeded> {
    at_most(MAX_KVM_COUNTS, counts.len(), "too many counts of KVM's")?;
    *counts =
        std::mem::take(counts).into_iter().map(|(name, count)| (shorter(&name, MAX_NAME), count)).collect();
    Ok(())
}

fn at_most(limit: usize, count: usize, what: &'static str) -> Result<(), Exceeded> {
    if count > limit { Err(Exceeded(what)) } else { Ok(()) }
}

impl crate::protocol::status::Summary {
    /// Replaces control characters and cuts off what is long, so that the names can be printed on a terminal.
    pub fn printable(mut self) -> Self {
        for text in [&mut self.name, &mut self.runs, &mut self.pmu] {
            *text = short(text);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::status::Report;

    /// Returns a VM's report with so many vCPUs of so many counters each.
    fn report(vcpus: usize, counters: usize) -> Answer {
        let counter = |number: usize| {
            format!(
                "{{\"counter\":{number},\"event\":\"{}\",\"value\":0,\"state\":\"unused\",\"refusal\":null,\
                 \"hardware\":null,\"overflows\":0,\"enabled\":null,\"running\":null,\"starvations\":0,\
                 \"starved\":0.0,\"estimated\":0}}",
                "\u{10ffff}".repeat(MAX_NAME + 1),
            )
        };
        let counters = (0..counters).map(counter).collect::<Vec<_>>().join(",");
        let vcpu = |number: usize| {
            format!(
                "{{\"vcpu\":{},\"thread\":1,\"counters\":[{counters}],\"statistics\":null,\"exits\":{}}}",
                number % 256,
                serde_json::to_string(&tally_machine::Exits::default()).unwrap(),
            )
        };
        let vcpus = (0..vcpus).map(vcpu).collect::<Vec<_>>().join(",");
        serde_json::from_str(&format!("{{\"report\":{{\"stands_still\":false,\"vcpus\":[{vcpus}]}}}}"))
            .unwrap()
    }

    fn said(answer: Answer) -> String {
        answer.limited().unwrap_err().to_string()
    }

    #[test]
    fn a_report_has_no_more_vcpus_and_counters_than_a_vm_has() {
        assert!(report(MAX_VCPUS, 2).limited().is_ok() && report(1, MAX_COUNTERS).limited().is_ok());
        assert_eq!(said(report(MAX_VCPUS + 1, 0)), "too many vCPUs, which no VM has");
        assert_eq!(said(report(1, MAX_COUNTERS + 1)), "too many counters, which no VM has");
        assert_eq!(said(report(1, 11_000)), "too many counters, which no VM has");
        let twice = |answer: Answer| {
            let Answer::Report(mut report) = answer else { unreachable!("it is one") };
            report.vcpus = [report.vcpus.clone(), report.vcpus].concat();
            Answer::Report(report)
        };
        assert_eq!(said(twice(report(1, 0))), "two vCPUs of one number, which no VM has");
    }

    #[test]
    fn the_names_in_a_report_have_an_end() {
        let Ok(Answer::Report(Report { vcpus, .. })) = report(1, 1).limited() else {
            panic!("it is in order")
        };
        assert_eq!(vcpus[0].counters[0].event.as_ref().unwrap().chars().count(), MAX_NAME);
    }
}
