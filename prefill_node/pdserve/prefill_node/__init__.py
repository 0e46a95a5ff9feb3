"""The prefill node: prompt in, KV blocks and first token out.

It computes prompts in chunks, several per step, marks each layer's KV ready for the corridor the moment it is written, samples
the first token and reports it at once. It never decodes, and its step loop never waits for the network. In a request's walk it
is `server → scheduler → worker → engine → handoff → kvtransfer`.
"""
