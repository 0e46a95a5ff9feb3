"""The state diagrams in docs are those of the code, and every state that is drawn can be reached and left."""

from enum import Enum

import pytest

from pdserve.core.lifecycle import TransitionTable
from pdserve.kvtransfer.receiver import RECEIVE_TABLE
from pdserve.kvtransfer.receiver_link import RECEIVER_LINK_TABLE
from pdserve.kvtransfer.sender import SEND_TABLE
from pdserve.kvtransfer.sender_link import SENDER_LINK_TABLE
from tests.kvtransfer.diagrams import PAGE, page

TABLES = [SEND_TABLE, RECEIVE_TABLE, SENDER_LINK_TABLE, RECEIVER_LINK_TABLE]


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.kvtransfer.diagrams`"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_state_is_reached_and_every_live_one_is_left(table: TransitionTable[Enum, Enum]) -> None:
    moves = [(state, following) for (state, _), following in table.moves.items()]
    states = set(type(table.initial))
    reached, grew = {table.initial}, True
    while grew:
        more = {following for state, following in moves if state in reached} - reached
        reached |= more
        grew = bool(more)
    assert reached == states
    for state in states:
        leaves = any(before is state and after is not state for before, after in moves)
        assert leaves is (state not in table.terminal), state
