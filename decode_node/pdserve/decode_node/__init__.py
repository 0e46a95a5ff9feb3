"""The decode node: KV blocks and a first token in, the rest of the answer out.

It promises blocks, adopts verified KV from the corridor, and runs continuous batches: one forward pass per step over all
running sequences. It never computes a prompt. In a request's walk it is
`kvtransfer → intake → scheduler → worker → engine → node.outbox`.
"""
