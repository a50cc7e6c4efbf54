//! Measures what opening and closing an event of a guest takes: directly, and by a broker. On a simulated host, where a
//! nanosecond is an instruction, from the project's folder:
//!
//! ```sh
//! cargo build --release -p vpmu-perf --example opening
//! echo ./opening >script.sh
//! tally-lab exec --with target/x86_64-unknown-linux-gnu/release/examples/opening script.sh
//! ```

use std::time::{Duration, Instant};

use vpmu::event::{Event, Filter, GenericEvent, Scope, Selection};
use vpmu::source::{FAR, Source};
use vpmu_perf::{HostPmu, PerfEvents, broker};

const TIMES: u32 = 1000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (pmu, _) = HostPmu::bind_thread()?;
    let direct = mean(&mut PerfEvents::new(pmu))?;
    broker::start(1, || {})?;
    let by_broker = mean(&mut PerfEvents::new(pmu))?;
    println!("directly {direct:?}, by a broker {by_broker:?}");
    broker::end();
    Ok(())
}

/// Returns the mean time of an event from before it is opened until it is closed.
fn mean(events: &mut PerfEvents) -> Result<Duration, Box<dyn std::error::Error>> {
    let instructions = Selection {
        event: Event::Generic(GenericEvent::Instructions),
        filter: Filter::User,
        scope: Scope::Guest,
    };
    let begun = Instant::now();
    for _ in 0..TIMES {
        events.start(instructions, FAR).map_err(|refusal| refusal.0)?;
    }
    Ok(begun.elapsed() / TIMES)
}
