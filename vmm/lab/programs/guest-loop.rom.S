// A firmware image that is the whole guest. It enters user mode and executes exactly 100,000,002 instructions there: a
// loop of 50 million rounds of two instructions, and two more. It ends the machine by writing to port 0xf4; the host
// emulates this OUT, so it does not count as the guest's. (APM volume 2, sections 4.7 for the descriptors and 14.1 for
// the state at reset.)

    .code16
    .text
    .globl _start
_start:
    cli
    lgdtl %cs:gdt_pointer
    mov $1, %eax                // protected mode
    mov %eax, %cr0
    ljmpl $0x08, $protected
    .code32
protected:
    mov $0x10, %ecx
    mov %ecx, %ss
    mov $0x8000, %esp
    push $0x23                  // SS, and a stack pointer that is not used
    push $0x7000
    push $0x3002                // EFLAGS: I/O is allowed at every level
    push $0x1b
    push $user
    iret
user:
    mov $50000000, %ecx
1:  dec %ecx
    jnz 1b
    mov $0, %al
    out %al, $0xf4
2:  jmp 2b

    .balign 8
gdt:
    .quad 0
    .quad 0xff409bff0000ffff    // 0x08: code at 0xffff0000, where this image is
    .quad 0x00cf93000000ffff    // 0x10: data, all of memory
    .quad 0xff40fbff0000ffff    // 0x18: as 0x08, for user mode
    .quad 0x00cff3000000ffff    // 0x20: as 0x10, for user mode
gdt_pointer:
    .word . - gdt - 1
    .long gdt + 0xffff0000

    .org 0xfff0                 // the reset vector
    .code16
    jmp _start
    .org 0x10000
