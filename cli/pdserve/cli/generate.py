"""`pdserve generate`: one prompt, its answer as it comes."""

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pdserve.client import Answer, Options, Prompt

SERVER = "127.0.0.1:50051"

ServerOption = Annotated[str, typer.Option(envvar="PDSERVE_SERVER", metavar="HOST:PORT", help="Router's address.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Ask through the model's chat template.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer. Default: what the model has room for.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0: the most likely token each time (default).")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens this likely, relative to the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draw; the same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    timeout_s: Annotated[float | None, typer.Option(metavar="SECONDS", help="Deadline of the whole answer.")] = None,
    model: Annotated[str, typer.Option(help="Model name. Default: the router's only model.")] = "",
    request_id: Annotated[str, typer.Option(help="Label for logs.")] = "",
    server: ServerOption = SERVER,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Show text as it comes, or all at once.")] = True,
    timeline: Annotated[bool, typer.Option("--timeline", help="Show where the time went.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines; the last one holds the whole answer.")] = False,
) -> None:
    """Stream the answer to a prompt. Ctrl-C cancels the request."""
    from pdserve.cli.report import errors_as_json, run_async
    from pdserve.client import Options

    options = Options(
        model=model,
        request_id=request_id,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        timeout_s=timeout_s,
    )
    with errors_as_json(as_json):
        question = prompt_of(text_of(prompt), chat=chat, system=system)
        answer = run_async(ask(server, question, options, stream=stream, as_json=as_json))
    if timeline and not as_json and answer.summary is not None:
        from pdserve.cli.report import output
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


def prompt_of(text: str, *, chat: bool | None, system: str | None) -> "Prompt":
    """Return the prompt in the form that was asked for. Raises InvalidRequest for a system message without a chat."""
    from pdserve.client import Chat, Turn

    if system is not None and chat is False:
        raise InvalidRequest("--system needs a chat: leave --no-chat or --system out")
    if system is not None:
        return Chat((Turn("system", system), Turn("user", text)))
    return Chat((Turn("user", text),)) if chat else text


async def ask(server: str, prompt: "Prompt", options: "Options", *, stream: bool, as_json: bool = False) -> "Answer":
    """Write the answer to standard output as it comes, and return it whole."""
    from pdserve.cli.report import write_json
    from pdserve.client import NO_RETRIES, Answer, AsyncClient, Delta

    answer = Answer()
    async with AsyncClient(server, retry=NO_RETRIES) as client:
        try:
            async for part in client.generate(prompt, options, stream=stream):
                answer.add(part)
                if isinstance(part, Delta) and not as_json:
                    sys.stdout.write(part.text)
                    sys.stdout.flush()
                elif isinstance(part, Delta) and stream:
                    write_json({"event": "delta", **asdict(part)})
        finally:
            if answer.deltas and not as_json:
                sys.stdout.write("\n")
                sys.stdout.flush()
    if as_json:
        write_json(answer_as_json(answer))
    return answer


def answer_as_json(answer: "Answer") -> dict[str, object]:
    """Return the whole answer with one entry per token; `arrival_s` is seconds after the request was sent."""
    finished, summary = answer.finished, answer.summary
    assert finished is not None
    assert summary is not None
    return {
        "event": "answer",
        "text": answer.text,
        "finish_reason": finished.reason.name,
        "stop": finished.stop,
        "stop_token_id": finished.stop_token_id,
        "tokens": [
            {"id": token_id, "logprob": logprob, "arrival_s": delta.arrival_s}
            for delta in answer.deltas
            for token_id, logprob in zip(delta.token_ids, delta.logprobs, strict=True)
        ],
        "request_id": summary.request_id,
        "model": summary.model,
        "seed": summary.seed,
        "usage": asdict(summary.usage),
        "timeline": asdict(summary.timeline),
        "processes": [
            asdict(p) | {"role": p.role.label, "incarnation": p.incarnation.hex()} for p in summary.processes
        ],
    }
