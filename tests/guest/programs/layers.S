// Two functions that share the work 3 to 1, with frame pointers, and system calls between them: what a flame graph shows
// is known. In each of 1000 rounds `heavy` executes 150,005 instructions and `light` 50,005; `ask` makes 20 system calls
// that fill memory with random bytes, which takes the kernel about as long.

    .globl _start
    .text
    .type _start, @function
_start:
    xor %ebp, %ebp              // the outermost frame
    call rounds
    mov $60, %eax               // exit(0)
    xor %edi, %edi
    syscall
    .size _start, . - _start

    .type rounds, @function
rounds:
    push %rbp
    mov %rsp, %rbp
    mov $1000, %ebx
1:  call heavy
    call light
    call ask
    dec %ebx
    jnz 1b
    pop %rbp
    ret
    .size rounds, . - rounds

    .type heavy, @function
heavy:
    push %rbp
    mov %rsp, %rbp
    mov $75000, %ecx
1:  dec %ecx
    jnz 1b
    pop %rbp
    ret
    .size heavy, . - heavy

    .type light, @function
light:
    push %rbp
    mov %rsp, %rbp
    mov $25000, %ecx
1:  dec %ecx
    jnz 1b
    pop %rbp
    ret
    .size light, . - light

    .type ask, @function
ask:
    push %rbp
    mov %rsp, %rbp
    mov $20, %r12d
1:  mov $318, %eax              // getrandom(&bytes, 256, 0)
    mov $bytes, %edi
    mov $256, %esi
    xor %edx, %edx
    syscall
    dec %r12d
    jnz 1b
    pop %rbp
    ret
    .size ask, . - ask

    .bss
bytes:
    .skip 256
    .section .note.GNU-stack, "", @progbits
