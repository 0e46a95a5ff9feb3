"""`pdserve generate`: one prompt, its answer as it comes."""

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.api_keys import ApiKeyOption, key_to_send
from pdserve.cli.request_options import (
    CONVERSATION,
    SERVER,
    SHOWN,
    AnswerOptions,
    MoreOptions,
    ServerOption,
    option,
    takes_options,
)
from pdserve.cli.tls_options import TlsOptions
from pdserve.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pdserve.client import Answer, Choice, Options, Part, Prompt, Tls
    from pdserve.client.request import ToolChoice


@takes_options
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads standard input.")],
    answering: AnswerOptions,
    more: MoreOptions,
    trust: TlsOptions,
    chat: Annotated[
        bool | None, option("Ask through the model's chat template.", CONVERSATION, "--chat/--no-chat")
    ] = None,
    system: Annotated[str | None, option("System message; implies --chat.", CONVERSATION)] = None,
    server: ServerOption = SERVER,
    api_key: ApiKeyOption = "",
    stream: Annotated[
        bool, option("Show text as it comes (default), or all at once.", SHOWN, "--stream/--no-stream")
    ] = True,
    timeline: Annotated[bool, option("Show where the time went.", SHOWN, "--timeline")] = False,
    as_json: Annotated[bool, option("JSON lines; the last one holds the whole answer.", SHOWN, "--json")] = False,
) -> None:
    """Stream the answer to a prompt. Ctrl-C cancels the request."""
    from pdserve.cli.report import errors_as_json, output, run_async

    with errors_as_json(as_json):
        options = more.added_to(answering.options())
        question = prompt_of(text_of(prompt), answering, more, chat=chat, system=system)
        tls, key = trust.client_tls(), key_to_send(api_key)
        asking = ask(server, question, options, stream=stream, as_json=as_json, tls=tls, api_key=key)
        answer = run_async(asking)
    if as_json or answer.summary is None:
        return
    if more.logprobs is not None or more.prompt_logprobs:
        from pdserve.cli.scores_view import scores_view

        output().print(scores_view(answer))
    if timeline:
        from pdserve.cli.timeline_view import timeline_view

        output().print()
        output().print(timeline_view(answer.summary))


def text_of(prompt: str) -> str:
    """Return the prompt, read from standard input for "-". Raises InvalidRequest if its bytes are not UTF-8."""
    raw = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the prompt is not valid UTF-8 (byte {error.start})") from None


def prompt_of(
    text: str, answering: AnswerOptions, more: MoreOptions, *, chat: bool | None, system: str | None
) -> "Prompt":
    """Return the prompt in the form that was asked for. Raises InvalidRequest for what needs a chat, without one."""
    from pdserve.client import Chat, Turn

    given = {
        "--system": system is not None,
        "--template-arguments": bool(answering.template_arguments),
        "--tool": bool(more.tool),
        "--tool-choice": bool(more.tool_choice),
    }
    needing = [name for name, is_given in given.items() if is_given]
    if needing and chat is False:
        raise InvalidRequest(f"{needing[0]} needs a chat: leave --no-chat or {needing[0]} out")
    if not chat and not needing:
        return text
    return Chat(
        turns=(Turn("user", text),) if system is None else (Turn("system", system), Turn("user", text)),
        tools=more.tools(),
        tool_choice=tool_choice_of(more.tool_choice),
        template_arguments=answering.template_arguments,
    )


def tool_choice_of(text: str) -> "ToolChoice | None":
    """Return the choice that a word names; every other word is a tool's name."""
    from pdserve.client import NamedTool

    match text:
        case "":
            return None
        case "auto" | "none" | "required":
            return text
        case _:
            return NamedTool(text)


async def ask(
    server: str,
    prompt: "Prompt",
    options: "Options",
    *,
    stream: bool,
    as_json: bool = False,
    tls: "Tls | None" = None,
    api_key: str | None = None,
) -> "Answer":
    """Write the answer to standard output as it comes, and return it whole."""
    from pdserve.cli.answer_display import AnswerDisplay
    from pdserve.cli.report import write_json
    from pdserve.client import NO_RETRIES, AsyncClient, Delta

    display = AnswerDisplay(sys.stdout, num_sequences=options.n or 1)
    async with (
        AsyncClient(server, api_key=api_key, retry=NO_RETRIES, tls=tls) as client,
        client.generate(prompt, options, stream=stream) as parts,
    ):
        try:
            async for part in parts:
                if not as_json:
                    display.show(part)
                elif isinstance(part, Delta) and stream:
                    write_json(delta_as_json(part))
        finally:
            display.end()
    if as_json:
        write_json(answer_as_json(parts.answer))
    return parts.answer


def delta_as_json(part: "Part") -> dict[str, object]:
    """Return a delta as JSON values, without what was not asked for."""
    told = asdict(part)
    unasked = [name for name in ("top_logprobs", "reasoning", "tool_calls") if not told[name]]
    return {"event": "delta", **{name: value for name, value in told.items() if name not in unasked}}


def answer_as_json(answer: "Answer") -> dict[str, object]:
    """Return the whole answer: its first sequence, all of its `choices` where there are several, and what all share."""
    summary, choices = answer.summary, answer.choices
    assert summary is not None
    told: dict[str, object] = {"event": "answer", **choice_as_json(choices[0])}
    if len(choices) > 1:
        told["choices"] = [{"sequence": choice.sequence, **choice_as_json(choice)} for choice in choices]
    if answer.prompt:
        told["prompt"] = [
            {"id": token.token_id, "logprob": token.logprob, "top": token.top_logprobs} for token in answer.prompt
        ]
    return told | {
        "request_id": summary.request_id,
        "model": summary.model,
        "seed": summary.seed,
        "usage": asdict(summary.usage),
        "timeline": asdict(summary.timeline),
        "processes": [
            asdict(p) | {"role": p.role.label, "incarnation": p.incarnation.hex()} for p in summary.processes
        ],
    }


def choice_as_json(choice: "Choice") -> dict[str, object]:
    """Return a sequence with one entry per token; `arrival_s` is seconds after the request was sent."""
    finished = choice.finished
    assert finished is not None
    tokens: list[dict[str, object]] = [
        {"id": token_id, "logprob": logprob, "arrival_s": delta.arrival_s}
        for delta in choice.deltas
        for token_id, logprob in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    for token, top in zip(tokens, choice.top_logprobs, strict=False):
        token["top"] = top
    told: dict[str, object] = {
        "text": choice.text,
        "finish_reason": finished.reason.name,
        "stop": finished.stop,
        "stop_token_id": finished.stop_token_id,
        "tokens": tokens,
    }
    if choice.reasoning:
        told["reasoning"] = choice.reasoning
    if choice.tool_calls:
        told["tool_calls"] = [asdict(call) for call in choice.tool_calls]
    return told
