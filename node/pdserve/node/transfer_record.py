"""Whether transfers work, as far as the last ones tell: a node that is linked to its peers may still fail all of them. Pure."""

FAILURES_IN_A_ROW = 3
TOGETHER_S = 1.0
"""Failures within this time are one: a peer that is lost takes all of its transfers along."""
FORGET_S = 30.0
"""Without another failure for so long, the node is tried again: nobody may have sent work to one that is not ready."""

SAYS_NOTHING = frozenset(
    {"peer_aborted", "gone_unknown", "gone_over", "no_open", "over", "shutdown", "kv_nack_shutdown"}
)
"""Reasons of failures that do not lie in the path: the other node or the router ended the request, or a node stops."""


class TransferRecord:
    """The failures since the last transfer that worked. All times are on one clock, seconds."""

    def __init__(self) -> None:
        self._num_in_a_row = 0
        self._counted_s = self._last_s = 0.0
        self._last_reason = ""

    def worked(self) -> None:
        """A transfer came to its good end."""
        self._num_in_a_row = 0

    def failed(self, reason: str, now_s: float) -> None:
        """A transfer failed; `reason` is the corridor's."""
        if reason in SAYS_NOTHING:
            return
        if now_s > self._last_s + FORGET_S:
            self._num_in_a_row = 0
        if self._num_in_a_row == 0 or now_s >= self._counted_s + TOGETHER_S:
            self._num_in_a_row += 1
            self._counted_s = now_s
        self._last_s, self._last_reason = now_s, reason

    def fault(self, now_s: float) -> str:
        """Return what is wrong with transfers, or "" if nothing is known."""
        if self._num_in_a_row < FAILURES_IN_A_ROW or now_s > self._last_s + FORGET_S:
            return ""
        return f"transfers failed {self._num_in_a_row} times in a row; the last: {self._last_reason}"
