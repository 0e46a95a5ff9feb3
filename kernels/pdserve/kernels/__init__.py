"""Kernels: the tensor operations of a forward step, one per file, each with its formula and a plain reference.

A step first makes one plan of what all layers share (`ragged.RaggedPlan`, or the backend's own), then calls, per layer,
`kv_write` and `paged_attention`, and at its end `sampling`: `processors` change the logits by what `logits` knows of each row's
sequence, and `gumbel_max` draws with the noise of `philox`, of rows with filters mostly from a `shortlist`. The hand-over calls
`wire_pack`, and `wire_quant` for 8-bit KV. `linear` packs a model's weights for the CPU. `slots` is the one place that
knows where a position lies in the pool. `backends` is the one place that chooses who computes them: plain torch for every
device, or, on CUDA, `triton_backend` with the kernels of `triton/` and the modules that they replace (`triton_modules`); what
these plan on the host reaches the device in `one_copy`.

This room knows slots and tensors, not models, requests or leases.
"""
