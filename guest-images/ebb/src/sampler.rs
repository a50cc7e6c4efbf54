//! A thread that samples itself.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::branches::Branches;
use crate::counter::Event;
use crate::entry::Branch;
use crate::error::Error;

/// Number of functions that a sample has at most.
const DEPTH: usize = 32;

/// Samples the thread that makes it: where it was at each overflow, and what had called it, if the code keeps frame
/// pointers (`-C force-frame-pointers=yes`).
pub struct Sampler {
    branches: Branches,
    /// Made by `Box::into_raw`: the handler has its address.
    buffer: *mut Buffer,
    event: Event,
    period: u64,
}

struct Buffer {
    /// Bounds of the thread's stack.
    stack: [u64; 2],
    /// Number of samples, also of those for which there was no room.
    taken: AtomicU64,
    samples: Box<[[AtomicU64; DEPTH]]>,
}

impl Sampler {
    /// Creates a sampler of at most `capacity` samples, one after each `period` events.
    pub fn new(event: Event, period: u64, capacity: usize) -> Result<Self, Error> {
        let samples = (0..capacity).map(|_| [const { AtomicU64::new(0) }; DEPTH]).collect();
        let buffer = Box::new(Buffer { stack: stack_of_caller(), taken: AtomicU64::new(0), samples });
        let buffer = Box::into_raw(buffer);
        // SAFETY: the handler only writes to the buffer, which lives until no branch comes any more (`drop`), and reads
        // from the thread's stack. If GS is in use, there is an error.
        match unsafe { Branches::new(sample, buffer.expose_provenance()) } {
            Ok(branches) => Ok(Self { branches, buffer, event, period }),
            Err(error) => {
                // SAFETY: it was made by `Box::into_raw`, and nobody else has it.
                drop(unsafe { Box::from_raw(buffer) });
                Err(error)
            }
        }
    }

    /// Samples what a function does. Returns the samples, each with the innermost function's address first, and what
    /// the function has returned.
    pub fn sample<T>(&mut self, function: impl FnOnce() -> T) -> Result<(Vec<Vec<u64>>, T), Error> {
        self.buffer().taken.store(0, Relaxed);
        let counter = self.branches.open(self.event, self.period)?;
        self.branches.enable();
        counter.enable()?;
        let result = function();
        counter.disable()?;
        self.branches.disable();
        Ok((self.buffer().stacks(), result))
    }

    /// Number of samples of the last run for which there was no room.
    pub fn lost(&self) -> u64 {
        self.buffer().taken.load(Relaxed).saturating_sub(self.buffer().samples.len() as u64)
    }

    fn buffer(&self) -> &Buffer {
        // SAFETY: it lives as long as this value, and all that changes in it is atomic.
        unsafe { &*self.buffer }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // No event is open any more, so no branch comes.
        self.branches.disable();
        // SAFETY: it was made by `Box::into_raw`, and is not used again.
        drop(unsafe { Box::from_raw(self.buffer) });
    }
}

impl Buffer {
    fn stacks(&self) -> Vec<Vec<u64>> {
        let taken = usize::try_from(self.taken.load(Relaxed)).unwrap_or(usize::MAX);
        let samples = self.samples.iter().take(taken);
        let stack = |words: &[AtomicU64; DEPTH]| {
            words.iter().map(|word| word.load(Relaxed)).take_while(|word| *word != 0).collect()
        };
        samples.map(stack).collect()
    }

    /// Adds a sample: follows the chain of frame pointers, which leads up the stack.
    fn add(&self, branch: &Branch) {
        let index = self.taken.fetch_add(1, Relaxed);
        let Some(sample) = usize::try_from(index).ok().and_then(|index| self.samples.get(index)) else {
            return;
        };
        sample[0].store(branch.instruction, Relaxed);
        let (mut frame, mut above) = (branch.frame, branch.stack);
        let mut depth = 1;
        // On another stack than the thread's, nothing is known of callers.
        if !(self.stack[0]..self.stack[1]).contains(&above) {
            frame = 0;
        }
        while depth < DEPTH && self.holds(frame, above) {
            let address = usize::try_from(frame).expect("64 bits");
            let words = std::ptr::with_exposed_provenance::<[u64; 2]>(address);
            // SAFETY: the two words are on the thread's stack, above its stack pointer.
            let [next, caller] = unsafe { words.read_volatile() };
            if caller == 0 {
                break;
            }
            sample[depth].store(caller, Relaxed);
            depth += 1;
            (above, frame) = (frame + 1, next);
        }
        if depth < DEPTH {
            sample[depth].store(0, Relaxed);
        }
    }

    /// Returns whether a frame can be at this address.
    fn holds(&self, frame: u64, above: u64) -> bool {
        let last = self.stack[1].saturating_sub(16);
        frame.is_multiple_of(8) && frame >= above.max(self.stack[0]) && frame <= last
    }
}

extern "C" fn sample(branch: &Branch, argument: usize) {
    let buffer = std::ptr::with_exposed_provenance::<Buffer>(argument);
    // SAFETY: the argument is the address of the sampler's buffer, which lives as long as the branches.
    unsafe { &*buffer }.add(branch);
}

/// Returns the bounds of the caller's stack. Without them, samples have no callers.
fn stack_of_caller() -> [u64; 2] {
    let mut attributes = std::mem::MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: has no preconditions.
    let thread = unsafe { libc::pthread_self() };
    // SAFETY: the function initialises the attributes, if it succeeds.
    if unsafe { libc::pthread_getattr_np(thread, attributes.as_mut_ptr()) } != 0 {
        return [0, 0];
    }
    let (mut start, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: the attributes were initialised.
    let status = unsafe { libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut start, &raw mut size) };
    // SAFETY: as above; they are not used again.
    unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
    if status == 0 { [start.addr() as u64, start.addr() as u64 + size as u64] } else { [0, 0] }
}
