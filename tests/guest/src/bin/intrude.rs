//! Makes a thread of a running process make a system call that it never makes by itself, as a guest would that has
//! taken over the thread: `intrude PROCESS THREAD CALL`, with the thread's name and the call's number. Or makes it open
//! a file, `intrude PROCESS THREAD open PATH`, prints the result, and lets the thread go on with what it did.

use std::env;
use std::ffi::c_void;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr;

use libc::{c_uint, pid_t};

fn main() {
    let words: Vec<String> = env::args().skip(1).collect();
    let (process, name, what) = match &words[..] {
        [process, name, call] if call != "open" => {
            (process, name, What::Call(call.parse().expect("a system call's number")))
        }
        [process, name, open, path] if open == "open" => (process, name, What::Open(path)),
        _ => panic!("intrude PROCESS THREAD CALL, or intrude PROCESS THREAD open PATH"),
    };
    let thread = thread_of(process, name).unwrap_or_else(|| panic!("process {process} has no thread {name}"));
    let instruction = system_call_instruction(process).expect("the program makes system calls");
    trace(libc::PTRACE_SEIZE, thread, ptr::null_mut());
    trace(libc::PTRACE_INTERRUPT, thread, ptr::null_mut());
    wait(thread);
    match what {
        What::Call(call) => {
            set_call(thread, instruction, call, [0; 3]);
        }
        What::Open(path) => match open(process, thread, instruction, path) {
            0.. => println!("opened"),
            error => println!("{}", io::Error::from_raw_os_error(i32::try_from(-error).unwrap())),
        },
    }
    trace(libc::PTRACE_DETACH, thread, ptr::null_mut());
}

/// What the thread is made to do.
enum What<'a> {
    Call(u64),
    Open(&'a str),
}

fn wait(thread: pid_t) {
    // SAFETY: a null pointer means that the status is not returned.
    assert_eq!(unsafe { libc::waitpid(thread, ptr::null_mut(), libc::__WALL) }, thread, "it stops");
}

/// Returns the id of the thread with this name.
fn thread_of(process: &str, name: &str) -> Option<pid_t> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).ok()?.filter_map(Result::ok);
    let is_it = |thread: &fs::DirEntry| {
        fs::read_to_string(thread.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
    };
    threads.filter(is_it).find_map(|thread| thread.file_name().to_str()?.parse().ok())
}

/// Returns the address of an instruction in the process's program that makes a system call.
#[cfg(target_arch = "x86_64")]
fn system_call_instruction(process: &str) -> Option<u64> {
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).ok()?;
    let text = maps.lines().find(|line| line.contains("r-xp"))?.split(' ').next()?;
    let (begin, end) = text.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    let (begin, end) = (address(begin)?, address(end)?);
    let mut code = vec![0; usize::try_from(end - begin).ok()?];
    File::open(format!("/proc/{process}/mem")).ok()?.read_exact_at(&mut code, begin).ok()?;
    let offset = code.windows(SYSCALL.len()).position(|bytes| bytes == SYSCALL)?;
    Some(begin + offset as u64)
}

/// Makes the thread's next instruction a system call. Returns the registers that it had.
#[cfg(target_arch = "x86_64")]
fn set_call(thread: pid_t, instruction: u64, call: u64, arguments: [u64; 3]) -> libc::user_regs_struct {
    let before = registers(thread);
    let mut registers = before;
    registers.rip = instruction;
    registers.rax = call;
    [registers.rdi, registers.rsi, registers.rdx] = arguments;
    // No interrupted system call is restarted.
    registers.orig_rax = u64::MAX;
    trace(libc::PTRACE_SETREGS, thread, (&raw mut registers).cast());
    before
}

#[cfg(target_arch = "x86_64")]
fn registers(thread: pid_t) -> libc::user_regs_struct {
    // SAFETY: all-zero is a valid value of the structure.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    trace(libc::PTRACE_GETREGS, thread, (&raw mut registers).cast());
    registers
}

/// Opens a file for reading, and lets the thread have its registers back. Returns the system call's result.
#[cfg(target_arch = "x86_64")]
fn open(process: &str, thread: pid_t, instruction: u64, path: &str) -> i64 {
    // Far below what the thread has on its stack.
    let at = registers(thread).rsp - 8192;
    let memory = File::options().write(true).open(format!("/proc/{process}/mem")).expect("it is traced");
    memory.write_all_at(format!("{path}\0").as_bytes(), at).expect("a stack can be written");
    let here = i64::from(libc::AT_FDCWD).cast_unsigned();
    let call = u64::try_from(libc::SYS_openat).expect("a small number");
    let mut before = set_call(thread, instruction, call, [here, at, 0]);
    trace(libc::PTRACE_SINGLESTEP, thread, ptr::null_mut());
    wait(thread);
    let result = registers(thread).rax.cast_signed();
    trace(libc::PTRACE_SETREGS, thread, (&raw mut before).cast());
    result
}

#[cfg(not(target_arch = "x86_64"))]
fn system_call_instruction(_process: &str) -> Option<u64> {
    None
}

#[cfg(not(target_arch = "x86_64"))]
fn set_call(_thread: pid_t, _instruction: u64, _call: u64, _arguments: [u64; 3]) {}

#[cfg(not(target_arch = "x86_64"))]
fn open(_process: &str, _thread: pid_t, _instruction: u64, _path: &str) -> i64 {
    0
}

fn trace(request: c_uint, thread: pid_t, data: *mut c_void) {
    // SAFETY: `data` is null, or points to the registers that the request reads or writes.
    let result = unsafe { libc::ptrace(request, thread, ptr::null_mut::<c_void>(), data) };
    assert_eq!(result, 0, "ptrace {request:#x}: {}", io::Error::last_os_error());
}
