//! Samples of a vCPU, and the buffer in which they wait until they are fetched.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// Maximum number of words of samples that wait for a vCPU. The samples after that are lost, and counted.
const MAX_WORDS: usize = 1 << 18;
/// Number of words that count for a sample beside its chain.
const WORDS: usize = 16;

/// What a vCPU did when its event overflowed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Time in nanoseconds (`CLOCK_MONOTONIC`).
    pub time: u64,
    /// Number of the vCPU.
    pub vcpu: u8,
    /// It was in user mode.
    pub is_user: bool,
    /// Its instruction pointer.
    pub instruction: u64,
    /// Number of counts since the sample before.
    pub period: u64,
    /// Address of its page tables.
    pub table: u64,
    /// The thread that it ran, if that was found.
    pub task: Option<Task>,
    /// Return addresses of the callers in the guest's kernel, the latest first.
    pub kernel: Vec<u64>,
    /// Return addresses of the callers in the program. If the vCPU was in the kernel, the first is where the program
    /// has entered it.
    pub user: Vec<u64>,
    /// What the program has mapped where these addresses are, if no earlier sample has it.
    #[serde(default)]
    pub mappings: Vec<Mapping>,
}

/// A part of a file that a process of a guest has mapped, or memory without a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// Number of the process.
    pub process: u32,
    /// First address, and length.
    pub start: u64,
    pub len: u64,
    /// Where it begins in the file.
    pub offset: u64,
    /// The file, as the process names it. Empty if there is none.
    pub path: String,
    /// The file's size.
    pub size: u64,
    /// The file's build id, if it was found.
    pub build_id: Option<[u8; 20]>,
}

/// A thread of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Number of its process.
    pub process: u32,
    /// Its own number.
    pub thread: u32,
    /// Its name.
    pub name: String,
}

impl Sample {
    /// Returns how much it counts for limits.
    pub fn words(&self) -> usize {
        let mappings = self.mappings.iter().map(|mapping| WORDS + mapping.path.len() / 8);
        WORDS + self.kernel.len() + self.user.len() + mappings.sum::<usize>()
    }
}

/// Samples of one vCPU that wait, in the order of their time.
#[derive(Debug, Default)]
pub struct SampleBuffer(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    samples: VecDeque<Sample>,
    words: usize,
    lost: u64,
}

impl SampleBuffer {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a sample, or counts it as lost if too much waits. Returns whether it was added.
    pub fn add(&self, sample: Sample) -> bool {
        let mut waiting = self.lock();
        let has_room = waiting.words + sample.words() <= MAX_WORDS;
        if has_room {
            waiting.words += sample.words();
            waiting.samples.push_back(sample);
        } else {
            waiting.lost += 1;
        }
        has_room
    }

    /// Takes the first samples, of not much more than so many words.
    pub fn take(&self, words: usize) -> Vec<Sample> {
        let mut waiting = self.lock();
        let (mut taken, mut size) = (Vec::new(), 0);
        while size < words
            && let Some(sample) = waiting.samples.pop_front()
        {
            size += sample.words();
            taken.push(sample);
        }
        waiting.words -= size;
        taken
    }

    /// Returns the number of samples that were lost, and begins anew with it.
    pub fn take_lost(&self) -> u64 {
        std::mem::take(&mut self.lock().lost)
    }

    /// Returns whether no sample waits.
    pub fn is_empty(&self) -> bool {
        self.lock().samples.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(time: u64, callers: usize) -> Sample {
        let user = vec![0; callers];
        let (vcpu, is_user, instruction, period, table) = (0, true, 1, 1, 0);
        let (task, kernel, mappings) = (None, Vec::new(), Vec::new());
        Sample { time, vcpu, is_user, instruction, period, table, task, kernel, user, mappings }
    }

    #[test]
    fn samples_wait_in_order_and_what_is_too_much_is_lost_and_counted() {
        let buffer = SampleBuffer::default();
        let fit = MAX_WORDS / sample(0, 100).words();
        for time in 0..fit as u64 + 5 {
            buffer.add(sample(time, 100));
        }
        assert_eq!((buffer.take_lost(), buffer.take_lost()), (5, 0));
        assert_eq!(buffer.take(1).len(), 1, "one at least");
        let times: Vec<u64> = buffer.take(usize::MAX).iter().map(|sample| sample.time).collect();
        assert!(times.iter().copied().eq(1..fit as u64));
        assert!(buffer.is_empty());
        buffer.add(sample(7, 0));
        assert_eq!((buffer.take(100).len(), buffer.take_lost()), (1, 0));
    }
}
