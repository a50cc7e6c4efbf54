//! Restricts a thread to a list of system calls, by seccomp.

use std::collections::BTreeMap;
use std::env::consts::ARCH;
use std::io;
use std::sync::Arc;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};

use super::Mode;

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
    /// What it has to be.
    pub is: Is,
}

/// What an argument of 32 bits has to be.
#[derive(Debug, Clone, Copy)]
pub enum Is {
    /// This value.
    Equal(u32),
    /// Any value with all of these bits.
    With(u32),
    /// Any value without these bits.
    Without(u32),
    /// A value whose lower 16 bits are these: an `ioctl` request, whatever the size of its structure.
    Request(u16),
}

/// A list of system calls.
#[derive(Debug, Default)]
pub struct Calls {
    /// Alternatives of conditions; an empty list allows any arguments.
    allowed: BTreeMap<i64, Vec<Vec<Argument>>>,
    /// Calls for which the thread is told that this kernel does not have them.
    denied: Vec<i64>,
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

    /// Compiles the filter of what is allowed.
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
        Ok(filter.try_into()?)
    }
}

impl Argument {
    fn condition(&self) -> Result<SeccompCondition, seccompiler::BackendError> {
        let (operator, value) = match self.is {
            Is::Equal(value) => (SeccompCmpOp::Eq, value),
            Is::With(bits) => (SeccompCmpOp::MaskedEq(bits.into()), bits),
            Is::Without(bits) => (SeccompCmpOp::MaskedEq(bits.into()), 0),
            Is::Request(request) => (SeccompCmpOp::MaskedEq(u16::MAX.into()), request.into()),
        };
        SeccompCondition::new(self.number, SeccompCmpArgLen::Dword, operator, value.into())
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
