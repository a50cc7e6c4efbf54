// 100,000 system calls whose kernel code runs mostly with interrupts off. In user mode these are 400,004 instructions.

    .globl _start
    .text
_start:
    mov $100000, %ebx
1:  mov $24, %eax               // sched_yield()
    syscall
    dec %ebx
    jnz 1b
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall
    .section .note.GNU-stack, "", @progbits
