// A firmware image that is the whole guest. It executes instructions of many lengths that the hypervisor intercepts,
// and software interrupts whose delivery faults on a missing page of the stack. After each of them, the guest must
// continue at the next instruction, where it counts a step. It ends the machine by writing the number of steps to port
// 0xf4. (APM volume 2, sections 15.7.1 and 15.20.)

    .code16
    .text
    .globl _start
_start:
    cli
    cld
    ljmp $0xf000, $linked       // a code segment to which an interrupt's handler can return

    .macro step bytes:vararg
    .byte \bytes
    inc %di
    .endm

linked:
    xor %di, %di                // steps
    xor %si, %si                // handlers entered

    xor %eax, %eax
    step 0x0f, 0xa2             // CPUID
    xor %eax, %eax
    step 0x66, 0x0f, 0xa2
    xor %eax, %eax
    step 0xf2, 0x3e, 0x67, 0x0f, 0xa2
    xor %eax, %eax              // the maximum length of an instruction
    step 0x26, 0x26, 0x26, 0x26, 0x36, 0x36, 0x36, 0x36, 0x64, 0x65, 0x66, 0x67, 0x3e, 0x0f, 0xa2

    mov $0x277, %ecx            // the page attribute table
    step 0x0f, 0x32             // RDMSR
    step 0x0f, 0x30             // WRMSR
    step 0x66, 0x0f, 0x32
    step 0x66, 0x67, 0x0f, 0x30
    step 0x2e, 0x66, 0x67, 0x0f, 0x32

    step 0x0f, 0x09             // WBINVD
    step 0x3e, 0x0f, 0x09

    // The interrupts 3, 4 and 0x80. This page of memory is touched before any interrupt.
    xor %ax, %ax
    mov %ax, %ds
    .irp vector, 3, 4, 0x80
    movw $handler, 4 * \vector
    movw %cs, 4 * \vector + 2
    .endr

    .macro interrupt stack, bytes:vararg
    mov $\stack, %ax            // pages that nothing has touched
    mov %ax, %ss
    mov $0x800, %sp
    mov $0x7f, %al
    inc %al                     // sets the overflow flag
    step \bytes
    .endm

    interrupt 0x2000, 0xcc      // INT3
    interrupt 0x3000, 0xce      // INTO
    interrupt 0x4000, 0xcd, 0x80
    interrupt 0x5000, 0x3e, 0x66, 0xcd, 0x80

end:
    mov %di, %ax
    out %al, $0xf4
1:  jmp 1b

handler:
    inc %si
    cmp $4, %si                 // ends a guest whose interrupts return to the same instruction
    ja end
    iret

    .org 0xfff0                 // the reset vector
    jmp _start
    .org 0x10000
