//! Holds the guest back until no thread is without its sandbox.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Opens when as many threads have arrived as it was made for. If one of them ends before, as a vCPU does that cannot
/// run, it stays closed, and the guest does not run: so does the machine end then.
pub struct Gate {
    missing: AtomicUsize,
    opened: OnceLock<()>,
}

impl Gate {
    pub fn new(threads: usize) -> Self {
        Self { missing: AtomicUsize::new(threads), opened: OnceLock::new() }
    }

    /// Counts this thread. It does not wait.
    pub fn arrive(&self) {
        if self.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.opened.get_or_init(|| ());
        }
    }

    /// Waits until all threads have arrived.
    pub fn wait(&self) {
        self.opened.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    #[test]
    fn nobody_goes_on_before_the_last_one_has_arrived() {
        let (gate, has_last) = (Gate::new(3), AtomicBool::new(false));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    gate.arrive();
                    gate.wait();
                    assert!(has_last.load(Ordering::Relaxed));
                });
            }
            while gate.missing.load(Ordering::Relaxed) > 1 {
                thread::yield_now();
            }
            has_last.store(true, Ordering::Relaxed);
            gate.arrive();
        });
    }
}
