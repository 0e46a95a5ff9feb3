"""Draws docs/kv-transfer-states.md from the transition tables: `python -m tests.kvtransfer.diagrams`."""

from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import TypeVar

from pdserve.core.lifecycle import TransitionTable
from pdserve.kvtransfer.receiver import RECEIVE_TABLE
from pdserve.kvtransfer.receiver_link import RECEIVER_LINK_TABLE
from pdserve.kvtransfer.sender import SEND_TABLE
from pdserve.kvtransfer.sender_link import SENDER_LINK_TABLE

PAGE = Path(__file__).resolve().parents[2] / "docs/kv-transfer-states.md"
S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)

OPENING = """# States of the KV transfer

Made from the transition tables by `python -m tests.kvtransfer.diagrams`; a test compares. Do not edit.

A label lists the triggers of one move. Every pair of a state and a trigger that is not drawn is listed as *ignored* in its table:
a late, repeated or reordered event, which is counted and changes nothing. Self-moves are drawn; they renew a deadline.
The deadline of every state, and who owns it, stand in [kv-transfer.md](kv-transfer.md).
"""


def diagram(table: TransitionTable[S, E]) -> str:
    """Return one table as a section with a mermaid state diagram."""
    triggers: dict[tuple[S, S], list[str]] = defaultdict(list)
    for (state, event), following in table.moves.items():
        triggers[state, following].append(event.name)
    lines = [f"## {table.name.capitalize()}", "", "```mermaid", "stateDiagram-v2", f"    [*] --> {table.initial.name}"]
    for state in type(table.initial):
        for following in type(table.initial):
            names = triggers.get((state, following))
            if names:
                lines.append(f"    {state.name} --> {following.name}: {', '.join(sorted(names))}")
        if state in table.terminal:
            lines.append(f"    {state.name} --> [*]")
    lines += ["```", "", f"{len(table.moves)} moves, {len(table.ignored)} ignored pairs, none unanswered."]
    assert not table.missing()
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    sections = [
        diagram(SEND_TABLE),
        diagram(RECEIVE_TABLE),
        diagram(SENDER_LINK_TABLE),
        diagram(RECEIVER_LINK_TABLE),
    ]
    return OPENING + "\n" + "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
