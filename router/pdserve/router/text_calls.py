"""Tokenize and Detokenize, whatever the transport: the ids that Generate would compute, and the text that it would show."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pdserve.core.errors import Overloaded, PdserveError
from pdserve.router.answering import MAX_INLINE_CHARS, Answering
from pdserve.router.request import GenerateCall, PromptInput, TextInput, TokenInput
from pdserve.router.validation import validate

MAX_CALLS = 64
"""Calls that may be under way; more are refused, so that they cannot hold up the tokenization of requests for long."""


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A Tokenize call as it was sent."""

    model: str
    input: PromptInput | None
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    """A Detokenize call as it was sent."""

    model: str
    token_ids: tuple[int, ...]
    show_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of an input: their ids, the vocabulary's name of each, and the longest prompt and answer together."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    max_model_len: int


class TextCalls:
    """Answers both calls for every front."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._num_calls = 0

    async def tokenize(self, call: TokenizeCall) -> Tokenized:
        """Return the tokens of an input. Raises InvalidRequest, UnknownModel or Overloaded."""
        model = self._answering.model
        given = validate(GenerateCall(model=call.model, input=call.input), model.served).input
        with self._counted():
            if isinstance(given, TextInput) and not call.add_special_tokens:
                ids = await self._encode_bare(given.text)
            else:
                ids = await self._answering.encode(given)

            def names() -> tuple[str, ...]:
                return tuple(model.tokenizer.id_to_token(token_id) or "" for token_id in ids)

            tokens = names() if len(ids) <= MAX_INLINE_CHARS else await self._answering.on_thread(names)
        return Tokenized(ids, tokens, self._answering.max_model_len)

    async def detokenize(self, call: DetokenizeCall) -> str:
        """Return the text of token ids. Raises InvalidRequest, UnknownModel or Overloaded."""
        ids = call.token_ids
        try:
            validate(GenerateCall(model=call.model, input=TokenInput(ids or (0,))), self._answering.model.served)
        except PdserveError as error:
            error.field = "token_ids" if error.field == "token_ids.ids" else error.field
            raise
        with self._counted():
            if len(ids) <= MAX_INLINE_CHARS:
                return self._decoded(call)
            return await self._answering.on_thread(lambda: self._decoded(call))

    async def _encode_bare(self, text: str) -> tuple[int, ...]:
        encoder = self._answering.model.tokenizer

        def encode() -> tuple[int, ...]:
            return tuple(encoder.encode(text, add_special_tokens=False).ids)

        return encode() if len(text) <= MAX_INLINE_CHARS else await self._answering.on_thread(encode)

    def _decoded(self, call: DetokenizeCall) -> str:
        model = self._answering.model
        if call.show_special_tokens:
            return str(model.tokenizer.decode(list(call.token_ids), skip_special_tokens=False))
        detokenizer = model.detokenizer()
        pieces = [detokenizer.push(token_id) for token_id in call.token_ids]
        return "".join(pieces) + detokenizer.finish()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._num_calls >= MAX_CALLS:
            raise Overloaded(f"{self._num_calls} calls are under way", hint="retry in 1.0 s", retry_after_s=1.0)
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
