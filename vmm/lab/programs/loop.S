// A loop of 100 million rounds of two instructions, and four more: 200,000,004 instructions in all. 100,000,000 of them
// are conditional branches, of which 99,999,999 are taken.

    .globl _start
_start:
    mov $100000000, %ecx
1:  dec %ecx
    jnz 1b
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall
    .section .note.GNU-stack, "", @progbits
