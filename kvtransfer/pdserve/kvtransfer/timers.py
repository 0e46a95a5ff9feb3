"""Deadlines of many things at once: cheap to move, cheap to ask for the next one."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """One deadline per key. A deadline that moves later costs a dictionary write; the heap catches up when it comes due."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._queued: dict[K, float] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: K) -> bool:
        return key in self._due

    def set(self, key: K, due_s: float) -> None:
        """Give `key` a deadline in place of the one it had."""
        self._due[key] = due_s
        if self._queued.get(key, float("inf")) > due_s:
            self._push(key, due_s)

    def clear(self, key: K) -> None:
        """Drop the deadline of `key`, if it has one."""
        self._due.pop(key, None)

    def next_s(self) -> float | None:
        """Return the earliest deadline."""
        while self._heap:
            queued_s, _, key = self._heap[0]
            due_s = self._due.get(key)
            if due_s == queued_s:
                return queued_s
            heapq.heappop(self._heap)
            if self._queued.get(key) == queued_s:
                del self._queued[key]
                if due_s is not None:
                    self._push(key, due_s)
        return None

    def take_expired(self, now_s: float) -> list[K]:
        """Remove and return all keys whose deadlines have passed, earliest first."""
        expired = []
        while (due_s := self.next_s()) is not None and due_s <= now_s:
            _, _, key = heapq.heappop(self._heap)
            self._queued.pop(key, None)
            del self._due[key]
            expired.append(key)
        return expired

    def _push(self, key: K, due_s: float) -> None:
        self._queued[key] = due_s
        self._num_pushed += 1
        heapq.heappush(self._heap, (due_s, self._num_pushed, key))
