"""The options of a request, declared once for `generate` and `chat`, and how errors speak of them."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from pdserve.cli.tls_options import TlsOptions
from pdserve.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pdserve.client import Language, Options

SERVER = "127.0.0.1:50051"
SAMPLING, LIMITS, LANGUAGE = "How tokens are chosen", "When the answer ends", "What the answer may be (one of these)"
CONVERSATION, SHOWN = "Conversation", "What comes back"

ServerOption = Annotated[str, typer.Option(envvar="PDSERVE_SERVER", metavar="HOST:PORT", help="Router's address.")]


def option(help_text: str, panel: str, *names: str, metavar: str | None = None) -> object:
    """Return the declaration of an option that has no default of its own: the router's counts."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, metavar=metavar, show_default=False)


Words = list[str] | None


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What `generate` and `chat` both take. None: the router decides."""

    max_tokens: Annotated[
        int | None, option("Longest answer, tokens. Default: what the model has room for.", LIMITS)
    ] = None
    stop: Annotated[Words, option("Text that ends the answer; may be repeated.", LIMITS, metavar="TEXT")] = None
    timeout_s: Annotated[float | None, option("Deadline of the whole answer.", LIMITS, metavar="SECONDS")] = None
    temperature: Annotated[float | None, option("0: the most likely token each time (default).", SAMPLING)] = None
    top_k: Annotated[int | None, option("Keep the k most likely tokens.", SAMPLING)] = None
    top_p: Annotated[float | None, option("Keep the likeliest tokens up to this probability.", SAMPLING)] = None
    min_p: Annotated[float | None, option("Keep tokens this likely, relative to the likeliest.", SAMPLING)] = None
    seed: Annotated[int | None, option("Seed of the draw; the same seed gives the same answer.", SAMPLING)] = None
    repetition_penalty: Annotated[float | None, option("Above 1: what was said is less likely.", SAMPLING)] = None
    presence_penalty: Annotated[float | None, option("Taken off the logits of what was answered.", SAMPLING)] = None
    frequency_penalty: Annotated[float | None, option("The same, once per occurrence.", SAMPLING)] = None
    model: Annotated[str, typer.Option(help="Model name. Default: the router's only model.", show_default=False)] = ""
    template_arguments: Annotated[
        str, option("Variables for the chat template, one object.", CONVERSATION, metavar="JSON")
    ] = ""

    def options(self) -> "Options":
        """Return them as the client takes them."""
        from pdserve.client import Options

        return Options(
            model=self.model,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop or ()),
            timeout_s=self.timeout_s,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )


@dataclass(frozen=True, slots=True)
class MoreOptions:
    """What only `generate` takes."""

    n: Annotated[int | None, option("Number of answers.", SHOWN, "--n", "-n")] = None
    request_id: Annotated[str, typer.Option(help="Label for logs.", show_default=False)] = ""
    min_tokens: Annotated[int | None, option("Tokens before which nothing ends the answer.", LIMITS)] = None
    stop_token_id: Annotated[
        list[int] | None, option("Token that ends the answer; may be repeated.", LIMITS, metavar="ID")
    ] = None
    include_stop: Annotated[bool | None, option("Keep the stop text in the answer.", LIMITS, "--include-stop")] = None
    ignore_eos: Annotated[bool | None, option("Go on past the end-of-sequence token.", LIMITS, "--ignore-eos")] = None
    logit_bias: Annotated[
        Words, option("Added to a token's logit; may be repeated.", SAMPLING, metavar="ID=NUMBER")
    ] = None
    banned_word: Annotated[Words, option("Text that may not appear; may be repeated.", SAMPLING, metavar="TEXT")] = None
    json_schema: Annotated[
        Path | None, option("JSON of this schema; - reads standard input.", LANGUAGE, metavar="FILE")
    ] = None
    json_object: Annotated[bool, option("Any JSON object.", LANGUAGE, "--json-object")] = False
    regex: Annotated[str | None, option("Text that matches, whole.", LANGUAGE, metavar="PATTERN")] = None
    choice: Annotated[Words, option("One of the texts; give it once for each.", LANGUAGE, metavar="TEXT")] = None
    grammar: Annotated[Path | None, option("Text of a Lark or GBNF grammar.", LANGUAGE, metavar="FILE")] = None
    tool: Annotated[
        list[Path] | None,
        option("JSON definition of a tool; may be repeated; implies --chat.", CONVERSATION, metavar="FILE"),
    ] = None
    tool_choice: Annotated[str, option("auto, none, required, or a tool's name.", CONVERSATION, metavar="CHOICE")] = ""
    logprobs: Annotated[int | None, option("Show each token's log-probability and so many alternatives.", SHOWN)] = None
    prompt_logprobs: Annotated[bool, option("Score the prompt's tokens too.", SHOWN, "--prompt-logprobs")] = False

    def added_to(self, options: "Options") -> "Options":
        """Return `options` with these. Raises InvalidRequest for what cannot be read, with the option's name."""
        from dataclasses import replace

        return replace(
            options,
            n=self.n,
            request_id=self.request_id,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_id or ()),
            include_stop=self.include_stop,
            ignore_eos=self.ignore_eos,
            logit_bias=dict(bias_of(text) for text in self.logit_bias or ()),
            banned_words=tuple(self.banned_word or ()),
            structured_output=self._language(),
            top_logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs or None,
        )

    def tools(self) -> tuple[str, ...]:
        """Return the definitions of the tools, as JSON text. Raises InvalidRequest for a file that cannot be read."""
        return tuple(text_in("--tool", path) for path in self.tool or ())

    def _language(self) -> "Language | None":
        from pdserve.client import Grammar, JsonObject, JsonSchema, OneOf, Regex

        given: dict[str, Language] = {}
        if self.json_schema is not None:
            given["--json-schema"] = JsonSchema(text_in("--json-schema", self.json_schema))
        if self.json_object:
            given["--json-object"] = JsonObject()
        if self.regex is not None:
            given["--regex"] = Regex(self.regex)
        if self.choice:
            given["--choice"] = OneOf(tuple(self.choice))
        if self.grammar is not None:
            given["--grammar"] = Grammar(text_in("--grammar", self.grammar))
        if len(given) > 1:
            raise InvalidRequest(f"{' and '.join(given)} exclude each other", hint="give one of them")
        return next(iter(given.values()), None)


def bias_of(text: str) -> tuple[int, float]:
    """Return the token id and number of ID=NUMBER."""
    token_id, _, number = text.partition("=")
    try:
        return int(token_id), float(number)
    except ValueError:
        raise InvalidRequest(f"--logit-bias: {text!r} is not ID=NUMBER", hint="for example 42=-5") from None


def text_in(name: str, path: Path) -> str:
    """Return the text of an option's file, or of standard input for "-"."""
    import sys

    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return raw.decode()
    except OSError as error:
        raise InvalidRequest(f"{name}: {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name}: {path} is not valid UTF-8 (byte {error.start})") from None


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with an option per field of its AnswerOptions, MoreOptions and TlsOptions, which it gets as values."""
    signature, parameters = inspect.signature(command), []
    kinds: dict[str, type] = {p.name: p.annotation for p in signature.parameters.values()}
    groups = {name: kind for name, kind in kinds.items() if kind in (AnswerOptions, MoreOptions, TlsOptions)}
    for parameter in signature.parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(parameter.annotation, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in fields(parameter.annotation)
        ]

    @wraps(command)
    def with_options(**given: Any) -> None:
        values = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        command(**given, **values)

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # typer reads it to make options
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


OPTION_NAMES = {
    "stop_token_ids": "--stop-token-id",
    "banned_words": "--banned-word",
    "top_logprobs": "--logprobs",
    "texts": "--choice",
    "tools": "--tool",
    "choice": "--choice",
    "server": "--server",
}
"""The contract's fields whose option has another name."""


def option_of(field: str) -> str:
    """Return the option that sets a field of the contract, such as "stop.stop[0]"; "" if none does."""
    name = re.sub(r"(\[.*|(?<=tool_choice)\.name)", "", field).rpartition(".")[2]
    known = {field.name for kind in (AnswerOptions, MoreOptions) for field in fields(kind)}
    return OPTION_NAMES.get(name) or ("--" + name.replace("_", "-") if name in known else "")
