// Entry of the multiboot payload: descriptor tables, stacks and interrupt stubs.
// (Multiboot Specification 0.6.96; Intel SDM volume 3, sections 6.12 and 9.9 for the tables.)

#include "segments.h"

    .set MAGIC, 0x1badb002
    .set FLAGS, 0x3                     // page-aligned modules, and memory information
    .section .multiboot, "a"
    .balign 4
    .long MAGIC, FLAGS, -(MAGIC + FLAGS)

    // The kernel uses the user's data segments, except for the stack, so that interrupt stubs need not switch them.
    .macro load_data_segments
    mov $KERNEL_DATA, %ecx
    mov %ecx, %ss
    mov $USER_DATA, %ecx
    mov %ecx, %ds
    mov %ecx, %es
    mov %ecx, %fs
    mov %ecx, %gs
    .endm

    .text
    .globl _start
_start:
    cli
    mov $stacks + STACK_SIZE, %esp
    lgdt gdt_pointer
    ljmp $KERNEL_CODE, $1f
1:  load_data_segments
    push %ebx
    push %eax
    call payload_main
rest:
    hlt
    jmp rest

    // Replaces `iret`, which KVM's instruction emulator does not support in protected mode.
    .macro return_from_interrupt
    pushl 8(%esp)                       // EFLAGS, above EIP and CS
    popf
    lret $4
    .endm

// Exception stubs. exception() returns the address to continue at.
    .macro exception vector, has_code
    .globl exception_\vector
exception_\vector:
    .if \has_code == 0
    push $0
    .endif
    pusha
    push $\vector
    call exception
    add $4, %esp
    mov %eax, 36(%esp)                  // where to continue
    popa
    add $4, %esp
    return_from_interrupt
    .endm
    exception 6, 0
    exception 13, 1
    exception 14, 1

    .macro interrupt name
    .globl interrupt_\name
interrupt_\name:
    pusha
    call \name
    popa
    return_from_interrupt
    .endm
    interrupt on_timer
    interrupt on_serial
    interrupt on_work

// PMU interrupts also arrive in user mode, and the next one may be pending already. Only `iret` returns to user mode
// and enables interrupts and NMIs in one step. The handler gets the interrupted context.
    .macro pmu_interrupt name
    .globl interrupt_\name
interrupt_\name:
    pusha
    push %esp
    call \name
    add $4, %esp
    popa
    iret
    .endm
    pmu_interrupt on_nmi
    pmu_interrupt on_performance_interrupt

// Copied to 0x8000, where the other processors start in real mode.
    .code16
    .globl trampoline, trampoline_end
trampoline:
    cli
    xor %ax, %ax
    mov %ax, %ds
    lgdtl 0x8000 + trampoline_gdt - trampoline
    mov %cr0, %eax
    or $1, %al
    mov %eax, %cr0
    ljmpl $KERNEL_CODE, $processor_start
trampoline_gdt:
    .word gdt_end - gdt - 1
    .long gdt
trampoline_end:
    .code32

processor_start:
    load_data_segments
    mov $1, %eax
    lock xadd %eax, numbers_taken
    cmp $PROCESSORS, %eax
    jae rest
    mov %eax, %esp
    inc %esp
    imul $STACK_SIZE, %esp
    add $stacks, %esp
    push %eax
    call processor_main

    .data
    .balign 8
    .globl gdt, gdt_end
gdt:
    .quad 0
    .quad 0x00cf9b000000ffff            // the kernel's code and data, 0 to 4 GiB
    .quad 0x00cf93000000ffff
    .quad 0x00cffb000000ffff            // the user's
    .quad 0x00cff3000000ffff
    .skip 8 * PROCESSORS                // task state segments, which hold the stacks for interrupts from user mode
gdt_end:
gdt_pointer:
    .word gdt_end - gdt - 1
    .long gdt
numbers_taken:
    .long 1

    .bss
    .balign 16
stacks:
    .skip STACK_SIZE * PROCESSORS
    .section .note.GNU-stack, "", @progbits
