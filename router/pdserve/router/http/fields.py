"""The fields that both generating paths share, and how any of them becomes part of a `GenerateCall`.

Only names and types are checked here; ranges and what fits together are the business of `router.validation`, as for gRPC.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pdserve.core.errors import InvalidRequest, NotServed
from pdserve.core.setting_faults import did_you_mean
from pdserve.router.http.errors import JsonObject
from pdserve.router.output import Shown
from pdserve.router.request import (
    ChoiceOutput,
    GenerateCall,
    GrammarOutput,
    JsonObjectOutput,
    JsonSchemaOutput,
    RegexOutput,
    StructuredOutput,
)

MAX_UINT32, MAX_UINT64, MAX_INT32 = 2**32 - 1, 2**64 - 1, 2**31 - 1
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
MAX_FAULTS = 1000
"""Faults of which the first is named; pydantic puts all of them into words, which takes seconds for a million."""
MAX_PATH_CHARS = 200
DEFAULT_TEMPERATURE = 1.0
"""OpenAI's and vLLM's; the gRPC contract's own default is 0, greedy."""
HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Fields of OpenAI's API that change nothing about the answer: accepted, and not used."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "truncate_prompt_tokens": (),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "logits_processors": ([],),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
}
"""Known fields that are not served, each with the values that ask for nothing."""

PARAMS: Mapping[str, str] = {
    "request_id": "X-Request-Id",
    "sampling.temperature": "temperature",
    "sampling.top_k": "top_k",
    "sampling.top_p": "top_p",
    "sampling.min_p": "min_p",
    "sampling.seed": "seed",
    "sampling.repetition_penalty": "repetition_penalty",
    "sampling.presence_penalty": "presence_penalty",
    "sampling.frequency_penalty": "frequency_penalty",
    "sampling.logit_bias": "logit_bias",
    "sampling.allowed_token_ids": "allowed_token_ids",
    "sampling.banned_token_ids": "banned_token_ids",
    "sampling.banned_words": "bad_words",
    "stop.max_tokens": "max_tokens",
    "stop.stop": "stop",
    "stop.stop_token_ids": "stop_token_ids",
    "stop.ignore_eos": "ignore_eos",
    "stop.min_tokens": "min_tokens",
    "stop.include_stop": "include_stop_str_in_output",
}
"""What clients of both paths call the contract's fields."""
LANGUAGE_FIELDS = tuple(
    f"structured_output{rest}"
    for rest in ("", ".json_schema", ".json_object", ".regex", ".choice", ".choice.texts", ".grammar")
)
"""The contract's fields of a structured output; over HTTP each language is one field, by several names."""

M = TypeVar("M", bound=BaseModel)
Uint32 = Annotated[int, Field(ge=0, le=MAX_UINT32)]
Uint32s = Annotated[list[Uint32], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
"""The first fault of a list is enough; a million of them would take seconds to tell."""


def one_or_many(value: object) -> object:
    """Return a text as a list of one."""
    return [value] if isinstance(value, str) else value


def all_as_zero(value: object) -> object:
    """Return vLLM's -1 for "all" as the contract's 0."""
    return 0 if value == -1 and not isinstance(value, bool) else value


class Strict(BaseModel):
    """Types are JSON's own: no text stands for a number, no number for a truth. Unknown names are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Strict):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: bool = False


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one of these."""

    json_: JsonObject | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None


class NamedSchema(Strict):
    """OpenAI's `response_format.json_schema`. The answer always keeps to the schema, whatever `strict` says."""

    name: str = ""
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class SamplingFields(Strict):
    """What completions and chat completions have in common; None is not set."""

    model: str = ""
    request_id: str | None = None
    n: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[Uint32 | None, BeforeValidator(all_as_zero)] = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_UINT64)] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] = Field({})
    allowed_token_ids: Uint32s = Field([])
    banned_token_ids: Uint32s = Field([])
    bad_words: Texts = Field([])
    max_tokens: Uint32 | None = None
    min_tokens: Uint32 | None = None
    stop: Annotated[Texts, BeforeValidator(one_or_many)] = Field([])
    stop_token_ids: Uint32s = Field([])
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_INT32 - 1, le=MAX_INT32)] | None = None
    cache_salt: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Uint32 | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    def call(self, label: str) -> GenerateCall:
        """Return the call, still without an input. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is given without stream", hint="set stream to true", field="stream_options"
            )
        output, _ = self.structured()
        return GenerateCall(
            request_id=label,
            model=self.model,
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias),
            allowed_token_ids=tuple(self.allowed_token_ids),
            banned_token_ids=tuple(self.banned_token_ids),
            banned_words=tuple(self.bad_words),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            include_stop=self.include_stop_str_in_output,
            n=self.n,
            priority=self.priority,
            cache_salt=self.cache_salt,
            stream=self.stream,
            structured_output=output,
        )

    def structured(self) -> tuple[StructuredOutput | None, str]:
        """Return the language of the answer, and the field that asked for it. Raises InvalidRequest if several do."""
        asked = list(_languages(self))
        if len(asked) > 1:
            names = " and ".join(name for _, name in asked)
            raise InvalidRequest(f"{names} cannot be combined", hint="ask for one of them", field=asked[1][1])
        return asked[0] if asked else (None, "response_format")

    def names(self) -> dict[str, str]:
        """Return what this client calls the contract's fields."""
        label = {} if self.request_id is None else {"request_id": "request_id"}
        return {**PARAMS, **dict.fromkeys(LANGUAGE_FIELDS, self.structured()[1]), **label}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client wants to see beside text. `num_top` is None without log-probabilities."""

    num_top: int | None = None
    num_prompt_top: int | None = None
    echo: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    include_usage: bool = False

    def sees(self, shown: Shown) -> bool:
        """Whether the client sees anything of what an answer gained."""
        tells_tokens = self.token_ids or self.num_top is not None
        return bool(shown.text or shown.reasoning or shown.tool_calls or (shown.tokens and tells_tokens))


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed body: one call per prompt, the label of all, and the client's names for the contract's fields."""

    calls: tuple[GenerateCall, ...]
    wishes: Wishes
    stream: bool
    label: str
    names: Mapping[str, str] = field(default_factory=dict)


def parse(kind: type[M], body: JsonObject) -> M:
    """Return the body's fields. Raises InvalidRequest or NotServed, naming the field."""
    given: JsonObject = {}
    for name, value in body.items():
        if value is None or name in HARMLESS:
            continue
        if name in NEUTRAL and name not in kind.model_fields:
            if value not in NEUTRAL[name]:
                raise NotServed(f"{name} is not served", hint="leave it unset", field=name)
            continue
        if name not in kind.model_fields:
            raise _unknown(kind, name)
        given[name] = value
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        if error.error_count() > MAX_FAULTS:
            raise InvalidRequest(
                f"{error.error_count()} values are of the wrong kind", hint="see docs/http.md"
            ) from None
        detail = error.errors()[0]
        is_unknown = detail["type"] == "extra_forbidden"
        path = _path(detail["loc"], any_name=is_unknown)[:MAX_PATH_CHARS]
        if is_unknown:
            raise _unknown(kind, path) from None
        words = str(detail["msg"]).removeprefix("Value error, ")
        raise InvalidRequest(f"{path}: {words[:1].lower()}{words[1:]}", hint="see docs/http.md", field=path) from None


def _unknown(kind: type[BaseModel], path: str) -> NotServed:
    known = did_you_mean(path, [*kind.model_fields, *NEUTRAL])
    path = path[:MAX_PATH_CHARS]
    return NotServed(f"{path} is not a known field{known}", hint="leave it out", field=path)


def scored(call: GenerateCall, wishes: Wishes) -> GenerateCall:
    """Return the call with the log-probabilities that the wishes need."""
    num_top = max(wishes.num_top or 0, wishes.num_prompt_top or 0)
    is_prompt_scored = wishes.num_prompt_top is not None or (wishes.echo and wishes.num_top is not None)
    return replace(call, top_logprobs=num_top or None, prompt_logprobs=is_prompt_scored or None)


def _languages(fields: SamplingFields) -> list[tuple[StructuredOutput, str]]:
    found: list[tuple[StructuredOutput | None, str]] = [
        (_schema(fields.guided_json), "guided_json"),
        (None if fields.guided_regex is None else RegexOutput(fields.guided_regex), "guided_regex"),
        (None if fields.guided_choice is None else ChoiceOutput(tuple(fields.guided_choice)), "guided_choice"),
        (None if fields.guided_grammar is None else GrammarOutput(fields.guided_grammar), "guided_grammar"),
    ]
    if (its := fields.structured_outputs) is not None:
        where = "structured_outputs"
        found += [
            (_schema(its.json_), f"{where}.json"),
            (JsonObjectOutput() if its.json_object else None, f"{where}.json_object"),
            (None if its.regex is None else RegexOutput(its.regex), f"{where}.regex"),
            (None if its.choice is None else ChoiceOutput(tuple(its.choice)), f"{where}.choice"),
            (None if its.grammar is None else GrammarOutput(its.grammar), f"{where}.grammar"),
        ]
    if (form := fields.response_format) is not None:
        found.append((_of_format(form), "response_format"))
    return [(output, name) for output, name in found if output is not None]


def _of_format(form: ResponseFormat) -> StructuredOutput | None:
    match form.type:
        case "text":
            return None
        case "json_object":
            return JsonObjectOutput()
        case "json_schema":
            if form.json_schema is None:
                raise InvalidRequest(
                    "response_format has no json_schema", hint="give its schema", field="response_format.json_schema"
                )
            return _schema(form.json_schema.schema_)


def _schema(given: JsonObject | str | None) -> JsonSchemaOutput | None:
    if given is None:
        return None
    return JsonSchemaOutput(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for name in given:
        if not TOKEN_ID.fullmatch(name) or int(name) > MAX_UINT32:
            raise InvalidRequest(f"{name[:64]!r} is no token id", hint="keys are token ids", field="logit_bias")
    return tuple(sorted((int(name), bias) for name, bias in given.items()))


def _path(loc: tuple[int | str, ...], *, any_name: bool) -> str:
    """Return pydantic's location as people write it; what it adds to tell apart the members of a union is left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif any_name or (part.isidentifier() and part not in ("str", "dict", "list")):
            path += f".{part}" if path else part
    return path or "body"
