"""The `pdserve` command: one file per command, and the supervisor of `pdserve up`.

It starts processes, shows what they say, and asks a router questions through `pdserve.client`. It decides nothing about
requests and is no step of their walk. Other rooms are imported inside the commands that need them, so that `--help` and
`--version` answer at once and never load torch, grpc or transformers.
"""
