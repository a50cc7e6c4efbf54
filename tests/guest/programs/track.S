// A loop of 9973 instructions (a prime number), each at an address of its own. The address of a sample tells how many
// instructions the program had executed, modulo 9973. All but the last two are one byte long. The loop has 100,271
// rounds, and there are 4 more instructions around it: 1,000,002,687 in all.

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
