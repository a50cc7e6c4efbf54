// outb PORT VALUE: writes one byte to an I/O port.
// Debian's kernels for virtual machines have no /dev/port, so the port is opened with ioperm(2).
// It is statically linked and uses no library, because it is part of every guest.

    .globl _start
    .text
_start:
    cmpq $3, (%rsp)
    jne fail
    mov 16(%rsp), %rsi
    call number
    mov %eax, %r12d
    mov 24(%rsp), %rsi
    call number
    mov %eax, %r13d

    mov $173, %eax              // ioperm(port, 1, 1)
    mov %r12d, %edi
    mov $1, %esi
    mov $1, %edx
    syscall
    test %rax, %rax
    jnz fail

    mov %r12d, %edx
    mov %r13d, %eax
    outb %al, %dx
    xor %edi, %edi
    jmp exit
fail:
    mov $1, %edi
exit:
    mov $60, %eax
    syscall

// Parses the string at RSI, a decimal number or a hexadecimal one after 0x, into EAX.
number:
    xor %eax, %eax
    mov $10, %ecx
    cmpw $0x7830, (%rsi)        // "0x"
    jne digit
    mov $16, %ecx
    add $2, %rsi
digit:
    movzbl (%rsi), %edx
    inc %rsi
    test %edx, %edx
    jz done
    sub $'0', %edx
    cmp $10, %edx
    jb add
    or $0x20, %edx              // a letter, lower case, with '0' taken off: 'a' - '0' is 0x31
    sub $0x27, %edx
add:
    imul %ecx, %eax
    add %edx, %eax
    jmp digit
done:
    ret
    .section .note.GNU-stack, "", @progbits
