// A Linux program of exactly 20,000,004 instructions, of which 10,000,001 are branches, to check counters with.
// It is statically linked and uses no library, because it is part of every guest.

    .globl _start
    .text
_start:
    mov $10000000, %ecx
1:  dec %ecx
    jnz 1b
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall
    .section .note.GNU-stack, "", @progbits
