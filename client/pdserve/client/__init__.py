"""The Python client of a router's public contract: one connection, typed requests, typed answers, typed errors.

It stands at both ends of a request's walk: it sends the prompt in and receives the deltas. It never imports torch, and
generated protobuf types stop at `pb.py`. So far it holds what the command line needs; it grows into the full library later.
"""

from pdserve.client.answer import Answer, Delta, Finished, Summary
from pdserve.client.client import Client
from pdserve.client.request import Chat, Options, Prompt, Turn

__all__ = ["Answer", "Chat", "Client", "Delta", "Finished", "Options", "Prompt", "Summary", "Turn"]
