"""Log-probabilities of an answer, and of its prompt, as a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from pdserve.client import Answer


def scores_view(answer: "Answer") -> Table:
    """Return a row per token: where it stands, its id, its log-probability, and the alternatives, best first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("of", "token", "logprob"):
        table.add_column(column, justify="right" if column != "of" else "left", no_wrap=True)
    table.add_column("alternatives (token logprob)")
    for scored in answer.prompt:
        told = "" if scored.logprob is None else f"{scored.logprob:.3f}"
        table.add_row("prompt", str(scored.token_id), told, alternatives(scored.top_logprobs))
    for choice in answer.choices:
        of = f"answer {choice.sequence}" if len(answer.choices) > 1 else "answer"
        tops = choice.top_logprobs or [()] * len(choice.token_ids)
        for token_id, logprob, top in zip(choice.token_ids, choice.logprobs, tops, strict=True):
            table.add_row(of, str(token_id), f"{logprob:.3f}", alternatives(top))
    return table


def alternatives(top: Sequence[tuple[int, float]]) -> str:
    """Return the alternatives of one position in a line."""
    return "  ".join(f"{token_id} {logprob:.3f}" for token_id, logprob in top)
