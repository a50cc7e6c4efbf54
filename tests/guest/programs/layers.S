// Three functions with frame pointers that are called one after the other, for a flame graph with known contents.
// `heavy` executes 150 million instructions and `light` 50 million. `ask` makes 20,000 system calls that fill memory
// with random bytes, which takes the kernel about as long. Each function is called only once, so its share of the
// samples cannot depend on a common period of calls and sampling clock.

    .globl _start
    .text
    .type _start, @function
_start:
    xor %ebp, %ebp              // the outermost frame
    call work
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall
    .size _start, . - _start

    .type work, @function
work:
    push %rbp
    mov %rsp, %rbp
    call heavy
    call light
    call ask
    pop %rbp
    ret
    .size work, . - work

    .type heavy, @function
heavy:
    push %rbp
    mov %rsp, %rbp
    mov $75000000, %ecx
1:  dec %ecx
    jnz 1b
    pop %rbp
    ret
    .size heavy, . - heavy

    .type light, @function
light:
    push %rbp
    mov %rsp, %rbp
    mov $25000000, %ecx
1:  dec %ecx
    jnz 1b
    pop %rbp
    ret
    .size light, . - light

    .type ask, @function
ask:
    push %rbp
    mov %rsp, %rbp
    mov $20000, %ebx
1:  mov $318, %eax              // getrandom(&bytes, 256, 0)
    mov $bytes, %edi
    mov $256, %esi
    xor %edx, %edx
    syscall
    dec %ebx
    jnz 1b
    pop %rbp
    ret
    .size ask, . - ask

    .bss
bytes:
    .skip 256
    .section .note.GNU-stack, "", @progbits
