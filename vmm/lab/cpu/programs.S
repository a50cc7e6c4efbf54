/*
 * Programs with known counts.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 *   cc -nostdlib -static -Wl,--build-id=none -DPROGRAM_loop -DN=10000000 \
 *      -o loop programs.S
 *
 * They use no C library, so every user-mode instruction is in this file. They
 * end with the system call exit (three instructions, one branch). README.md
 * lists the counts of each; the numbers beside the code are for one round.
 */
    .globl _start
    .text
_start:

#ifdef PROGRAM_loop     /* instructions 2N+4, branches N+1, conditional N */
    mov $N, %ecx
1:  dec %ecx
    jnz 1b
#endif

#ifdef PROGRAM_rep      /* 12 instructions for any N and any number of faults */
    mov $N, %ecx
    lea buf(%rip), %rdi
    rep stosb           /* N rounds, a page fault for each page */
    mov $0, %ecx
    rep stosb           /* no round */
    mov $4096, %ecx
    lea buf(%rip), %rdi
    xor %eax, %eax
    repe scasb          /* 4096 rounds */
#endif

#ifdef PROGRAM_fault    /* N page faults: 4N+5 instructions, N+1 branches */
    mov $N, %ecx
    lea buf(%rip), %rdi
1:  movb $1, (%rdi)
    lea 4096(%rdi), %rdi
    dec %ecx
    jnz 1b
#endif

#ifdef PROGRAM_ud       /* N times #UD and its signal handler: 6N+10 and 3N+2 */
    mov $13, %eax       /* rt_sigaction(SIGILL, &action, NULL, 8) */
    mov $4, %edi
    lea action(%rip), %rsi
    xor %edx, %edx
    mov $8, %r10d
    syscall
    mov $N, %ebx
1:  ud2                 /* never retires */
    dec %ebx
    jnz 1b
#endif

#ifdef PROGRAM_call     /* 8N+6 instructions, 7N+1 branches, 3 mispredicted */
    mov $N, %ebx
    lea f(%rip), %rax
    lea g(%rip), %rdx
1:  call f
    call *%rax
    jmp *%rdx
g:  jmp 2f
2:  dec %ebx
    jnz 1b
#endif

#ifdef PROGRAM_alternate /* a branch taken every other time: N/2+1 mispredicted */
    mov $N, %ecx
1:  test $1, %cl
    jz 2f
2:  dec %ecx
    jnz 1b
#endif

#ifdef PROGRAM_never    /* a branch never taken: 2 mispredicted */
    mov $N, %ecx
1:  test %ecx, %ecx
    jz 2f
2:  dec %ecx
    jnz 1b
#endif

#ifdef PROGRAM_stream   /* reads 1 MiB N times: every line misses both caches */
    mov $N, %ebx
2:  lea buf(%rip), %rdi
    mov $16384, %ecx
1:  mov (%rdi), %rax
    add $64, %rdi
    dec %ecx
    jnz 1b
    dec %ebx
    jnz 2b
#endif

#ifdef PROGRAM_small    /* writes 16 KiB N times: 256 misses, then hits */
    mov $N, %ebx
2:  lea buf(%rip), %rdi
    mov $256, %ecx
1:  mov %rax, (%rdi)
    add $64, %rdi
    dec %ecx
    jnz 1b
    dec %ebx
    jnz 2b
#endif

#ifdef PROGRAM_operands /* every kind of operand: 16 accesses, in 5 lines */
    lea buf(%rip), %rdi
    mov $N, %ecx
1:  mov 1(%rdi), %rax       /* 1, misaligned */
    mov %rax, 3(%rdi)       /* 1 */
    mov 60(%rdi), %rax      /* 2, across a line */
    mov %rax, 60(%rdi)      /* 2 */
    mov %rax, 4092(%rdi)    /* 2, across a page */
    addl $1, (%rdi)         /* 2, read and write */
    lock incl (%rdi)        /* 2 */
    push %rax               /* 1 */
    pop %rax                /* 1 */
    lea buf(%rip), %rsi
    movsb                   /* 2 */
    dec %rdi
    dec %rsi
    lea buf(%rip), %rsi
    dec %ecx
    jnz 1b
#endif

    mov $60, %eax       /* exit(0) */
    xor %edi, %edi
    syscall

#ifdef PROGRAM_ud
handler:
    addq $2, 168(%rdx)  /* RIP in the ucontext: step over the UD2 */
    ret
restorer:
    mov $15, %eax       /* rt_sigreturn */
    syscall
    .data
action: .quad handler, 0x04000004, restorer, 0  /* SA_SIGINFO | SA_RESTORER */
    .text
#endif
f:  ret

    .bss
    .balign 4096
buf: .skip 64 * 1024 * 1024

    .section .note.GNU-stack, "", @progbits
