// Two functions with frame pointers that execute 70 and 30 percent of the instructions. A round is 1000 instructions:
// 700 in `seventy`, and 300 in `thirty`, which calls it. There are 100,001 rounds and 10 more instructions: 100,001,010
// in all. With a period of 100,001 every sample is one instruction further in the round, so the samples hit each
// instruction exactly once.

    .globl _start
    .text
    .type _start, @function
_start:
    xor %ebp, %ebp              // 1: the outermost frame
    call thirty                 // 2
    mov $60, %eax               // 8-10: exit(0)
    xor %edi, %edi
    syscall
    .size _start, . - _start

    .type thirty, @function
thirty:
    push %rbp                   // 3
    mov %rsp, %rbp              // 4
    mov $100001, %ecx           // 5
1:  call seventy
    .rept 297
    nop
    .endr
    dec %ecx
    jnz 1b
    pop %rbp                    // 6
    ret                         // 7
    .size thirty, . - thirty

    .type seventy, @function
seventy:
    push %rbp
    mov %rsp, %rbp
    .rept 696
    nop
    .endr
    pop %rbp
    ret
    .size seventy, . - seventy

    .section .note.GNU-stack, "", @progbits
