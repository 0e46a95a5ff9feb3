"""Where one sequence stands in a compiled grammar: the `Matcher` of its row."""

import numpy as np

from pdserve.grammar.compiling import CompiledGrammar
from pdserve.kernels.logits import ConstraintFailed, MaskArray


class GrammarMatcher:
    """Implements `kernels.logits.Matcher`. Starts at the beginning of the answer; moves by tokens only, so a copy made from
    a sequence's ids stands where the sequence does. Limits of the library that an answer runs into fail its row.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._matcher = compiled.start.deep_copy()
        self._num_words = -(-compiled.vocabulary.size // 32)
        self._fault = ""

    def accept(self, token_id: int) -> None:
        """Move on by a token. One that the grammar forbids is told at the next `fill`."""
        if self._fault:
            return
        if not self._matcher.consume_token(token_id):
            self._fault = f"after token {token_id}: {self._reason() or 'the answer was complete'}"

    def fill(self, mask: MaskArray) -> None:
        """Set the bits of the tokens that may follow in `mask` [ceil(vocabulary / 32)]; a complete answer allows its end tokens.

        Raises ConstraintFailed.
        """
        if not self._fault:
            words = (
                mask
                if len(mask) == self._num_words and mask.flags.c_contiguous
                else np.zeros(self._num_words, np.int32)
            )
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if words is not mask:
                shared = min(len(mask), self._num_words)
                mask[:shared] = words[:shared]
            if self._matcher.is_error():
                self._fault = self._reason()
        if self._fault:
            raise ConstraintFailed(f"the grammar cannot go on: {self._fault}")

    def _reason(self) -> str:
        return " ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())[:200]
