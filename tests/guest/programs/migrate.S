// A program that moves itself to another CPU 1000 times: to CPUs 0, 3, 2, 1, 0 and so on. A round is 20,013
// instructions, 10 of them before it moves and 20,003 after. With 4 more instructions around the rounds these are
// 20,013,004.

    .globl _start
    .text
_start:
    mov $1000, %ebx
next:
    mov %ebx, %ecx
    and $3, %ecx
    mov $1, %eax
    shl %cl, %eax
    mov %rax, mask(%rip)
    mov $203, %eax              // sched_setaffinity(0, 8, &mask)
    xor %edi, %edi
    mov $8, %esi
    lea mask(%rip), %rdx
    syscall
    mov $10000, %ecx
1:  dec %ecx
    jnz 1b
    dec %ebx
    jnz next
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall

    .bss
    .balign 8
mask: .skip 8
    .section .note.GNU-stack, "", @progbits
