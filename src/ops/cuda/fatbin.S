/* The compiled kernels as data: cuda_fatbins of fatbin.h. FATBINS is the Makefile's list of quoted file names; not there: no nvcc. */
    .section .data.rel.ro, "aw"
    .balign 8
    .globl cuda_fatbins
    .type cuda_fatbins, @object
cuda_fatbins:
#ifdef FATBINS
    .irp file, FATBINS
    .section .rodata
    .balign 64
1:  .incbin "\file"
2:  .section .data.rel.ro, "aw"
    .quad 1b, 2b - 1b
    .endr
#endif
    .quad 0, 0
    .size cuda_fatbins, . - cuda_fatbins
    .section .note.GNU-stack, "", @progbits
