"""Wire plumbing over gRPC that every process needs: options, TLS, health, reflection, error details, proofs of the secret.

It knows the status codes and `google.rpc` details, but no service of ours: servicers belong to the rooms that serve them.
It is the first and the last step of every call's walk.
"""
