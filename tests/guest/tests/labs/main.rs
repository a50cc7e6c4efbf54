//! All tests on simulated hosts. A host keeps a core busy for up to minutes, so one program runs all of these tests and
//! schedules the hosts, in two tiers: see [`guest_tests::suite`].

mod attribution;
mod bench;
mod changes;
mod check;
mod counting;
mod distribution;
mod doctor;
mod ebb;
mod event_log;
mod exec;
mod features;
mod figures;
mod files;
mod hosts;
mod identity;
mod kernels;
mod lab_count;
mod lab_run;
mod linux;
mod logging;
mod machines;
mod metrics;
mod network;
mod operator;
mod parameters;
mod pmu;
mod pmu_offer;
mod policy;
mod pressure;
mod progress;
mod public_suites;
mod rdpmc;
mod record;
mod riscv;
mod riscv_figures;
mod roots;
mod rr;
mod sampling;
mod sandbox;
mod self_test;
mod silicon;
mod snapshots;
mod starvation;
mod stock;
mod streams;
mod templates;
mod turns;
mod using;

use std::process::ExitCode;

use guest_tests::suite;

fn main() -> ExitCode {
    let modules = [
        attribution::tests,
        bench::tests,
        changes::tests,
        check::tests,
        counting::tests,
        distribution::tests,
        doctor::tests,
        ebb::tests,
        event_log::tests,
        exec::tests,
        features::tests,
        figures::tests,
        files::tests,
        hosts::tests,
        identity::tests,
        kernels::tests,
        lab_count::tests,
        lab_run::tests,
        linux::tests,
        logging::tests,
        machines::tests,
        metrics::tests,
        network::tests,
        operator::tests,
        parameters::tests,
        pmu::tests,
        pmu_offer::tests,
        policy::tests,
        pressure::tests,
        progress::tests,
        public_suites::tests,
        rdpmc::tests,
        record::tests,
        riscv::tests,
        riscv_figures::tests,
        roots::tests,
        rr::tests,
        sampling::tests,
        sandbox::tests,
        self_test::tests,
        silicon::tests,
        snapshots::tests,
        starvation::tests,
        stock::tests,
        streams::tests,
        templates::tests,
        turns::tests,
        using::tests,
    ];
    suite::main(modules.into_iter().flat_map(|tests| tests()).collect())
}
