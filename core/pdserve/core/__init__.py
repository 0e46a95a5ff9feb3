"""The vocabulary that all processes share: ids, request types, KV layout, errors, clock, settings, life cycles.

This room holds words, not work: no sockets, no tensors, no threads. It may import the standard library and pydantic only,
and every other room may import it. It is no step of a request's walk; it is what the steps talk about.
"""
