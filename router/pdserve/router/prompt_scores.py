"""The log-probabilities of a prompt, assembled from what prefill nodes send; shown once, whole, and before any output."""

from collections.abc import Sequence

from pdserve.core.work import TokenScore
from pdserve.router.output import PromptToken


class PromptScores:
    """Scores by position. The first token has none: nothing stands before it."""

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self._prompt_ids = prompt_ids
        self._scores: dict[int, TokenScore] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every token but the first has its score."""
        return len(self._scores) == len(self._prompt_ids) - 1

    def take(self, start: int, scores: Sequence[TokenScore]) -> bool:
        """Take scores from position `start` on; a position that is known keeps its score. Return whether they fit the prompt."""
        if start < 1 or start + len(scores) > len(self._prompt_ids):
            return False
        for position, score in enumerate(scores, start):
            self._scores.setdefault(position, score)
        return True

    def tokens(self) -> tuple[PromptToken, ...]:
        """Return the scored prompt; to be called when it is complete."""
        first = PromptToken(self._prompt_ids[0], None)
        rest = (
            PromptToken(token_id, self._scores[position].logprob, self._scores[position].top)
            for position, token_id in enumerate(self._prompt_ids[1:], 1)
        )
        return (first, *rest)
