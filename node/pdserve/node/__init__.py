"""What prefill and decode nodes have in common: the Attach stream, its legs and outbox, the step loop, the process shell.

It knows routers, legs and leases, but not what a leg does: that is the desk of each role (`prefill_node`, `decode_node`).
In a request's walk it is the step between the router's session and a node's scheduler, in both directions.
"""
