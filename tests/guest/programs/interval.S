// A loop between two pauses. An observer can attach during the first pause and detach during the second. The program
// prints `ready` before the first pause and `done` before the second. From one pause to the other it executes
// 100,000,010 instructions, 50,000,002 of them branches (a system call counts as one).

    .macro say text, length
    mov $1, %eax                // write(1, text, length)
    mov $1, %edi
    lea \text(%rip), %rsi
    mov $\length, %edx
    syscall
    .endm
    .macro pause_for_seconds
    mov $35, %eax               // nanosleep(&seconds, NULL)
    lea seconds(%rip), %rdi
    xor %esi, %esi
    syscall
    .endm

    .globl _start
    .text
_start:
    say ready, 6                // 5
    pause_for_seconds           // 4, the last of which pauses
    mov $50000000, %ecx
1:  dec %ecx
    jnz 1b
    say done, 5
    pause_for_seconds
    mov $60, %eax               // 3: exit(0)
    xor %edi, %edi
    syscall

    .data
ready: .ascii "ready\n"
done: .ascii "done\n"
    .balign 8
seconds: .quad 2, 0
    .section .note.GNU-stack, "", @progbits
