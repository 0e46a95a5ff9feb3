"""The HTTP front: OpenAI's API and some of vLLM's, on the router's own event loop.

A body is parsed by `completion_request` or `chat_request` into the `GenerateCall` that a gRPC request becomes too; checks,
admission and sessions lie behind `router.answering`, so nothing is validated twice.
`completion_shape` and `chat_shape` give the answer its form, `answer` writes it, whole or as server-sent events, and `errors`
gives every error its status. `app` has the paths, `guard` the keys and request ids. The port itself is `rpc.http_listener`.
This room does not decide anything about tokens.
"""
