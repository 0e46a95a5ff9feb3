"""`POST /v1/completions`: from its body to one call per prompt."""

from dataclasses import replace
from typing import Literal, cast

from pdserve.core.errors import InvalidRequest, NotServed
from pdserve.router.http.errors import JsonObject
from pdserve.router.http.fields import MAX_UINT32, Asked, SamplingFields, Uint32, Wishes, parse, scored
from pdserve.router.request import GenerateCall, PromptInput, TextInput, TokenInput

MAX_PROMPTS = 128
"""Prompts of one request; each is a request of its own to admission and the nodes."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's and vLLM's for this path."""
PROMPT_FORMS = "text, a list of texts, token ids, or a list of lists of token ids"


class CompletionFields(SamplingFields):
    """The fields of this path."""

    prompt: object
    echo: bool = False
    logprobs: Uint32 | None = None
    best_of: Uint32 | None = None
    add_special_tokens: Literal[True] = True


def parse_completion(body: JsonObject, label: str) -> Asked:
    """Return what the body asks for. Raises InvalidRequest or NotServed, naming the field."""
    fields = parse(CompletionFields, body)
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise NotServed(f"best_of is {fields.best_of}; only n answers are made", hint="leave it unset", field="best_of")
    prompts = prompts_of(fields.prompt)
    wishes = Wishes(
        num_top=fields.logprobs,
        num_prompt_top=fields.prompt_logprobs,
        echo=fields.echo,
        token_ids=fields.return_token_ids,
        tokens_as_ids=fields.return_tokens_as_token_ids,
        include_usage=fields.stream_options is not None and fields.stream_options.include_usage,
    )
    call = scored(fields.call(fields.request_id or label), wishes)
    if call.max_tokens is None:
        call = replace(call, max_tokens=DEFAULT_MAX_TOKENS)
    names = fields.names() | {
        "input": "prompt",
        "text": "prompt",
        "token_ids.ids": "prompt",
        "top_logprobs": "logprobs" if fields.logprobs else "prompt_logprobs",
        "prompt_logprobs": "prompt_logprobs" if fields.prompt_logprobs is not None else "echo",
    }
    return Asked(tuple(_numbered(call, prompts)), wishes, fields.stream, call.request_id, names)


def prompts_of(given: object) -> tuple[PromptInput, ...]:
    """Return the prompts that a `prompt` field holds. Raises InvalidRequest."""
    if isinstance(given, str):
        return (TextInput(given),)
    several: list[object] = given if isinstance(given, list) else []
    if several and isinstance(several[0], int):
        return (TokenInput(_ids(several)),)
    if len(several) > MAX_PROMPTS:
        raise InvalidRequest(
            f"the request has {len(several)} prompts", hint=f"at most {MAX_PROMPTS}; send more requests", field="prompt"
        )
    texts = [TextInput(one) for one in several if isinstance(one, str)]
    lists = [TokenInput(_ids(one)) for one in several if isinstance(one, list)]
    if not several or max(len(texts), len(lists)) != len(several):
        return (TokenInput(_ids(several)),)
    return (*texts, *lists)


def _ids(given: list[object]) -> tuple[int, ...]:
    # Over a million ids at once: these run in C, a generator would take the event loop a tenth of a second.
    ids = cast("list[int]", given)
    if set(map(type, given)) != {int} or min(ids) < 0 or max(ids) > MAX_UINT32:
        raise InvalidRequest("the prompt is empty or of another kind", hint=f"give {PROMPT_FORMS}", field="prompt")
    return tuple(ids)


def _numbered(call: GenerateCall, prompts: tuple[PromptInput, ...]) -> list[GenerateCall]:
    if len(prompts) == 1:
        return [replace(call, input=prompts[0])]
    return [
        replace(call, input=prompt, request_id=f"{call.request_id}-{number}") for number, prompt in enumerate(prompts)
    ]
