// Printing on COM1, and parsing of the command line.

#include "payload.h"

void put_char(char c) { outb(COM1, (uint8_t)c); }
void print(const char *text) { while (*text) put_char(*text++); }
void print_hex(uint32_t value, int digits) {
    while (digits--) put_char("0123456789abcdef"[(value >> (4 * digits)) & 15]);
}
void print_hex64(uint64_t value) { print_hex((uint32_t)(value >> 32), 8); print_hex((uint32_t)value, 8); }
void print_decimal(uint32_t value) {
    if (value >= 10) print_decimal(value / 10);
    put_char((char)('0' + value % 10));
}

void fail(const char *why) {
    print(why); put_char('\n');
    outb(DEBUG_EXIT, 0x7f);
    for (;;) __asm__ volatile("cli; hlt");
}

uint32_t parse_number(const char **text) {
    uint32_t value = 0, base = 10;
    const char *at = *text;
    if (at[0] == '0' && at[1] == 'x') { base = 16; at += 2; }
    for (;; at++) {
        uint32_t digit;
        if (*at >= '0' && *at <= '9') digit = (uint32_t)(*at - '0');
        else if (base == 16 && *at >= 'a' && *at <= 'f') digit = (uint32_t)(*at - 'a' + 10);
        else break;
        value = value * base + digit;
    }
    *text = *at == ',' || *at == ':' ? at + 1 : at;
    return value;
}

uint64_t parse_number64(const char **text) {
    uint32_t high = parse_number(text), low = parse_number(text);
    return (uint64_t)high << 32 | low;
}

const char *match_word(const char *word, const char *name) {
    while (*name) if (*word++ != *name++) return 0;
    if (*word == '=') return word + 1;
    return *word == ' ' || *word == 0 ? word : 0;
}

const char *match_argument(const char *text, const char *name) {
    while (*name) if (*text++ != *name++) return 0;
    return *text == ',' ? text + 1 : 0;
}
