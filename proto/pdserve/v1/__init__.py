"""The contract between clients, router and nodes, generated from the `.proto` files in this folder by `make proto`.

Nothing here is written by hand except the `.proto` files. Generated types stop at each service's `pb.py`.
"""
