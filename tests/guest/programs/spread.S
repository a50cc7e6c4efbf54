// Loops on all CPUs at once, of a different length on each. Process n of 15 moves from CPU 0 to CPU n, and executes
// 20,000 * n + 4 instructions there. Must be started on CPU 0.

    .globl _start
    .text
_start:
    mov $15, %ebx
1:  mov $57, %eax               // fork()
    syscall
    test %eax, %eax
    jz child
    dec %ebx
    jnz 1b
2:  mov $61, %eax               // wait4(-1, NULL, 0, NULL), until no child is left
    mov $-1, %rdi
    xor %esi, %esi
    xor %edx, %edx
    xor %r10d, %r10d
    syscall
    test %eax, %eax
    jns 2b
    jmp done

child:
    mov %ebx, %ecx
    mov $1, %eax
    shl %cl, %eax
    mov %rax, mask(%rip)
    mov $203, %eax              // sched_setaffinity(0, 8, &mask)
    xor %edi, %edi
    mov $8, %esi
    lea mask(%rip), %rdx
    syscall
    imul $10000, %ebx, %ecx
1:  dec %ecx
    jnz 1b
done:
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall

    .bss
    .balign 8
mask: .skip 8
    .section .note.GNU-stack, "", @progbits
