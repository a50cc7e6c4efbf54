//! The cores of this machine, one for each simulated host. With more hosts at once none would end sooner, and the limits
//! of their scripts are in real time.
//!
//! Work has a name. What waits for a core gets one in the order of how long it took last time, the longest first, so that at
//! the end no core is left alone with most of the work.

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

/// How long work of each name takes.
pub type Durations = HashMap<String, Duration>;

struct Cores {
    free: usize,
    /// How long everything that waits for a core is expected to take.
    waiting: Vec<Duration>,
    /// What work took in earlier processes.
    known: Durations,
    /// What work has taken in this process.
    taken: Durations,
}

/// A core that nothing else in this process counts on until this is dropped.
pub struct Core {
    work: String,
    begun: Instant,
}

impl Core {
    /// Waits for a core. Work that has never run is expected to take as long as it may.
    #[must_use]
    pub fn wait_for(work: &str, limit: Duration) -> Self {
        let mut cores = cores();
        let expected = cores.known.get(work).copied().unwrap_or(limit);
        cores.waiting.push(expected);
        let others_first =
            |cores: &mut Cores| cores.free == 0 || cores.waiting.iter().any(|other| *other > expected);
        let mut cores = CHANGED.wait_while(cores, others_first).unwrap_or_else(PoisonError::into_inner);
        let own = cores.waiting.iter().position(|waiting| *waiting == expected).expect("it was added above");
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

/// Sets how long work is expected to take.
pub fn expect(known: Durations) {
    cores().known = known;
}

/// Returns how long each work has had a core in this process.
pub fn taken() -> Durations {
    cores().taken.clone()
}

fn cores() -> MutexGuard<'static, Cores> {
    CORES.lock().unwrap_or_else(PoisonError::into_inner)
}
