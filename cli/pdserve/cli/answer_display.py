"""An answer on a terminal, or in a pipe, as it comes."""

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from pdserve.client import Choice, Delta, Part

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
KEPT = "\n\t"


class AnswerDisplay:
    """Writes text as it comes, reasoning dimmed before it, and tool calls after it.

    Several sequences come one after the other, each as it ends. A pipe gets no reasoning. A terminal never gets the model's
    control characters: they are shown, not obeyed.
    """

    def __init__(self, out: TextIO, *, num_sequences: int = 1) -> None:
        self._out, self._num_sequences = out, num_sequences
        self._is_terminal = out.isatty()
        self._is_dim = self._has_begun = self._has_content = False
        self._choices: dict[int, Choice] = {}

    def show(self, part: "Part") -> None:
        """Write what a part of the answer adds."""
        from pdserve.client import Choice, Delta, Finished

        if self._num_sequences == 1:
            if isinstance(part, Delta):
                self._gain(part.reasoning, part.text)
                self._call(part)
        elif isinstance(part, Delta):
            self._choices.setdefault(part.sequence, Choice(part.sequence)).deltas.append(part)
        elif isinstance(part, Finished):
            choice = self._choices.pop(part.sequence, Choice(part.sequence))
            self._write(f"[{part.sequence}] ")
            self._gain(choice.reasoning, choice.text)
            for delta in choice.deltas:
                self._call(delta)
            self.end()

    def end(self) -> None:
        """End the line, if anything was written."""
        self._dim(False)
        if self._has_begun:
            self._write("\n")
        self._has_begun = self._has_content = False

    def _gain(self, reasoning: str, text: str) -> None:
        self._has_content |= bool(text or (reasoning and self._is_terminal))
        if reasoning and self._is_terminal:
            self._dim(True)
            self._write(reasoning)
        if text:
            if self._is_dim:
                self._dim(False)
                self._write("\n")
            self._write(text)

    def _call(self, delta: "Delta") -> None:
        """Write what tool calls gained: NAME ARGUMENTS, each on a line of its own."""
        for gained in delta.tool_calls:
            if gained.name:
                self._dim(False)
                self._write(f"\n{gained.name} " if self._has_content else f"{gained.name} ")
            self._write(gained.arguments)
            self._has_content = True

    def _dim(self, wanted: bool) -> None:
        if wanted != self._is_dim:
            self._out.write(DIM if wanted else PLAIN)
            self._is_dim = wanted

    def _write(self, text: str) -> None:
        self._has_begun = True
        self._out.write(shown(text) if self._is_terminal else text)
        self._out.flush()


def shown(text: str) -> str:
    """Return `text` with control characters spelt out, line ends and tabs apart; one cannot act on the terminal then."""
    return "".join(repr(c)[1:-1] if is_control(c) and c not in KEPT else c for c in text)


def is_control(character: str) -> bool:
    """Whether a terminal may obey the character instead of showing it (C0, DEL, C1)."""
    code = ord(character)
    return code < 32 or 127 <= code < 160
