"""The engine: a `transformers` model, unmodified, computing on a paged KV pool.

In the walk of a request it stands below both nodes: a node's scheduler decides what a step holds, the engine computes it in
one forward pass and samples. It knows block tables and tokens; not requests, peers or time.

- `blocks`: who owns which block of the pool (leases; no torch)
- `batch`: what a step is given and what it answers (no torch)
- `engine`, `forward`: `Engine.load` and `Engine.step`, and the one forward pass of a step
- `grammar`: where a sequence stands in its compiled grammar
- `attention`: how the model's attention is led into the pool, and the check at load that it really is
- `decode_graphs`: decode steps of fixed shapes, captured (CUDA)
- `kv_pool`: the tensors of the pool, and the wire form
- `loading`, `weights`, `support`, `probe`: a folder becomes a model with an identity, or a refusal by name
- `prepare`, `convert`: a built-in alias becomes such a folder
- `quiet`: transformers without its advice
"""
