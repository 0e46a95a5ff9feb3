"""What a single token looks like in log-probabilities: its text, and its bytes."""

from pdserve.router.detokenizer import Vocabulary


class TokenTexts:
    """The text and bytes of tokens, looked up once each."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text; of a special token, its name."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        """Return the token's text; bytes that are no whole character are U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")

    def _look_up(self, token_id: int) -> bytes:
        vocabulary = self._vocabulary
        tokenizer = vocabulary.tokenizer
        name = tokenizer.id_to_token(token_id) or ""
        if vocabulary.is_skipped(token_id):
            return name.encode()
        if vocabulary.is_byte_level:
            return vocabulary.token_bytes(token_id)
        if vocabulary.is_byte_token(token_id):
            return bytes((int(name[3:5], 16),))
        if vocabulary.anchor_id is None:
            return tokenizer.decode([token_id], skip_special_tokens=False).encode()
        before: str = tokenizer.decode([vocabulary.anchor_id], skip_special_tokens=False)
        whole: str = tokenizer.decode([vocabulary.anchor_id, token_id], skip_special_tokens=False)
        return whole[len(before) :].encode()
