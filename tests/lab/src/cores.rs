//! The cores of this machine, one for each simulated host. With more hosts at once none would end sooner, and the limits
//! of their scripts are in real time.

use std::num::NonZero;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

static CORES: LazyLock<Mutex<Cores>> = LazyLock::new(|| {
    let free = thread::available_parallelism().map_or(1, NonZero::get);
    Mutex::new(Cores { free, waiting: Vec::new() })
});
static CHANGED: Condvar = Condvar::new();

struct Cores {
    free: usize,
    /// How long those that wait may each take.
    waiting: Vec<Duration>,
}

/// A core that nothing else in this process counts on until this is dropped.
pub struct Core(());

impl Core {
    /// Waits until there is one for what may take so long. The longest goes first, so that at the end no core is left alone
    /// with most of its work.
    #[must_use]
    pub fn wait_for(limit: Duration) -> Self {
        let mut cores = cores();
        cores.waiting.push(limit);
        let others_first =
            |cores: &mut Cores| cores.free == 0 || cores.waiting.iter().any(|other| *other > limit);
        let mut cores = CHANGED.wait_while(cores, others_first).unwrap_or_else(PoisonError::into_inner);
        let own = cores.waiting.iter().position(|waiting| *waiting == limit).expect("it was added above");
        cores.waiting.swap_remove(own);
        cores.free -= 1;
        CHANGED.notify_all();
        Self(())
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        cores().free += 1;
        CHANGED.notify_all();
    }
}

fn cores() -> MutexGuard<'static, Cores> {
    CORES.lock().unwrap_or_else(PoisonError::into_inner)
}
