/*
 * An option ROM that starts the kernel which is in memory already, in place of
 * the BIOS's boot from a disk. See src/machine/bochs/kernel.rs, which has put it there.
 */
    .code16
    .globl _start
_start:
    .byte 0x55, 0xaa, 1     /* signature, length in blocks of 512 bytes */
    jmp init

init:                       /* called by the BIOS: takes INT 19h, "boot" */
    push %ds
    push %ax
    xor %ax, %ax
    mov %ax, %ds
    movw $boot, 4 * 0x19
    movw %cs, 4 * 0x19 + 2
    pop %ax
    pop %ds
    lret

boot:                       /* Linux, Documentation/arch/x86/boot.rst, "Running the kernel" */
    cli
    mov $0x1000, %ax
    mov %ax, %ds
    mov %ax, %es
    mov %ax, %fs
    mov %ax, %gs
    mov %ax, %ss
    mov $0xe000, %sp
    ljmp $0x1020, $0

    .org 511                /* src/machine/bochs/kernel.rs sets the checksum here */
    .byte 0
