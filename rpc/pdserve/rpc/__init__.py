"""Wire plumbing over gRPC that every process needs: server and channel options, TLS, health, reflection, error details,
proofs of the secret, and an end to every wait for a client.

It knows the status codes and `google.rpc` details, but no service of ours: servicers belong to the rooms that serve them.
It is the first and the last step of every call's walk.
"""
