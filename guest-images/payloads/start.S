// Entry of the multiboot payload: descriptor tables, a stack, and the interrupt stubs that C cannot write.
// (Multiboot Specification 0.6.96; Intel SDM volume 3, sections 6.12 and 9.9 for the tables.)

    .set MAGIC, 0x1badb002
    .set FLAGS, 0x3                     // modules on page boundaries; tell us about memory
    .section .multiboot, "a"
    .balign 4
    .long MAGIC, FLAGS, -(MAGIC + FLAGS)

    .text
    .globl _start
_start:
    cli
    mov $stack_top, %esp
    lgdt gdt_pointer
    ljmp $0x08, $1f
1:  mov $0x10, %ecx
    mov %ecx, %ds
    mov %ecx, %es
    mov %ecx, %ss
    mov %ecx, %fs
    mov %ecx, %gs
    push %ebx
    push %eax
    call payload_main
2:  hlt
    jmp 2b

    // `iret`, which KVMs that interpret instructions do not know in protected mode.
    .macro return_from_interrupt
    pushl 8(%esp)                       // EFLAGS, above EIP and CS
    popf
    lret $4
    .endm

// Exceptions leave their vector, and the address to continue at is looked up in C.
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

// Instructions that may fault: each has a second way out, which exception() continues at.
    .globl try_rdmsr, try_rdmsr_fault
try_rdmsr:                              // (index, uint32_t value[2]) -> 1 if it worked
    push %ebx
    mov 8(%esp), %ecx
    mov 12(%esp), %ebx
    .globl rdmsr_at
rdmsr_at:
    rdmsr
    jmp store
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

// Copied to 0x8000: where the other processors start, in real mode.
    .code16
    .globl trampoline, trampoline_end
trampoline:
    cli
    xor %ax, %ax
    mov %ax, %ds
    lock incw 0x7ff0
1:  hlt
    jmp 1b
trampoline_end:
    .code32

    .data
    .balign 8
gdt:
    .quad 0
    .quad 0x00cf9b000000ffff            // code, 0 to 4 GiB
    .quad 0x00cf93000000ffff            // data, 0 to 4 GiB
gdt_pointer:
    .word . - gdt - 1
    .long gdt

    .bss
    .balign 16
    .skip 16384
stack_top:
    .section .note.GNU-stack, "", @progbits
