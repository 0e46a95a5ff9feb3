"""Wire plumbing that every process needs. gRPC: server and channel options, health, reflection, error details, secret.

HTTP: a port (`http_listener`) and one connection to it (`http_connection`), for the router's front and for the admin port of
every process, and gauges in Prometheus' form.
It knows the status codes and `google.rpc` details, but no service of ours: servicers belong to the rooms that serve them.
It is the first and the last step of every call's walk.
"""
