// A parent and a child, which executes another program: 60,000,023 instructions and those of `./loop`. The parent
// executes 20,000,001 before the fork and 20,000,014 after it, the child 20,000,008 until it executes `./loop`.

    .macro spin                 // 20,000,001 instructions
    mov $10000000, %ecx
1:  dec %ecx
    jnz 1b
    .endm

    .globl _start
    .text
_start:
    spin
    mov $57, %eax               // fork()
    syscall
    test %eax, %eax             // once in the parent, once in the child
    jz child
    mov $61, %eax               // wait4(-1, NULL, 0, NULL)
    mov $-1, %rdi
    xor %esi, %esi
    xor %edx, %edx
    xor %r10d, %r10d
    syscall
    spin
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall
child:
    spin
    mov $59, %eax               // execve("./loop", {"./loop", NULL}, NULL)
    lea program(%rip), %rdi
    lea arguments(%rip), %rsi
    xor %edx, %edx
    syscall
    ud2

    .data
program: .asciz "./loop"
    .balign 8
arguments: .quad program, 0
    .section .note.GNU-stack, "", @progbits
