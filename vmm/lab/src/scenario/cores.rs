//! Allocation of this machine's cores to simulated hosts, one core for each host. More hosts at a time would not finish
//! sooner, and could exceed the timeouts of their scripts, which are in real time.
//!
//! Each piece of work has a name. Of the work that waits for a core, the piece that took longest last time gets the
//! next one. So a long piece does not start last, with the other cores idle.

use std::collections::HashMap;
use std::num::NonZero;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

static CORES: LazyLock<Mutex<Cores>> = LazyLock::new(|| {
    let free = thread::available_parallelism().map_or(1, NonZero::get);
    Mutex::new(Cores { free, waiting: Vec::new(), known: HashMap::new(), taken: HashMap::new() })
});
static CHANGED: Condvar = Condvar::new();

/// Time that work of each name takes.
pub type Durations = HashMap<String, Duration>;

struct Cores {
    free: usize,
    /// Expected time of each piece of work that waits for a core.
    waiting: Vec<Duration>,
    /// Time that work took in earlier processes.
    known: Durations,
    /// Time that work has taken in this process.
    taken: Durations,
}

/// A core that this process uses for one piece of work, until this is dropped.
pub struct Core {
    work: String,
    begun: Instant,
}

impl Core {
    /// Waits for a core. Work that has not run before is expected to take its `limit`.
    #[must_use]
    pub fn wait_for(work: &str, limit: Duration) -> Self {
        let mut cores = cores();
        let expected = cores.known.get(work).copied().unwrap_or(limit);
        cores.waiting.push(expected);
        let others_first =
            |cores: &mut Cores| cores.free == 0 || cores.waiting.iter().any(|other| *other > expected);
        let mut cores = CHANGED.wait_while(cores, others_first).unwrap_or_else(PoisonError::into_inner);
        let own =
            cores.waiting.iter().position(|waiting| *waiting == expected).expect("the time was added above");
        cores.waiting.swap_remove(own);
        cores.free -= 1;
        CHANGED.notify_all();
        Self { work: work.to_owned(), begun: Instant::now() }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let mut cores = cores();
        cores.free += 1;
        *cores.taken.entry(std::mem::take(&mut self.work)).or_default() += self.begun.elapsed();
        CHANGED.notify_all();
    }
}

/// Sets the time that work of each name is expected to take.
pub fn expect(known: Durations) {
    cores().known = known;
}

/// Returns the time for which work of each name has had a core in this process.
pub fn taken() -> Durations {
    cores().taken.clone()
}

fn cores() -> MutexGuard<'static, Cores> {
    CORES.lock().unwrap_or_else(PoisonError::into_inner)
}
