"""Wire plumbing over gRPC that every process needs: server and channel options, TLS, health, reflection, error details,
proofs of the secret, and an end to every wait for a client.

HTTP: a port (`http_listener`) and one connection to it (`http_connection`), for the router's front and for the admin port of
every process, and gauges in Prometheus' form.
It knows the status codes and `google.rpc` details, but no service of ours: servicers belong to the rooms that serve them.
It is the first and the last step of every call's walk.
"""
