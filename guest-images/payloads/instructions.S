// Instructions that cannot be expressed in C.

#include "segments.h"

    .text
// Instructions that may fault. After a fault, exception() continues at `faulted`, which returns 0.
    .balign 16
    .globl try_rdmsr
try_rdmsr:                              // (index, uint32_t value[2]) -> 1 if it worked
    push %ebx
    mov 8(%esp), %ecx
    mov 12(%esp), %ebx
    .globl rdmsr_at
rdmsr_at:
    rdmsr
    jmp store
    .balign 16
    .globl try_rdpmc
try_rdpmc:
    push %ebx
    mov 8(%esp), %ecx
    mov 12(%esp), %ebx
    .globl rdpmc_at
rdpmc_at:
    rdpmc
store:
    mov %eax, (%ebx)
    mov %edx, 4(%ebx)
    mov $1, %eax
    pop %ebx
    ret
    .balign 16
    .globl try_wrmsr
try_wrmsr:                              // (index, low, high) -> 1 if it worked
    push %ebx
    mov 8(%esp), %ecx
    mov 12(%esp), %eax
    mov 16(%esp), %edx
    .globl wrmsr_at
wrmsr_at:
    wrmsr
    mov $1, %eax
    pop %ebx
    ret
    .globl faulted
faulted:
    xor %eax, %eax
    pop %ebx
    ret

// A loop of exactly 2 instructions per round.
    .balign 16
    .globl loop_here
loop_here:                              // (rounds)
    mov 4(%esp), %ecx
1:  dec %ecx
    jnz 1b
    ret

// A loop of 4 instructions per round in user mode, which keeps the lower half of the time-stamp counter.
    .balign 16
    .globl clock_as_user
clock_as_user:                          // (rounds)
    mov $user_clock, %eax
    jmp run_as_user

// The loop of 2 instructions in user mode. It has no stack of its own. Interrupts use this function's stack, by way of
// the TSS.
    .balign 16
    .globl loop_as_user
loop_as_user:                           // (rounds)
    mov $user_loop, %eax
run_as_user:
    push %ebp
    push %edi
    push %esi
    push %ebx
    mov %eax, %ebx
    call task_stack
    mov 20(%esp), %ecx
    pushf
    mov %esp, (%eax)
    pushl $USER_DATA
    pushl $0
    pushl 8(%esp)                       // EFLAGS, with the current interrupt flag
    pushl $USER_CODE
    push %ebx
    iret
user_clock:
    rdtsc
    mov %eax, user_time
    dec %ecx
    jnz user_clock
    int $VECTOR_USER_DONE
    .globl user_loop
user_loop:
    dec %ecx
    jnz user_loop
    int $VECTOR_USER_DONE
    .globl user_done
user_done:
    add $20, %esp
    popf
    pop %ebx
    pop %esi
    pop %edi
    pop %ebp
    ret
    .section .note.GNU-stack, "", @progbits
