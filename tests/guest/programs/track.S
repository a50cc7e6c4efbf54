// A loop of 9973 instructions, a prime number, each at an address of its own: where a sample was taken says how far the
// program had come, modulo 9973. All but the last two are one byte long. It goes round 100,271 times, and there are 4
// more instructions around it: 1,000,002,687 in all.

    .globl _start
    .text
_start:
    mov $100271, %ecx
track:
    .rept 9971
    nop
    .endr
    dec %ecx
    jnz track
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall
    .section .note.GNU-stack, "", @progbits
