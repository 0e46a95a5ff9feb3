"""Text and conversations to token ids, with the `tokenizers` library alone (AutoTokenizer would import torch)."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from pdserve.core.errors import InvalidRequest, ModelUnavailable
from pdserve.core.models import resolve_model_dir, served_name
from pdserve.router.chat.door import conversation_chars
from pdserve.router.chat.formats import NO_FORMATS, AnswerFormats, choose_formats
from pdserve.router.detokenizer import Detokenizer, Vocabulary
from pdserve.router.output import OutputText
from pdserve.router.request import (
    TextInput,
    TokenInput,
    ValidChat,
    ValidInput,
    ValidRequest,
)
from pdserve.router.template import ChatTemplate, load_template, read_config
from pdserve.router.validation import ServedModel

TOKENIZER_FILE = "tokenizer.json"
MAX_END_TOKENS = 16
"""Tokens of a prompt's end that show whether its template has opened the model's reasoning."""


@dataclass(frozen=True)
class TextModel:
    """The text side of a model: its name, tokenizer, template and vocabulary. Safe to use from several threads."""

    name: str
    vocab_size: int
    tokenizer_digest: str
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    template: ChatTemplate | None
    formats: AnswerFormats = NO_FORMATS

    @property
    def served(self) -> ServedModel:
        """What requests are checked against."""
        return ServedModel(self.name, self.vocab_size, self.template is not None, self.encode_word, self.formats.tools)

    @property
    def chat_choice(self) -> str:
        """How conversations are served, in words for the log."""
        if self.template is None:
            return "not served, the model has no chat template"
        calls = "are not read" if self.formats.tools is None else f"as {self.formats.tools}"
        return f"tool calls {calls}, reasoning {'as <think>' if self.formats.thinks else 'is not read'}"

    def check_size(self, given: ValidInput, max_tokens: int) -> None:
        """Raise InvalidRequest for text that cannot fit into `max_tokens`, however it is cut into tokens.

        Cheap, unlike encoding: a request must not cost seconds before it is refused.
        """
        match given:
            case TextInput(text):
                num_chars, field = len(text), "text"
            case ValidChat():
                num_chars, field = conversation_chars(given), "chat"
            case _:
                return
        most = max_tokens * self.longest_token_chars
        if num_chars > most:
            raise InvalidRequest(
                f"the prompt has {num_chars} characters, more than {max_tokens} tokens can hold",
                hint="send a shorter prompt",
                field=field,
            )

    @cached_property
    def longest_token_chars(self) -> int:
        """Characters of the vocabulary's longest token."""
        return max(len(token) for token in self.tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, given: ValidInput) -> tuple[int, ...]:
        """Return the prompt's ids. Raises InvalidRequest if the conversation or its template is at fault.

        Text gets the special tokens that the tokenizer adds by itself; a rendered conversation carries its own.
        """
        match given:
            case TokenInput(ids):
                return ids
            case TextInput(text):
                return tuple(self.tokenizer.encode(text, add_special_tokens=True).ids)
            case ValidChat():
                assert self.template is not None, "validation lets chat pass only with a template"
                text = self.template.render(given)
                text += self.formats.opening(given, text)
                return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_word(self, word: str) -> frozenset[tuple[int, ...]]:
        """Return the ways in which a word is encoded: at the start of a text, after a space, and within a text.

        The last is what stands behind a line break: vocabularies with word-start marks set one before every text.
        """
        anchor, inside = (self.tokenizer.encode(text, add_special_tokens=False).ids for text in ("\n", f"\n{word}"))
        ways = {tuple(self.tokenizer.encode(text, add_special_tokens=False).ids) for text in (word, f" {word}")}
        if inside[: len(anchor)] == anchor:
            ways.add(tuple(inside[len(anchor) :]))
        return frozenset(ways)

    def output(self, request: ValidRequest, prompt_ids: tuple[int, ...]) -> OutputText:
        """Return the way of one sequence's tokens to what the client is shown."""
        given = request.input
        if not isinstance(given, ValidChat):
            return OutputText(
                self.detokenizer(), request.stop, include_stop=request.include_stop, min_tokens=request.min_tokens
            )
        end = self.tokenizer.decode(list(prompt_ids[-MAX_END_TOKENS:]), skip_special_tokens=False)
        markers = self.vocabulary.special_ids_of(self.formats.markers(given))
        return OutputText(
            self.vocabulary.detokenizer(markers),
            request.stop,
            self.formats.reader(given, end),
            include_stop=request.include_stop,
            min_tokens=request.min_tokens,
        )

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one sequence."""
        return self.vocabulary.detokenizer()


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How conversations are rendered and read: a template instead of the model's, and the formats by name, `auto` or `none`."""

    template: Path | None = None
    tools: str = "auto"
    reasoning: str = "auto"


def load_text_model(model: str, chat: ChatSettings | None = None) -> TextModel:
    """Return the text side of a model, by alias or folder. Raises ModelUnavailable naming what is missing."""
    chat = chat or ChatSettings()
    folder = resolve_model_dir(model)
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelUnavailable(
            f"model {model} has no {TOKENIZER_FILE}", hint="save the tokenizer in its fast form into the model's folder"
        )
    raw = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(raw)
        decoder = json.loads(raw).get("decoder") or {}
    except ValueError as error:
        raise ModelUnavailable(f"{TOKENIZER_FILE} of {model} is damaged: {error}", hint="fetch it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    template = load_template(folder, chat.template)
    shown = "" if template is None else f"{template.source}\n{template.tools_source}"
    return TextModel(
        name=served_name(model),
        vocab_size=_vocab_size(folder, tokenizer),
        tokenizer_digest=hashlib.sha256(raw).hexdigest(),
        tokenizer=tokenizer,
        vocabulary=Vocabulary(tokenizer, _decoder_type(decoder)),
        template=template,
        formats=choose_formats(chat.tools, chat.reasoning, shown, tokenizer.get_vocab(with_added_tokens=True)),
    )


def _vocab_size(folder: Path, tokenizer: Tokenizer) -> int:
    """Return the number of ids that the model's embedding has."""
    config = read_config(folder / "config.json")
    text_config = config.get("text_config")
    for source in (config, text_config if isinstance(text_config, dict) else {}):
        size = source.get("vocab_size")
        if isinstance(size, int) and size > 0:
            return size
    return tokenizer.get_vocab_size(with_added_tokens=True)


def _decoder_type(decoder: dict[str, object]) -> str:
    """Return the decoder's type; a sequence of one step is that step."""
    steps = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and isinstance(steps, list) and len(steps) == 1:
        return _decoder_type(steps[0])
    return str(decoder.get("type", ""))
