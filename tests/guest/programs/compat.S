// Makes a system call as 32-bit programs of AMD's processors may, if their kernel knows where they return to: by SYSCALL in
// compatibility mode. Intel's have none there.

    .globl _start
    .text
_start:
    ljmp *narrow_pointer(%rip)
    .code32
narrow:
    mov $20, %eax               // getpid
    syscall
    ljmp $0x33, $after          // its segment of 64-bit programs
    .code64
after:
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall
narrow_pointer:
    .long narrow
    .word 0x23                  // Linux's code segment of 32-bit programs
    .section .note.GNU-stack, "", @progbits
