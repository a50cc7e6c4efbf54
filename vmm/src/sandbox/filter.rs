//! Restricts a thread to a list of system calls, by seccomp.

use std::collections::BTreeMap;
use std::env::consts::ARCH;
use std::io;
use std::sync::Arc;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter, sock_filter,
};

use super::Mode;
use crate::arch::calls::AUDIT_ARCH;

/// A filter cannot be made or installed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct FilterError(Arc<seccompiler::Error>);

impl From<seccompiler::Error> for FilterError {
    fn from(error: seccompiler::Error) -> Self {
        Self(Arc::new(error))
    }
}

impl From<seccompiler::BackendError> for FilterError {
    fn from(error: seccompiler::BackendError) -> Self {
        seccompiler::Error::from(error).into()
    }
}

/// A condition on one argument of a system call.
#[derive(Debug, Clone, Copy)]
pub struct Argument {
    /// Number of the argument, from 0.
    pub number: u8,
    pub is: Is,
}

/// What an argument has to be: its lower 32 bits, unless it says otherwise.
#[derive(Debug, Clone, Copy)]
pub enum Is {
    Equal(u32),
    /// Any value with all of these bits.
    With(u32),
    /// Any value without these bits.
    Without(u32),
    /// A null pointer, of 64 bits.
    Null,
}

/// A list of system calls.
#[derive(Debug, Default)]
pub struct Calls {
    /// Alternatives of conditions; an empty list allows any arguments.
    allowed: BTreeMap<i64, Vec<Vec<Argument>>>,
    /// Calls for which the thread is told that this kernel does not have them.
    denied: Vec<i64>,
    /// Requests of `ioctl` that are allowed before the rest of the list is gone through.
    first: Vec<u32>,
}

impl Calls {
    /// Adds system calls with any arguments.
    pub fn allow(&mut self, numbers: &[i64]) {
        self.allowed.extend(numbers.iter().map(|number| (*number, Vec::new())));
    }

    /// Adds a system call with arguments that meet all of these conditions.
    pub fn allow_if(&mut self, number: i64, arguments: &[Argument]) {
        let mut is_new = false;
        let conditions = self.allowed.entry(number).or_insert_with(|| {
            is_new = true;
            Vec::new()
        });
        // An empty list allows any arguments already.
        if is_new || !conditions.is_empty() {
            conditions.push(arguments.to_vec());
        }
    }

    /// Lets the filter begin with requests of `ioctl` that the thread makes most often, and that the list allows
    /// anyway. A kernel without a compiler for filters interprets them, and then each comparison counts.
    pub fn try_first(&mut self, requests: &[u32]) {
        self.first.extend(requests);
    }

    /// Makes this kernel seem not to have a system call, so that the C library uses an older one.
    pub fn deny(&mut self, number: i64) {
        self.denied.push(number);
        self.allow(&[number]);
    }

    /// Returns true if the list has a system call, with whatever arguments.
    #[cfg(test)]
    pub fn has(&self, number: i64) -> bool {
        self.allowed.contains_key(&number)
    }

    /// Returns true if a thread may make a system call with these arguments.
    #[cfg(test)]
    pub fn allows(&self, call: i64, arguments: &[u32]) -> bool {
        let program = self.compile(Mode::On).expect("it fits a filter").allowed;
        tests::decide(&program, tests::data(call, arguments)).0 == libc::SECCOMP_RET_ALLOW
    }

    /// Returns true if a thread may make a system call whose argument of this number also has 1 in its upper
    /// half.
    #[cfg(test)]
    pub fn allows_upper(&self, call: i64, arguments: &[u32], number: usize) -> bool {
        let program = self.compile(Mode::On).expect("it fits a filter").allowed;
        let mut data = tests::data(call, arguments);
        data[4 + 2 * number + 1] = 1;
        tests::decide(&program, data).0 == libc::SECCOMP_RET_ALLOW
    }

    /// Compiles the filter of what is denied, if anything is. Of two filters, the stricter one decides.
    fn compile_denied(&self) -> Result<Option<BpfProgram>, FilterError> {
        if self.denied.is_empty() {
            return Ok(None);
        }
        let rules = self.denied.iter().map(|number| (*number, Vec::new())).collect();
        let denies = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, denies, TargetArch::try_from(ARCH)?)?;
        Ok(Some(filter.try_into()?))
    }

    /// Compiles the filters of the list.
    pub fn compile(&self, mode: Mode) -> Result<Filters, FilterError> {
        Ok(Filters { denied: self.compile_denied()?, allowed: self.compile_allowed(mode)? })
    }

    fn compile_allowed(&self, mode: Mode) -> Result<BpfProgram, FilterError> {
        let otherwise = match mode {
            Mode::Log => SeccompAction::Log,
            Mode::On | Mode::Off => SeccompAction::Trap,
        };
        let rule = |arguments: &Vec<Argument>| {
            SeccompRule::new(arguments.iter().map(Argument::condition).collect::<Result<_, _>>()?)
        };
        let rules = self.allowed.iter().map(|(number, alternatives)| {
            Ok((*number, alternatives.iter().map(rule).collect::<Result<_, _>>()?))
        });
        let rules: BTreeMap<i64, Vec<SeccompRule>> =
            rules.collect::<Result<_, seccompiler::BackendError>>()?;
        let filter = SeccompFilter::new(rules, otherwise, SeccompAction::Allow, TargetArch::try_from(ARCH)?)?;
        let list: BpfProgram = filter.try_into()?;
        Ok(if self.first.is_empty() { list } else { [requests_that_come_first(&self.first), list].concat() })
    }
}

/// Returns the beginning of a program: it allows these requests, and goes on behind itself with everything else.
fn requests_that_come_first(requests: &[u32]) -> BpfProgram {
    /// Offsets of `struct seccomp_data`: the lower halves of the call's second argument, of its number, and what
    /// architecture's number that is.
    const REQUEST: u32 = 24;
    const NUMBER: u32 = 0;
    const ARCHITECTURE: u32 = 4;
    let load = |offset| bpf(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, [0, 0]);
    let if_equal =
        |value, then, otherwise| bpf(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, [then, otherwise]);
    let number = u8::try_from(requests.len()).expect("a handful");
    let mut program = vec![
        load(ARCHITECTURE),
        if_equal(AUDIT_ARCH, 0, number + 5),
        load(NUMBER),
        if_equal(u32::try_from(libc::SYS_ioctl).expect("a small number"), 0, number + 3),
        load(REQUEST),
    ];
    program.extend((0..).zip(requests).map(|(before, request)| if_equal(*request, number - before, 0)));
    program.push(bpf(libc::BPF_JMP | libc::BPF_JA, 1, [0, 0]));
    program.push(bpf(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, [0, 0]));
    program
}

fn bpf(code: u32, k: u32, [jt, jf]: [u8; 2]) -> sock_filter {
    sock_filter { code: u16::try_from(code).expect("codes have 16 bits"), jt, jf, k }
}

impl Argument {
    fn condition(&self) -> Result<SeccompCondition, seccompiler::BackendError> {
        use SeccompCmpArgLen::{Dword, Qword};
        let (size, operator, value) = match self.is {
            Is::Equal(value) => (Dword, SeccompCmpOp::Eq, value),
            Is::With(bits) => (Dword, SeccompCmpOp::MaskedEq(bits.into()), bits),
            Is::Without(bits) => (Dword, SeccompCmpOp::MaskedEq(bits.into()), 0),
            Is::Null => (Qword, SeccompCmpOp::Eq, 0),
        };
        SeccompCondition::new(self.number, size, operator, value.into())
    }
}

/// Checks that this kernel has filters, and that this process may install them.
pub fn check() -> Result<(), FilterError> {
    let action = libc::SECCOMP_RET_TRAP;
    // SAFETY: the pointer is to a variable of this function, which the kernel only reads.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) };
    if result == 0 { Ok(()) } else { Err(seccompiler::Error::Seccomp(io::Error::last_os_error()).into()) }
}

/// The compiled filters of a list.
pub struct Filters {
    denied: Option<BpfProgram>,
    allowed: BpfProgram,
}

impl Filters {
    /// Restricts this thread to the list.
    pub fn apply(&self) -> Result<(), FilterError> {
        if let Some(denied) = &self.denied {
            apply_filter(denied)?;
        }
        Ok(apply_filter(&self.allowed)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program for a system call as the kernel would. Returns the action, and the number of its instructions.
    pub fn decide(program: &[sock_filter], data: [u32; 16]) -> (u32, usize) {
        let (mut at, mut value) = (0, 0);
        for taken in 1.. {
            let sock_filter { code, jt, jf, k } = program[at];
            let jump = |met| usize::from(if met { jt } else { jf });
            at += 1 + match u32::from(code) {
                0x20 => {
                    value = data[k as usize / 4];
                    0
                }
                0x54 => {
                    value &= k;
                    0
                }
                0x05 => k as usize,
                0x15 => jump(value == k),
                0x06 => return (k, taken),
                code => panic!("unknown code {code:#x}"),
            };
        }
        unreachable!()
    }

    #[test]
    fn what_a_vcpus_thread_asks_most_often_is_what_its_list_allows() {
        let mut calls = crate::sandbox::calls::of(crate::sandbox::Thread::Vcpu, &[]);
        let first = std::mem::take(&mut calls.first);
        let list = calls.compile(Mode::On).unwrap().allowed;
        assert!(!first.is_empty());
        for request in first {
            assert_eq!(decide(&list, ioctl(request)).0, libc::SECCOMP_RET_ALLOW, "{request:#x}");
        }
    }

    fn ioctl(request: u32) -> [u32; 16] {
        data(libc::SYS_ioctl, &[0, request])
    }

    /// Returns `struct seccomp_data` of a call with these arguments.
    pub fn data(call: i64, arguments: &[u32]) -> [u32; 16] {
        let mut data = [0; 16];
        [data[0], data[1]] = [u32::try_from(call).unwrap(), AUDIT_ARCH];
        for (lower, argument) in data[4..].iter_mut().step_by(2).zip(arguments) {
            *lower = *argument;
        }
        data
    }

    #[test]
    fn a_request_that_comes_first_takes_few_instructions_and_changes_nothing_else() {
        let mut calls = Calls::default();
        calls.allow_if(libc::SYS_ioctl, &[Argument { number: 1, is: Is::Equal(9) }]);
        calls.allow_if(libc::SYS_mmap, &[Argument { number: 2, is: Is::Without(4) }]);
        let plain = calls.compile(Mode::On).unwrap().allowed;
        calls.try_first(&[3, 5, 7]);
        let program = calls.compile(Mode::On).unwrap().allowed;
        for (request, taken) in [(3, 7), (5, 8), (7, 9)] {
            assert_eq!(decide(&program, ioctl(request)), (libc::SECCOMP_RET_ALLOW, taken));
            assert_eq!(decide(&plain, ioctl(request)).0, libc::SECCOMP_RET_TRAP);
        }
        let other_architecture = ioctl(3).map(|word| if word == AUDIT_ARCH { 1 } else { word });
        let mut other_call = ioctl(3);
        other_call[0] += 1;
        let mut upper_half = ioctl(9);
        upper_half[6] |= 1 << 16;
        for data in [ioctl(9), ioctl(8), upper_half, other_architecture, other_call] {
            assert_eq!(decide(&program, data).0, decide(&plain, data).0, "{data:x?}");
        }
    }
}
