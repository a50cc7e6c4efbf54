//! How many counters the host really has to give.

use super::event::PerfEvent;
use super::obstacle::Obstacle;

/// How many events of this thread find room on the PMU at once, at most `most`.
///
/// Others may hold counters all the time: the NMI watchdog holds one on every CPU.
pub fn free_counters(most: usize) -> Result<usize, Obstacle> {
    let mut held = Vec::new();
    while held.len() < most {
        let event = PerfEvent::sample().map_err(|error| Obstacle::from_error(&error))?;
        match event.counted() {
            None => break,
            Some(0) => held.push(event),
            // This thread is in no guest.
            Some(_) => return Err(Obstacle::CountsHost),
        }
    }
    if held.is_empty() { Err(Obstacle::NoneFree) } else { Ok(held.len()) }
}
