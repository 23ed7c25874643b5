"""A C library of linear layers and whole decode steps, built for several instruction sets.

`source/` contains the C code: `vectors.h` and one `isa_*.h` for each instruction set, `linears.c`,
`pack.c`, `attention.c`, `experts.c`, `step.c`, `threads.c`, and `supported.c`, which detects the
CPU's features. `variants.py` lists the variants and their flags, compiles them, and chooses the
best one that this CPU supports; `library.py` calls it through ctypes.
"""
