"""The life cycle of a session: states, moves, and the one table that says what leads where."""

from enum import Enum

from pdserve.core.lifecycle import TransitionTable


class SessionState(Enum):
    """Where a session stands."""

    ADMITTED = "admitted"
    """Waits for nodes: before the first attempt, or between two."""
    PLACED = "placed"
    """Nodes are chosen; the submits are on their way into the streams."""
    PREFILLING = "prefilling"
    """Submitted; no token of this attempt yet."""
    HANDING_OVER = "handing_over"
    """The attempt's first token is here; the KV is not adopted."""
    DECODING = "decoding"
    """The decode node has the KV: only its leg matters from here on."""
    FINISHED = "finished"
    """The sequence is complete."""
    FAILED = "failed"
    """The client gets an error."""
    CANCELLED = "cancelled"
    """The client is gone."""


class SessionMove(Enum):
    """What moves a session."""

    PLACE = "place"
    SUBMIT = "submit"
    FIRST_TOKEN = "first_token"  # noqa: S105 - no password
    ADOPT = "adopt"
    END_ATTEMPT = "end_attempt"
    COMPLETE = "complete"
    FAIL = "fail"
    CANCEL = "cancel"


_S, _M = SessionState, SessionMove
TERMINAL = frozenset({_S.FINISHED, _S.FAILED, _S.CANCELLED})
IN_ATTEMPT = (_S.PLACED, _S.PREFILLING, _S.HANDING_OVER, _S.DECODING)
_ALIVE = (_S.ADMITTED, *IN_ATTEMPT)

SESSION_TABLE = TransitionTable(
    name="session",
    initial=_S.ADMITTED,
    terminal=TERMINAL,
    moves={
        (_S.ADMITTED, _M.PLACE): _S.PLACED,
        (_S.PLACED, _M.SUBMIT): _S.PREFILLING,
        (_S.PLACED, _M.FIRST_TOKEN): _S.HANDING_OVER,
        (_S.PREFILLING, _M.FIRST_TOKEN): _S.HANDING_OVER,
        (_S.PLACED, _M.ADOPT): _S.DECODING,
        (_S.PREFILLING, _M.ADOPT): _S.DECODING,
        (_S.HANDING_OVER, _M.ADOPT): _S.DECODING,
        **{(state, _M.END_ATTEMPT): _S.ADMITTED for state in IN_ATTEMPT},
        **{(state, _M.COMPLETE): _S.FINISHED for state in IN_ATTEMPT},
        **{(state, _M.FAIL): _S.FAILED for state in _ALIVE},
        **{(state, _M.CANCEL): _S.CANCELLED for state in _ALIVE},
    },
    ignored=frozenset(
        {(state, _M.PLACE) for state in IN_ATTEMPT}
        | {(_S.ADMITTED, move) for move in (_M.SUBMIT, _M.FIRST_TOKEN, _M.ADOPT, _M.END_ATTEMPT, _M.COMPLETE)}
        | {(state, _M.SUBMIT) for state in IN_ATTEMPT[1:]}
        | {(state, _M.FIRST_TOKEN) for state in IN_ATTEMPT[2:]}
        | {(_S.DECODING, _M.ADOPT)}
        | {(state, move) for state in TERMINAL for move in _M}
    ),
)
