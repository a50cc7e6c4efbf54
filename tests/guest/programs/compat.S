// Executes SYSCALL in compatibility mode, as 32-bit programs may on AMD's processors if their kernel has set up its
// entry point (CSTAR). Intel's processors do not support SYSCALL in this mode.

    .globl _start
    .text
_start:
    ljmp *narrow_pointer(%rip)
    .code32
narrow:
    mov $20, %eax               // getpid
    syscall
    ljmp $0x33, $after          // Linux's code segment of 64-bit programs
    .code64
after:
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall
narrow_pointer:
    .long narrow
    .word 0x23                  // Linux's code segment of 32-bit programs
    .section .note.GNU-stack, "", @progbits
