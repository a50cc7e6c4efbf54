// Constants shared by assembly and C: segment selectors, and the maximum number of processors.

#ifndef SEGMENTS_H
#define SEGMENTS_H

#define PROCESSORS 16
#define STACK_SIZE 16384

#define KERNEL_CODE 0x08
#define KERNEL_DATA 0x10
#define USER_CODE 0x1b
#define USER_DATA 0x23
// The first of the TSS selectors, one per processor.
#define TASKS 0x28

#define VECTOR_USER_DONE 0x30

#endif
