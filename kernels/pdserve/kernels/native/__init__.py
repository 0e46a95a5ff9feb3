"""Native operations for the CPU: the forward pass of known architectures in C, behind a plain C interface.

`src/` holds the C files, one operation each; `build_native.py` (in `kernels/`) compiles them once per instruction set. `library`
chooses one of these at run time and loads it; `structures` are its structs; `product` packs weights; `tape` lists the operations
of a forward pass and runs them in one call. Without the libraries nothing here is used, and torch computes alone.
"""
