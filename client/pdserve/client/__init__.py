"""The Python client of a router's public contract: one connection, typed requests, typed answers, typed errors.

`Client` is for threads, `AsyncClient` for asyncio; both have the same methods. It stands at both ends of a request's walk: it
sends the prompt in and receives the deltas. It never imports torch, and generated protobuf types stop at `pb` and `pb_request`.
How to use it: docs/client.md.
"""

from pdserve.client.answer import (
    Answer,
    Choice,
    Delta,
    Finished,
    Part,
    PromptScores,
    ScoredToken,
    Summary,
    Tokens,
    ToolCallDelta,
    Usage,
)
from pdserve.client.answer_stream import AnswerStream
from pdserve.client.async_answer import AsyncAnswerStream
from pdserve.client.async_client import AsyncClient
from pdserve.client.client import Client
from pdserve.client.language import Grammar, JsonObject, JsonSchema, Language, OneOf, Regex
from pdserve.client.request import Chat, NamedTool, Options, Prompt, ToolCall, Turn
from pdserve.client.retries import NO_RETRIES, RetryPolicy
from pdserve.client.tls import Tls

__all__ = [
    "NO_RETRIES",
    "Answer",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncClient",
    "Chat",
    "Choice",
    "Client",
    "Delta",
    "Finished",
    "Grammar",
    "JsonObject",
    "JsonSchema",
    "Language",
    "NamedTool",
    "OneOf",
    "Options",
    "Part",
    "Prompt",
    "PromptScores",
    "Regex",
    "RetryPolicy",
    "ScoredToken",
    "Summary",
    "Tls",
    "Tokens",
    "ToolCall",
    "ToolCallDelta",
    "Turn",
    "Usage",
]
