"""Text and conversations to token ids, with the `tokenizers` library alone (AutoTokenizer would import torch)."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from pdserve.core.errors import InvalidRequest, ModelUnavailable
from pdserve.core.models import resolve_model_dir, served_name
from pdserve.router.detokenizer import Detokenizer, Vocabulary
from pdserve.router.request import ChatInput, PromptInput, TextInput, TokenInput
from pdserve.router.template import ChatTemplate, load_template, read_config
from pdserve.router.validation import ServedModel

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class TextModel:
    """The text side of a model: its name, tokenizer, template and vocabulary. Safe to use from several threads."""

    name: str
    vocab_size: int
    tokenizer_digest: str
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    template: ChatTemplate | None

    @property
    def served(self) -> ServedModel:
        """What requests are checked against."""
        return ServedModel(self.name, self.vocab_size, self.template is not None, self.encode_word)

    def check_size(self, given: PromptInput, max_tokens: int) -> None:
        """Raise InvalidRequest for text that cannot fit into `max_tokens`, however it is cut into tokens.

        Cheap, unlike encoding: a request must not cost seconds before it is refused.
        """
        match given:
            case TextInput(text):
                num_chars, field = len(text), "text"
            case ChatInput():
                num_chars, field = sum(len(turn.content or "") for turn in given.turns), "chat"
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

    def encode(self, given: PromptInput) -> tuple[int, ...]:
        """Return the prompt's ids. Raises InvalidRequest if the chat template refuses the conversation.

        Text gets the special tokens that the tokenizer adds by itself; a rendered conversation carries its own.
        """
        match given:
            case TokenInput(ids):
                return ids
            case TextInput(text):
                return tuple(self.tokenizer.encode(text, add_special_tokens=True).ids)
            case ChatInput():
                assert self.template is not None, "validation lets chat pass only with a template"
                text = self.template.render(given)
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

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one sequence."""
        return self.vocabulary.detokenizer()


def load_text_model(model: str) -> TextModel:
    """Return the text side of a model, by alias or folder. Raises ModelUnavailable naming what is missing."""
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
    return TextModel(
        name=served_name(model),
        vocab_size=_vocab_size(folder, tokenizer),
        tokenizer_digest=hashlib.sha256(raw).hexdigest(),
        tokenizer=tokenizer,
        vocabulary=Vocabulary(tokenizer, _decoder_type(decoder)),
        template=load_template(folder),
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
