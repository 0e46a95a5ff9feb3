"""Payloads that libzmq may still read, and when to look whether it has let go of them."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import zmq

MANY_LENT = 3
"""From so many payloads inside sockets on, somebody may wait for one of them."""
_FIRST_LOOK_S = 0.001
_LAST_LOOK_S = 0.016


@dataclass(slots=True)
class _Lent:
    """One payload. `sign` ends the channel's wait when pyzmq lets the payload go."""

    tracker: zmq.MessageTracker
    on_released: Callable[[], None]
    sign: "weakref.ref[memoryview]"


class LentPayloads:
    """The payloads inside a channel's sockets. Used by the channel's thread; `wake` is called on pyzmq's.

    A sender that has but a few buffers (`num_buffers`) waits for each of them, and is woken for each.
    """

    def __init__(self, num_buffers: int, wake: Callable[[], None]) -> None:
        self._many = min(num_buffers, MANY_LENT)
        self._wake = wake
        self._lent: list[_Lent] = []
        self._look_s = _FIRST_LOOK_S

    def view(self, payload: memoryview) -> "tuple[memoryview, weakref.ref[memoryview]]":
        """Return a view to send, and the sign that it is no longer used."""
        # A view of its own: pyzmq's thread drops it right after it marked the tracker. Waiting for the next look at the trackers
        # instead would let `max frames in the socket` through per millisecond, however short they are.
        lent = memoryview(payload)
        return lent, weakref.ref(lent, self._let_go)

    def add(
        self, tracker: zmq.MessageTracker, on_released: Callable[[], None], sign: "weakref.ref[memoryview]"
    ) -> None:
        """A socket took a view."""
        self._lent.append(_Lent(tracker, on_released, sign))
        self._look_s = _FIRST_LOOK_S

    def next_look_s(self) -> float | None:
        """Return in how many seconds to look again, later each time; None while nothing is lent."""
        if not self._lent:
            return None
        look_s, self._look_s = self._look_s, min(2 * self._look_s, _LAST_LOOK_S)
        return look_s

    def reap(self) -> bool:
        """Tell the owners of payloads that libzmq is done with; return whether there were any."""
        if not self._lent:
            return False
        done = [lent for lent in self._lent if lent.tracker.done]
        if done:
            self._lent = [lent for lent in self._lent if lent not in done]
            self._look_s = _FIRST_LOOK_S
            for lent in done:
                lent.on_released()
        return bool(done)

    def release_all(self) -> None:
        """Tell all owners: after the context's `term` libzmq reads nothing any more; pyzmq's own thread only has to say so."""
        for lent in self._lent:
            lent.on_released()
        self._lent.clear()

    def _let_go(self, sign: "weakref.ref[memoryview]") -> None:  # noqa: ARG002 - the signature of such callbacks
        """End the channel's wait: a tracker is done. On pyzmq's thread.

        Nobody waits for one of a few; those are found in the next turn, or when it is time to look.
        """
        if len(self._lent) >= self._many:
            self._wake()
