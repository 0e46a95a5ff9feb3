"""The front door: from a client's request to submits on two nodes, and from their tokens back to a streamed answer.

Steps of the walk that stand here, in order: `front` (gRPC) or `http`, `answering`, `validation`, `admission`, `tokenizer` with
`chat`, `placement`, then (after the nodes) `session`, `output` with `detokenizer` and `stops`, `mailbox`, the front again.
`server` starts all of it; `membership` and `attach` keep one stream to every node. The room never imports torch, and keeps no
state that must survive it.
"""
