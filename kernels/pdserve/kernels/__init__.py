"""Kernels: the tensor operations of a forward step, one per file, each with its formula and a plain reference.

A step first makes one `ragged.RaggedPlan` (indices and masks that all layers share), then calls, per layer, `kv_write` and
`paged_attention`, and at its end `sampling`: `processors` change the logits by what `logits` knows of each row's sequence, and
`gumbel_max` draws with the noise of `philox`. The hand-over calls `wire_pack`. `slots` is the one place that knows where a
position lies in the pool. `backends` is the one place that chooses who computes them: today plain torch for every device;
Triton kernels and a native CPU op will stand beside it.

This room knows slots and tensors, not models, requests or leases.
"""
