"""The log-probabilities of a prompt, assembled from what prefill nodes send; shown once, whole, and before any output."""

from collections.abc import Sequence

from pdserve.core.work import TokenScore
from pdserve.router.packed import PackedPrompt, packed_score


class PromptScores:
    """Scores by position. The first token has none: nothing stands before it."""

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self._prompt_ids = prompt_ids
        self._scores: list[bytes | None] = [None] * len(prompt_ids)
        self._num_missing = len(prompt_ids) - 1

    @property
    def is_complete(self) -> bool:
        """Whether every token but the first has its score."""
        return self._num_missing == 0

    def take(self, start: int, scores: Sequence[TokenScore]) -> bool:
        """Take scores from position `start` on; a position that is known keeps its score. Return whether they fit the prompt."""
        if start < 1 or start + len(scores) > len(self._prompt_ids):
            return False
        for position, score in enumerate(scores, start):
            if self._scores[position] is None:
                self._scores[position] = packed_score(score)
                self._num_missing -= 1
        return True

    def give(self) -> PackedPrompt:
        """Hand over the scored prompt, once it is complete: it is kept no longer here than there."""
        prompt = PackedPrompt(self._prompt_ids, self._scores)
        self._scores = []
        return prompt
