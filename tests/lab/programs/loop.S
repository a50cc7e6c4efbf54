// A loop of 100 million times two instructions, and four more: 200,000,004 in all, of which 100,000,000 are branches
// (99,999,999 of them taken).

    .globl _start
_start:
    mov $100000000, %ecx
1:  dec %ecx
    jnz 1b
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall
    .section .note.GNU-stack, "", @progbits
