"""Token ids to text, one id at a time: the concatenation of what comes out is what decoding all ids at once gives.

Special tokens are skipped, but for those that a sequence is to show: markers of tool calls and of reasoning. Text comes out
only when no later token can change it, so U+FFFD appears only where it is final. Two ways, chosen once per model by its
decoder (formats of the `tokenizers` library's tokenizer.json):

- byte-level: each token stands for bytes; they run through an incremental UTF-8 decoder;
- pieces: everything else. New tokens are decoded behind a fixed anchor token, so that rules for the start of a text apply to
  the start only. A run of byte-fallback tokens is decoded when it ends, because its last byte decides about all of it.
"""

import codecs
import re
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """Decodes one sequence of token ids."""

    @property
    def num_undecided(self) -> int:
        """Number of latest tokens whose text is not all out yet."""
        ...

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that became final."""
        ...

    def finish(self) -> str:
        """Return the rest; nothing is pushed afterwards."""
        ...


class Vocabulary:
    """What decoding needs to know of a tokenizer, worked out once per model."""

    def __init__(self, tokenizer: Tokenizer, decoder_type: str) -> None:
        self.tokenizer = tokenizer
        self.is_byte_level = decoder_type == "ByteLevel"
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self.anchor_id = None if self.is_byte_level else _find_anchor(tokenizer, self.special_ids)

    def detokenizer(self, shown_ids: frozenset[int] = frozenset()) -> Detokenizer:
        """Return a detokenizer for a new sequence, which shows the special tokens `shown_ids`."""
        return ByteLevelDetokenizer(self, shown_ids) if self.is_byte_level else PieceDetokenizer(self, shown_ids)

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens."""
        ids = (self.tokenizer.token_to_id(text) for text in texts)
        return self.special_ids.intersection(token_id for token_id in ids if token_id is not None)

    def marker_text(self, token_id: int) -> str:
        """Return the text of a special token."""
        return self.tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a byte-level token stands for; none for special and unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def is_skipped(self, token_id: int) -> bool:
        """Whether the id has no text: a special token, or none of the vocabulary."""
        return token_id in self.special_ids or self.tokenizer.id_to_token(token_id) is None

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the id is a byte-fallback token."""
        return BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(token_id) or "") is not None

    def _look_up(self, token_id: int) -> bytes:
        token = None if token_id in self.special_ids else self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(BYTE_OF_CHAR[char] for char in token)
        except KeyError:
            return token.encode()


class ByteLevelDetokenizer:
    """For vocabularies whose tokens are bytes in disguise."""

    def __init__(self, vocabulary: Vocabulary, shown_ids: frozenset[int] = frozenset()) -> None:
        self._vocabulary, self._shown_ids = vocabulary, shown_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._lengths: deque[int] = deque()
        self._num_bytes = 0

    @property
    def num_undecided(self) -> int:
        """Number of latest tokens from the first that holds bytes of an unfinished character."""
        return len(self._lengths)

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that became final."""
        is_marker = token_id in self._shown_ids
        new = self._vocabulary.marker_text(token_id).encode() if is_marker else self._vocabulary.token_bytes(token_id)
        text = self._utf8.decode(new)
        self._lengths.append(len(new))
        self._num_bytes += len(new)
        num_pending = len(self._utf8.getstate()[0])
        while self._lengths and self._num_bytes - self._lengths[0] >= num_pending:
            self._num_bytes -= self._lengths.popleft()
        return text

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character, else nothing."""
        self._lengths.clear()
        return self._utf8.decode(b"", final=True)


class PieceDetokenizer:
    """For all other vocabularies."""

    def __init__(self, vocabulary: Vocabulary, shown_ids: frozenset[int] = frozenset()) -> None:
        self._vocabulary, self._shown_ids = vocabulary, shown_ids
        self._tokenizer = vocabulary.tokenizer
        self._is_start = True
        self._pending: list[int] = []
        self._in_bytes = False
        self._num_skipped = 0

    @property
    def num_undecided(self) -> int:
        """Number of latest tokens that wait for the end of a byte run, or for the text's first character."""
        return len(self._pending) + self._num_skipped

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that became final."""
        if token_id in self._shown_ids:
            return self._marker(token_id)
        if self._vocabulary.is_skipped(token_id):
            self._num_skipped += bool(self._pending)
            return ""
        is_byte = self._vocabulary.is_byte_token(token_id)
        if is_byte:
            self._pending.append(token_id)
            self._in_bytes = True
            return ""
        text = self._take() if self._in_bytes else ""
        self._in_bytes = False
        self._pending.append(token_id)
        return text + self._take()

    def finish(self) -> str:
        """Return the text of a byte run that nothing follows any more."""
        return self._take()

    def _marker(self, token_id: int) -> str:
        """A marker ends a byte run, and what stands behind it is no start of a text."""
        text = self._take()
        self._pending.clear()
        self._num_skipped = 0
        self._is_start = self._in_bytes = False
        return text + self._vocabulary.marker_text(token_id)

    def _take(self) -> str:
        if not self._pending:
            return ""
        anchor = self._vocabulary.anchor_id
        if self._is_start or anchor is None:
            text = self._tokenizer.decode(self._pending, skip_special_tokens=False)
            if not text:
                return ""  # nothing but stripped space so far: the next token is still the start
            self._is_start = False
        else:
            before = self._tokenizer.decode([anchor], skip_special_tokens=False)
            text = self._tokenizer.decode([anchor, *self._pending], skip_special_tokens=False)[len(before) :]
        self._pending.clear()
        self._num_skipped = 0
        return text


def _find_anchor(tokenizer: Tokenizer, special_ids: frozenset[int]) -> int | None:
    """Return a token that decodes to plain letters wherever it stands."""
    for token_id in range(min(tokenizer.get_vocab_size(), 1 << 20)):
        if token_id in special_ids:
            continue
        token = tokenizer.id_to_token(token_id)
        if token is not None and token.isascii() and token.isalpha():
            return token_id
    return None


def _byte_of_char() -> dict[str, int]:
    """Return the printable stand-in of each byte, as GPT-2's byte-level vocabulary defines them.

    Printable Latin-1 bytes stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(themselves)]
    table = {chr(byte): byte for byte in themselves}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()
