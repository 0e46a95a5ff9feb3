"""The sequences of one session: each ends on its own; an attempt continues those that have not ended."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdserve.core.work import SampledToken
from pdserve.router.output import Gain
from pdserve.router.sequence import End, Sequence


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a batch of tokens led to. `ended` names the sequences that ended with it, and how."""

    gains: tuple[Gain, ...]
    ended: tuple[tuple[int, End], ...]
    has_progress: bool
    num_strays: int


class Sequences:
    """Sequences by their index in the request; at least one."""

    def __init__(self, by_index: Mapping[int, Sequence]) -> None:
        self._by_index = dict(by_index)
        self._num_unfinished = len(self._by_index)

    def __getitem__(self, index: int) -> Sequence:
        """Return one of them. Raises KeyError."""
        return self._by_index[index]

    @property
    def unfinished(self) -> list[int]:
        """Indexes of the sequences that have not ended, in order."""
        return sorted(index for index, sequence in self._by_index.items() if sequence.end is None)

    @property
    def is_complete(self) -> bool:
        """Whether every sequence has ended."""
        return self._num_unfinished == 0

    @property
    def ended_by_nodes(self) -> bool:
        """Whether the nodes know of every end themselves."""
        return all(sequence.end is None or sequence.end.by_node for sequence in self._by_index.values())

    @property
    def ends(self) -> dict[int, End]:
        """How the sequences ended that have ended."""
        return {index: sequence.end for index, sequence in self._by_index.items() if sequence.end is not None}

    @property
    def num_tokens(self) -> int:
        """Accepted tokens of all sequences."""
        return sum(len(sequence.token_ids) for sequence in self._by_index.values())

    @property
    def num_shown_tokens(self) -> int:
        """Tokens of all sequences that the client was given."""
        return sum(sequence.num_shown_tokens for sequence in self._by_index.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the client was given."""
        return max(sequence.num_shown_tokens for sequence in self._by_index.values())

    @property
    def num_remaining(self) -> int:
        """Tokens that may still come in the sequence with the longest way to go."""
        return max((self._by_index[index].num_remaining for index in self.unfinished), default=0)

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Output that all unfinished sequences have in common, for the next attempt; see `fit_one_attempt`."""
        unfinished = self.unfinished
        return tuple(self._by_index[unfinished[0]].token_ids) if unfinished else ()

    @property
    def fit_one_attempt(self) -> bool:
        """Whether one attempt can continue all that are unfinished: they still share one context, and are neighbours."""
        unfinished = self.unfinished
        if len(unfinished) < 2:
            return True
        are_neighbours = unfinished[-1] - unfinished[0] == len(unfinished) - 1
        return are_neighbours and not any(self._by_index[index].token_ids for index in unfinished)

    def part(self) -> list["Sequences"]:
        """Give away every unfinished sequence but the first, each alone."""
        parts = [Sequences({index: self._by_index.pop(index)}) for index in self.unfinished[1:]]
        self._num_unfinished -= len(parts)
        return parts

    def drop_early(self) -> None:
        """Forget tokens that came ahead of a missing one: their attempt is over."""
        for sequence in self._by_index.values():
            sequence.drop_early()

    def accept(self, tokens: Iterable[SampledToken], eos_token_ids: frozenset[int]) -> Accepted:
        """Take tokens of any of the sequences, in any order."""
        by_sequence: dict[int, list[SampledToken]] = {}
        num_strays, has_progress = 0, False
        for token in tokens:
            if token.sequence in self._by_index:
                by_sequence.setdefault(token.sequence, []).append(token)
            else:
                num_strays += 1
        gains, ended = [], []
        for index, own in by_sequence.items():
            sequence = self._by_index[index]
            had_ended, before = sequence.end is not None, len(sequence.token_ids)
            shown = sequence.accept(own, eos_token_ids)
            if shown:
                gains.append(Gain(index, shown))
            if sequence.end is not None and not had_ended:
                ended.append((index, sequence.end))
                self._num_unfinished -= 1
            has_progress = has_progress or len(sequence.token_ids) > before
        return Accepted(tuple(gains), tuple(ended), has_progress, num_strays)
