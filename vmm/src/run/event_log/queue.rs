//! What the threads of a run do with the one [`Writer`] of its event log.
//!
//! A write takes as long as the disk does, or the reader of a pipe. So nobody holds a lock while it writes: it has
//! taken the writer out, and the records of others wait in a second buffer. Once that is full as well, they wait for
//! the writer, and the guest's vCPUs with them.

use std::fmt::Display;
use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::file::Output;
use super::write::{Records, Writer};
use crate::protocol::record::{Location, What};

/// The writer and what waits for it.
pub struct Queue<W: Output> {
    state: Mutex<State<W>>,
    /// Notified when a thread has put the writer back.
    returned: Condvar,
    began: Instant,
}

struct State<W> {
    /// `None` while a thread has taken it out.
    writer: Option<Writer<W>>,
    /// Records that were added since.
    meanwhile: Records,
}

impl<W: Output> State<W> {
    /// Returns true if a record can be added and nothing is to be written before.
    fn has_room(&self) -> bool {
        self.writer.as_ref().map_or(!self.meanwhile.are_full(), |writer| !writer.is_full())
    }

    /// Returns the buffer for a record of this time, or `None` if that is lost.
    fn buffer(&mut self, now: Duration) -> Option<&mut Vec<u8>> {
        match &mut self.writer {
            Some(writer) => writer.buffer(now),
            None => Some(self.meanwhile.buffer()),
        }
    }
}

type Locked<'a, W> = MutexGuard<'a, State<W>>;

/// A thread has taken the writer out. It is put back when this is dropped.
struct Turn<'a, W: Output> {
    queue: &'a Queue<W>,
    /// `None` once it is put back.
    writer: Option<Writer<W>>,
    since: Duration,
}

impl<W: Output> Queue<W> {
    /// Creates a queue for a log that begins now.
    pub fn new(writer: Writer<W>) -> Self {
        let state = State { writer: Some(writer), meanwhile: Records::default() };
        Self { state: Mutex::new(state), returned: Condvar::new(), began: Instant::now() }
    }

    /// Adds records of the current time. Returns why writing failed, the first time that it fails.
    pub fn add<T: Display>(
        &self,
        location: Location,
        records: impl IntoIterator<Item = What<T>>,
    ) -> Option<String> {
        let mut failure = None;
        let mut state = self.lock();
        // The time is taken under the lock, so that it never decreases from record to record.
        let mut now = self.now();
        for what in records {
            if !state.has_room() {
                state = self.make_room(state, &mut failure);
                now = self.now();
            }
            if let Some(buffer) = state.buffer(now) {
                what.encode(now, location, buffer);
            }
        }
        if !state.has_room() {
            drop(self.write_if_due(state, &mut failure));
        }
        failure
    }

    /// Works with the writer at the current time, once no other thread does. Returns why writing failed, too, the
    /// first time that it fails.
    pub fn work<T>(&self, work: impl FnOnce(&mut Writer<W>, Duration) -> T) -> (T, Option<String>) {
        let mut state = self.lock();
        loop {
            if let Some(writer) = state.writer.take() {
                return self.turn(state, writer, work);
            }
            state = self.wait(state);
        }
    }

    /// As [`Self::work`], but does nothing if another thread works, or this one already does.
    pub fn work_if_unlocked(&self, work: impl FnOnce(&mut Writer<W>, Duration)) {
        if let Ok(mut state) = self.state.try_lock()
            && let Some(writer) = state.writer.take()
        {
            self.turn(state, writer, work);
        }
    }

    fn turn<T>(
        &self,
        state: Locked<'_, W>,
        writer: Writer<W>,
        work: impl FnOnce(&mut Writer<W>, Duration) -> T,
    ) -> (T, Option<String>) {
        let since = self.now();
        drop(state);
        let mut turn = Turn { queue: self, writer: Some(writer), since };
        let writer = turn.writer.as_mut().expect("it is not put back yet");
        (work(writer, since), writer.take_first_failure())
    }

    /// Writes what is due, and waits until there is room for a record.
    #[cold]
    fn make_room<'a>(&'a self, mut state: Locked<'a, W>, failure: &mut Option<String>) -> Locked<'a, W> {
        loop {
            state = self.write_if_due(state, failure);
            if state.writer.is_some() || !state.meanwhile.are_full() {
                return state;
            }
            state = self.wait(state);
        }
    }

    #[cold]
    fn write_if_due<'a>(&'a self, mut state: Locked<'a, W>, failure: &mut Option<String>) -> Locked<'a, W> {
        let Some(writer) = state.writer.take_if(|writer| writer.is_due(self.now())) else { return state };
        let (_, why) = self.turn(state, writer, Writer::write);
        *failure = failure.take().or(why);
        self.lock()
    }

    fn wait<'a>(&'a self, state: Locked<'a, W>) -> Locked<'a, W> {
        self.returned.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> Locked<'_, W> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time since the log began, by the same clock as [`super::monotonic`]. It is taken for each overflow,
    /// and in a static program rustix reads a clock by a system call.
    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}

impl<W: Output> Drop for Turn<'_, W> {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        if let Some(mut writer) = self.writer.take() {
            writer.add_all(self.since, &mem::take(&mut state.meanwhile));
            state.writer = Some(writer);
        }
        drop(state);
        self.queue.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::log::read::Reader;
    use crate::protocol::record::Header;
    use std::io::{self, Write};
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
    use std::thread::{self, ScopedJoinHandle};

    /// A file whose writes wait until they are received, so that a test decides how long they take.
    struct Slow(SyncSender<Vec<u8>>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(bytes.to_vec()).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Output for Slow {
        fn max_size(&self) -> Option<u64> {
            None
        }

        fn begin_next(&mut self) -> io::Result<()> {
            unreachable!("it has no maximum size")
        }
    }

    fn queue() -> (Queue<Slow>, Receiver<Vec<u8>>) {
        let (sender, written) = sync_channel(0);
        let header = Header { wall: Duration::ZERO, monotonic: Duration::ZERO };
        (Queue::new(Writer::new(Slow(sender), header)), written)
    }

    fn add(queue: &Queue<Slow>, number: u64) {
        assert_eq!(queue.add(Location::default(), [What::Message(number)]), None);
    }

    /// Waits until a thread writes, and then until as many records wait for it as there is room for. Returns their
    /// number.
    fn fill_meanwhile(queue: &Queue<Slow>, mut next: u64) -> u64 {
        while queue.lock().writer.is_some() {
            thread::yield_now();
        }
        while !queue.lock().meanwhile.are_full() {
            add(queue, next);
            next += 1;
        }
        next
    }

    #[test]
    fn while_one_thread_writes_others_add_records_and_none_is_lost() {
        let (queue, written) = queue();
        let mut file = Vec::new();
        let last = thread::scope(|scope| {
            let flush = || scope.spawn(|| assert_eq!(queue.work(Writer::flush), (Ok(()), None)));
            let first = flush();
            // Nothing is received, so that thread writes for all this time.
            let last = fill_meanwhile(&queue, 0);
            let waits = scope.spawn(|| add(&queue, u64::MAX));
            let second = flush();
            let mut receive_until_it_ends = |thread: ScopedJoinHandle<()>| {
                while !thread.is_finished() {
                    file.extend(written.try_iter().flatten());
                    thread::yield_now();
                }
                thread.join().unwrap();
            };
            [first, second, waits].into_iter().for_each(&mut receive_until_it_ends);
            receive_until_it_ends(flush());
            last
        });
        let (_, records) = Reader::new(&*file).unwrap();
        let records: Vec<_> = records.map(Result::unwrap).collect();
        assert!(records.is_sorted_by_key(|record| record.time));
        let texts: Vec<_> = records.into_iter().map(|record| record.what.to_string()).collect();
        assert_eq!(texts, (0..last).chain([u64::MAX]).map(|number| number.to_string()).collect::<Vec<_>>());
    }

    #[test]
    fn a_write_that_panics_leaves_the_writer_to_the_others() {
        let (queue, written) = queue();
        add(&queue, 0);
        let panics = thread::scope(|scope| scope.spawn(|| queue.work(|_, _| panic!("on purpose"))).join());
        assert!(panics.is_err());
        queue.work_if_unlocked(|_, _| queue.work_if_unlocked(|_, _| panic!("this thread works already")));
        thread::scope(|scope| {
            scope.spawn(|| queue.work(Writer::flush));
            assert!(!written.recv().unwrap().is_empty());
        });
    }
}
