//! The registers and rings of a disk, a share, a console and a network device. The guest writes any register and any
//! memory at any time; in between it submits orderly requests.
//!
//! As long as the guest keeps to the rings that it has announced, the device must write nothing behind the end of a
//! buffer. A disk keeps its size, and a read-only one its content. After a reset, the device works again.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use arbitrary::Arbitrary;
use devices::Access;
use devices::fs::Share;
use devices::net::{Backend, Filter, Offer, Stream};
use devices::virtio::testing::Driver;
use devices::virtio::{Console, Device, DeviceState, Disk, Mac, Net, Queues, SharedFolder, TransportState};
use tempfile::{NamedTempFile, TempDir};
use vm_memory::{Bytes, GuestAddress};

const DISK: usize = 64 * 512;
const PORTS: usize = 3;
/// Pairs of queues of a network device.
const PAIRS: u16 = 2;
/// Bytes behind a buffer for a reply.
const GUARD: [u8; 64] = [0xa5; 64];

#[derive(Debug, Arbitrary)]
struct Input {
    kind: Kind,
    has_event_index: bool,
    steps: Vec<Step>,
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Kind {
    Disk,
    ReadOnlyDisk,
    Share,
    Console,
    Net,
}

#[derive(Debug, Arbitrary)]
enum Step {
    /// Writes a register, of four bytes or of another width.
    Write(Register, Number),
    WriteBytes(u16, Vec<u8>),
    Read(u16, u8),
    /// Writes the guest's memory, at most in the rings and in the first buffers.
    Memory(u16, Vec<u8>),
    Descriptor {
        queue: u8,
        index: u8,
        address: Address,
        len: Number,
        flags: u8,
        next: u8,
    },
    /// Makes descriptors available, without an orderly request behind them.
    Available {
        queue: u8,
        index: u16,
    },
    /// Submits an orderly request.
    Submit {
        queue: u8,
        request: Content,
        reply: u16,
    },
    /// Sets the device up anew.
    SetUp,
    Serve,
    /// What the owner of a console does. The process at the other end of a network reads frames, and sends them.
    Output {
        port: u8,
        consumed: u8,
    },
    Give {
        port: u8,
        bytes: Vec<u8>,
    },
    Close {
        port: u8,
    },
}

/// A register of four bytes.
#[derive(Debug, Clone, Copy, Arbitrary)]
struct Register(u8);

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Number {
    Small(u8),
    Any(u32),
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Address {
    Ring(u16),
    Buffer { number: u8, offset: u8 },
    Any(u64),
}

#[derive(Debug, Arbitrary)]
enum Content {
    Any(Vec<u8>),
    Disk {
        kind: u8,
        sector: Number,
        data: u16,
    },
    Fuse {
        opcode: u8,
        node: u8,
        body: Vec<u8>,
    },
    /// A frame of a network, behind its header.
    Frame {
        flags: u8,
        segmented: u8,
        checksum: (u8, u8),
        data: u16,
    },
    /// A control message of a console.
    Control {
        port: u8,
        event: u8,
        value: u8,
    },
}

impl Number {
    fn value(self) -> u32 {
        match self {
            Self::Small(value) => value.into(),
            Self::Any(value) => value,
        }
    }
}

impl Address {
    fn value(self) -> u64 {
        match self {
            Self::Ring(address) => address.into(),
            Self::Buffer { number, offset } => 0x10_0000 + u64::from(number) * 0x1_0000 + u64::from(offset),
            Self::Any(address) => address,
        }
    }
}

impl Content {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Any(bytes) => bytes.clone(),
            Self::Disk { kind, sector, data } => {
                let mut bytes = [u32::from(kind % 16), 0, sector.value(), 0].map(u32::to_le_bytes).concat();
                bytes.resize(bytes.len() + usize::from(*data), 0x5a);
                bytes
            }
            Self::Fuse { opcode, node, body } => {
                let len = u32::try_from(40 + body.len()).expect("inputs are short");
                let mut bytes = [len, u32::from(opcode % 56)].map(u32::to_ne_bytes).concat();
                bytes.extend([1, u64::from(node % 8)].map(u64::to_ne_bytes).as_flattened());
                bytes.resize(40, 0);
                bytes.extend(body);
                bytes
            }
            Self::Frame { flags, segmented, checksum: (start, offset), data } => {
                let mut bytes = vec![*flags, *segmented, 0, 0, 0, 0, *start, 0, *offset, 0, 0, 0];
                bytes.resize(bytes.len() + usize::from(*data), 0x5a);
                bytes
            }
            Self::Control { port, event, value } => {
                let port = u32::from(port % 8).to_le_bytes();
                let words = [u16::from(event % 8), u16::from(value % 2)].map(u16::to_le_bytes);
                [&port, words.as_flattened()].concat()
            }
        }
    }
}

/// A device with what belongs to it on the host.
enum Served {
    Disk(Disk, NamedTempFile, Access),
    Share(Box<SharedFolder>, #[expect(dead_code, reason = "it is removed when this is dropped")] TempDir),
    Console(Console),
    Net(Box<Net>, Vec<UnixStream>),
}

impl Served {
    fn new(kind: Kind) -> Self {
        let disk = |access| {
            let mut file = NamedTempFile::new().expect("temporary files can be made");
            file.write_all(&vec![0x11; DISK]).expect("they can be written");
            Self::Disk(Disk::open(file.path(), access).expect("it is a disk"), file, access)
        };
        match kind {
            Kind::Disk => disk(Access::ReadWrite),
            Kind::ReadOnlyDisk => disk(Access::ReadOnly),
            Kind::Share => {
                let dir = TempDir::new().expect("temporary folders can be made");
                std::fs::write(dir.path().join("file"), "inside").expect("they can be written");
                let share = Share::open(dir.path(), Access::ReadOnly, 1).expect("it is a folder");
                Self::Share(Box::new(SharedFolder::new(share, 0)), dir)
            }
            Kind::Console => Self::Console(Console::new(PORTS)),
            Kind::Net => {
                let (mut peers, mut backends) = (Vec::new(), Vec::<Box<dyn Backend>>::new());
                for _ in 0..PAIRS {
                    let (theirs, ours) = UnixStream::pair().expect("sockets can be made");
                    theirs.set_nonblocking(true).expect("it is a socket");
                    peers.push(theirs);
                    backends.push(Box::new(Stream::new(ours.into(), Filter::Open)));
                }
                let offer = Offer { pairs: PAIRS, ..Stream::OFFER };
                Self::Net(Box::new(Net::new(Mac([2; 6]), offer, backends)), peers)
            }
        }
    }

    fn device(&mut self) -> &mut dyn Device {
        match self {
            Self::Disk(disk, ..) => disk,
            Self::Share(share, _) => &mut **share,
            Self::Console(console) => console,
            Self::Net(net, _) => &mut **net,
        }
    }

    /// Does what the owner of a console does, if this is one.
    fn own<T>(&mut self, driver: &Driver, work: impl FnOnce(&mut Console, &mut Queues) -> T) -> Option<T> {
        match self {
            Self::Console(console) => driver.transport.serve(console, work),
            _ => None,
        }
    }

    fn check(&self) {
        if let Self::Disk(_, file, access) = self {
            let len = file.as_file().metadata().expect("it is there").len();
            assert_eq!(len, DISK as u64, "the size of a disk has changed");
            if *access == Access::ReadOnly {
                let mut content = vec![0; DISK];
                File::open(file.path())
                    .and_then(|file| file.read_exact_at(&mut content, 0))
                    .expect("it is there");
                assert!(content.iter().all(|byte| *byte == 0x11), "a read-only disk has changed");
            }
        }
    }
}

struct Guest {
    driver: Driver,
    /// Number of orderly requests.
    submitted: usize,
    /// Ends of the buffers for their replies.
    ends: Vec<GuestAddress>,
    /// The guest has written no ring itself.
    is_orderly: bool,
    features: u64,
}

/// Registers whose values do not move a ring.
const HARMLESS: [u8; 6] = [0x14, 0x24, 0x30, 0x50, 0x60, 0x64];

impl Guest {
    fn submit(&mut self, queue: usize, request: &[u8], reply: u16) {
        // The other half of the buffer is for the reply.
        let request = &request[..request.len().min(0x7000)];
        let reply = reply % 0x7000;
        let at = self.driver.submit(queue, request, reply.into());
        if reply > 0 {
            let end = GuestAddress(at.0 + u64::from(reply));
            self.driver.memory.write_slice(&GUARD, end).expect("it is in memory");
            self.ends.push(end);
        }
    }

    fn serve(&mut self, served: &mut Served) {
        self.driver.serve(served.device());
        if self.is_orderly {
            for end in &self.ends {
                let mut found = [0; GUARD.len()];
                self.driver.memory.read_slice(&mut found, *end).expect("it is in memory");
                assert_eq!(found, GUARD, "written behind a buffer that ends at {end:?}");
            }
        }
    }

    fn step(&mut self, step: &Step, served: &mut Served) {
        let queues = served.device().queue_sizes().len();
        let queue = |queue: u8| usize::from(queue) % queues;
        self.is_orderly &= match step {
            Step::Write(Register(register), _) => HARMLESS.contains(&(register & !3)),
            Step::WriteBytes(..) | Step::Memory(..) | Step::Descriptor { .. } | Step::Available { .. } => {
                false
            }
            _ => true,
        };
        if let Served::Net(_, peers) = served {
            exchange(step, peers);
        }
        match step {
            Step::Write(Register(register), value) => {
                self.driver.write(u64::from(register & !3), value.value());
            }
            Step::WriteBytes(at, bytes) => self.driver.transport.write(u64::from(at % 0x200), bytes),
            Step::Read(at, len) => {
                self.driver.transport.read(u64::from(at % 0x200), &mut vec![0; usize::from(len % 16)]);
            }
            Step::Memory(at, bytes) => {
                self.driver.memory.write_slice(bytes, GuestAddress((*at).into())).expect("it is in memory");
            }
            Step::Descriptor { queue: of, index, address, len, flags, next } => {
                let rings = Driver::rings(queue(*of));
                let (index, next) = (u16::from(index % 16), u16::from(next % 18));
                self.driver.descriptor(rings, index, address.value(), len.value(), (flags % 8).into(), next);
            }
            Step::Available { queue: of, index } => {
                let at = GuestAddress(Driver::rings(queue(*of)) + 0x402);
                self.driver.memory.write_obj(*index, at).expect("it is in memory");
            }
            Step::Submit { queue: to, request, reply } => {
                // After 32 requests the first one's buffer is used again, perhaps for a longer reply.
                if self.submitted < 32 {
                    self.submitted += 1;
                    self.submit(queue(*to), &request.bytes(), *reply);
                }
            }
            Step::SetUp => self.driver.reset(self.features),
            Step::Serve => self.serve(served),
            Step::Output { port, consumed } => {
                served.own(&self.driver, |console, queues| {
                    let port = usize::from(port % 4);
                    let len = console.output(queues, port).len();
                    assert!(len <= 1 << 20, "{len} bytes of output are kept");
                    console.consume(port, (*consumed).into());
                });
            }
            Step::Give { port, bytes } => {
                served.own(&self.driver, |console, queues| {
                    let given = console.give(queues, usize::from(port % 4), bytes);
                    assert!(given <= bytes.len());
                });
            }
            Step::Close { port } => {
                served.own(&self.driver, |console, queues| console.close(queues, usize::from(port % 4)));
            }
        }
    }
}

/// Does what the processes at the other ends of a network do. They also send what is no frame.
fn exchange(step: &Step, peers: &[UnixStream]) {
    let peer = |port: u8| &peers[usize::from(port) % peers.len()];
    // An error means that it would wait, or that the device has given up.
    let _ = match step {
        Step::Output { port, .. } => peer(*port).read(&mut vec![0; 1 << 20]).map(drop),
        Step::Give { port, bytes } => {
            let length = u32::try_from(bytes.len()).expect("inputs are short").to_be_bytes();
            peer(*port).write_all(&[&length, &bytes[..]].concat())
        }
        Step::Close { port } => peer(*port).write_all(&[*port]),
        _ => Ok(()),
    };
}

/// Runs the target.
pub fn run(data: &[u8]) {
    let Some(input) = crate::parse::<Input>(data) else { return };
    let mut served = Served::new(input.kind);
    let features = 1 << 32 | u64::from(input.has_event_index) << 29;
    let driver = Driver::new(served.device());
    driver.set_up(features);
    let mut guest = Guest { driver, submitted: 0, ends: Vec::new(), is_orderly: true, features };
    for step in &input.steps {
        guest.step(step, &mut served);
    }
    guest.serve(&mut served);
    served.check();
    works_after_reset(guest, &mut served);
}

/// Restores a saved device of each kind, and serves it: it is refused, or does what one does whose driver has written
/// the same.
pub fn restored(transport: &TransportState, own: Option<&DeviceState>) {
    for kind in [Kind::Disk, Kind::ReadOnlyDisk, Kind::Share, Kind::Console, Kind::Net] {
        let mut served = Served::new(kind);
        if served.device().restore(own).is_err() {
            continue;
        }
        let features = 1 << 32;
        let driver = Driver::new(served.device());
        driver.set_up(features);
        let mut guest = Guest { driver, submitted: 0, ends: Vec::new(), is_orderly: false, features };
        if guest.driver.transport.restore(transport).is_err() {
            continue;
        }
        for queue in 0..served.device().queue_sizes().len() {
            guest.submit(queue, &[0x5a; 64], 512);
            guest.serve(&mut served);
        }
        // Its driver may not have set it up.
        let _ = guest.driver.transport.save();
        served.check();
        works_after_reset(guest, &mut served);
    }
}

/// Checks that a reset ends everything that came before.
fn works_after_reset(mut guest: Guest, served: &mut Served) {
    guest.driver.reset(1 << 32);
    let (queue, request, reply) = match served {
        Served::Disk(..) => (0, [0; 16].to_vec(), 513),
        // STATFS.
        Served::Share(..) => (1, Content::Fuse { opcode: 17, node: 1, body: Vec::new() }.bytes(), 96),
        Served::Net(..) => (1, vec![0; 60], 0),
        Served::Console(_) => (3, Content::Control { port: 0, event: 0, value: 1 }.bytes(), 0),
    };
    guest.driver.submit(queue, &request, reply);
    guest.driver.serve(served.device());
    if let Served::Net(net, peers) = served {
        // The other end may not have read for long.
        while (&peers[0]).read(&mut vec![0; 1 << 20]).is_ok_and(|count| count > 0) {
            guest.driver.serve(&mut **net);
        }
    }
    let expected = if matches!(served, Served::Console(_) | Served::Net(..)) { 0 } else { reply };
    assert_eq!(guest.driver.next_completion(queue), Some(expected), "the device does not work after a reset");
}
