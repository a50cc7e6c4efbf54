//! Allocation of this machine's cores to simulated hosts, one core for each host. More hosts at a time would not finish
//! sooner, and could exceed the timeouts of their scripts, which are in real time.
//!
//! Each piece of work has a name. Of the work that waits for a core, the piece with the highest precedence gets the
//! next one. By default, this is the piece that took longest last time: so a long piece does not start last, with the
//! other cores idle.

use std::collections::HashMap;
use std::num::NonZero;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

static CORES: LazyLock<Mutex<Cores>> = LazyLock::new(|| {
    let free = thread::available_parallelism().map_or(1, NonZero::get);
    Mutex::new(Cores { free, waiting: Vec::new(), order: Order::default(), taken: HashMap::new() })
});
static CHANGED: Condvar = Condvar::new();

/// A duration for work of each name.
pub type Durations = HashMap<String, Duration>;

/// The order in which work gets cores: that with the longest duration first.
#[derive(Debug, Default)]
pub struct Order {
    pub known: Durations,
    /// Duration of what is not known. `None` is the limit of the work.
    pub unknown: Option<Duration>,
}

struct Cores {
    free: usize,
    /// Precedence of each piece of work that waits for a core.
    waiting: Vec<Duration>,
    order: Order,
    /// Time that work has taken in this process.
    taken: Durations,
}

/// A core that this process uses for one piece of work, until this is dropped.
pub struct Core {
    work: String,
    begun: Instant,
}

impl Core {
    /// Waits for a core. By default, work that has not run before is expected to take its `limit`.
    #[must_use]
    pub fn wait_for(work: &str, limit: Duration) -> Self {
        let mut cores = cores();
        let order = &cores.order;
        let precedence = order.known.get(work).copied().or(order.unknown).unwrap_or(limit);
        cores.waiting.push(precedence);
        let others_first =
            |cores: &mut Cores| cores.free == 0 || cores.waiting.iter().any(|other| *other > precedence);
        let mut cores = CHANGED.wait_while(cores, others_first).unwrap_or_else(PoisonError::into_inner);
        let own = cores.waiting.iter().position(|waiting| *waiting == precedence);
        let own = own.expect("the precedence was added above");
        cores.waiting.swap_remove(own);
        cores.free -= 1;
        cores.taken.entry(work.to_owned()).or_default();
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

/// Sets the order in which work gets cores.
pub fn set_order(order: Order) {
    cores().order = order;
}

/// Returns the time for which work of each name has had a core in this process: none for what has only begun.
pub fn taken() -> Durations {
    cores().taken.clone()
}

fn cores() -> MutexGuard<'static, Cores> {
    CORES.lock().unwrap_or_else(PoisonError::into_inner)
}
