"""The Triton kernels: one operation per file, with its formula, its kernel, and a launcher that checks what it is given.

The plain references stand one folder up (`kv_write`, `paged_attention`, `wire_pack`, `philox`, `gumbel_max`) or, for operations
that the torch backend leaves to the model's own modules, beside the kernel. Layouts are those of the references: caches are
`[slots, kv_heads, dim]`, a slot is `block * block_size + offset`, and block tables hold page ids as int32.

What holds for all: a grid comes from upper bounds that the host knows, never from device values, so that a launch can be
captured in a graph; page ids and slots widen to 64 bits before they are multiplied; every access to a block has a mask and every
load an `other`; tile sizes come from hand-made rules, never from an autotuner. Nothing here imports the engine, and nothing else
imports this folder at load: `triton` is an optional extra.
"""
