//! The cost of event-based branches: what `ebb-sample --cost` prints, which is in the default guest.
//!
//! On a simulated host with one CPU, a nanosecond of the guest's clock is an instruction, of host and guest.

use std::iter;
use std::path::Path;

use guest_images::payloads::AGENT;
use guest_images::{Progress, Suite};

use crate::error::Result;
use crate::scenario::Scenario;
use crate::simulator::board::{HostPmu, Processor};

/// The cost of an overflow.
#[derive(Debug)]
pub struct Cost {
    /// What the program gets, and from which kernel.
    pub what: String,
    /// Instructions of host and guest, other than the program's, until the handler's first one and after its return.
    pub before: u64,
    /// Instructions of the program: the handler, what surrounds it, and the return.
    pub program: u64,
}

/// Measures signals on the host, and signals and branches in a guest of each PMU.
pub fn measure(processor: Processor, tally: &Path, progress: &mut Progress) -> Result<Vec<Cost>> {
    let (pmus, host): (&[&str], _) = match processor {
        Processor::Intel => (&["intel"], HostPmu::INTEL),
        _ => (&["amd", "amd-legacy"], HostPmu::default()),
    };
    let guests = pmus.iter().map(|pmu| format!("./tally run --pmu {pmu} -- ebb-sample --cost || exit"));
    // It is a name of the agent's. On the host nobody serves a block, which is its second line.
    let script: Vec<String> = iter::once("./ebb-sample --cost".to_owned()).chain(guests).collect();
    let scenario = Scenario::with_all_counters(script.join("\n"))
        .pmu(host)
        .program(AGENT, "ebb-sample")
        .file(tally, "tally")
        .guest_with(Suite::default(), &[], progress)?;
    let text = super::output::run(&scenario, progress)?;
    let costs: Option<Vec<Cost>> = text
        .lines()
        .filter(|line| ["signal ", "branch "].iter().any(|name| line.starts_with(name)))
        .zip(iter::once("on the host".to_owned()).chain(pmus.iter().flat_map(|pmu| {
            let place = format!("`--pmu {pmu}`");
            [place.clone(), place]
        })))
        .map(|(line, place)| cost(line, &place))
        .collect();
    let costs = costs.filter(|costs| costs.len() == 1 + 2 * pmus.len());
    costs.ok_or_else(|| super::output::unreadable(&text))
}

/// Reads a line `NAME NANOSECONDS INSTRUCTIONS`.
fn cost(line: &str, place: &str) -> Option<Cost> {
    let mut words = line.split_whitespace();
    let (name, nanoseconds, program) = (words.next()?, words.next()?, words.next()?);
    let (nanoseconds, program): (u64, u64) = (nanoseconds.parse().ok()?, program.parse().ok()?);
    let before = nanoseconds.checked_sub(program)?;
    Some(Cost { what: format!("{name}, {place}"), before, program })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_name_and_two_numbers() {
        let read = cost("branch          12012                        100", "on the host").unwrap();
        assert_eq!((&*read.what, read.before, read.program), ("branch, on the host", 11_912, 100));
        assert!(cost("branch 12", "amd").is_none() && cost("branch 1 2", "amd").is_none());
    }
}
