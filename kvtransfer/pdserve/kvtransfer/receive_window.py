"""How many payload bytes may be under way to a decode node: for each link, and for all of them together.

A window only ever grows, so what was once allowed stays allowed until it comes. Every link may have a small base under way. What
is beyond it is leased from one budget of all links, only as much as the link's granted transfers still have to bring, and goes
back as bytes come. So however many peers there are, at most the budget and each link's base wait in this process's sockets. With
the base alone a link still moves: none waits for another for ever.
"""

from collections.abc import Iterator

from pdserve.core.ids import TransferId
from pdserve.kvtransfer.channel import Route


class ReceiveWindow:
    """The window of one link. Made by `ReceiveBudget.open`."""

    def __init__(self, route: Route, budget: "ReceiveBudget") -> None:
        self.route = route
        self.limit = budget.base_bytes
        """What the peer may have sent since WELCOME, as it was told."""
        self.received = 0
        self._budget = budget
        self._needs: dict[TransferId, int] = {}
        self._need_bytes = 0

    @property
    def need_bytes(self) -> int:
        """What the granted transfers of this link still have to bring."""
        return self._need_bytes

    @property
    def leased_bytes(self) -> int:
        """What it may still bring beyond its base."""
        return max(0, self.limit - self.received - self._budget.base_bytes)

    def set_need(self, transfer_id: TransferId, num_bytes: int) -> bool:
        """Say what a transfer still has to bring, 0 if nothing. Return whether it is more than before."""
        more = num_bytes - self._needs.get(transfer_id, 0)
        if not more:
            return False
        before, self._need_bytes = self._need_bytes, self._need_bytes + more
        if not before or not self._need_bytes:
            self._budget.count_need(before=before, after=self._need_bytes)
        if num_bytes:
            self._needs[transfer_id] = num_bytes
        else:
            self._needs.pop(transfer_id, None)
        return more > 0

    def take(self, num_bytes: int) -> bool:
        """A payload came and is done with. Return False if it was beyond the window."""
        before = self.limit - self.received
        self.received += num_bytes
        if before > self._budget.base_bytes:
            self._budget.count_lease(-min(num_bytes, before - self._budget.base_bytes))
        return num_bytes <= before

    def grow(self) -> bool:
        """Move the limit as far as it may go now, if that is worth a beat. Return whether it moved.

        That is a quarter of the window; of a small one half, so that half of the base, which holds a frame, may always be under
        way. A link that could use more than the budget has left is noted, and told when there is room.
        """
        under_way, base = self.limit - self.received, self._budget.base_bytes
        need = self._need_bytes
        if not need or base + need - under_way < base // 2:
            # Most often: it may bring already whatever it needs to.
            self._budget.note(self, is_short=False, has_grown=False)
            return False
        target, is_short = self._budget.target(self)
        growth, worth_it = target - under_way, max(target // 4, min(target // 2, 2 * base))
        has_grown = growth >= max(1, worth_it)
        self._move(growth if has_grown else 0)
        self._budget.note(self, is_short, has_grown)
        return has_grown

    def top_up(self) -> None:
        """Move the limit as far as it may go now, for a beat that goes anyway: at least the base may be under way after it."""
        target, is_short = self._budget.target(self)
        growth = self.received + target - self.limit
        self._move(max(0, growth))
        self._budget.note(self, is_short, growth > 0)

    def _move(self, growth: int) -> None:
        if growth:
            before = self.leased_bytes
            self.limit += growth
            self._budget.count_lease(self.leased_bytes - before)


class ReceiveBudget:
    """What the windows of all links lease from. `window_bytes` is the most that one link may have under way."""

    def __init__(self, base_bytes: int, window_bytes: int, budget_bytes: int) -> None:
        self.base_bytes = base_bytes
        self.leased_bytes = 0
        self._window_bytes = window_bytes
        self._budget_bytes = budget_bytes
        self._num_needing = 0
        self._windows: set[ReceiveWindow] = set()
        self._short: dict[ReceiveWindow, None] = {}
        """Those that could use more than there was, in the order in which they are told of room."""

    def open(self, route: Route) -> ReceiveWindow:
        """Make the window of a link that is welcomed: its base."""
        window = ReceiveWindow(route, self)
        self._windows.add(window)
        return window

    def close(self, window: ReceiveWindow) -> None:
        """The link is gone, and all it leased comes back."""
        self._windows.discard(window)
        self._short.pop(window, None)
        self.count_lease(-window.leased_bytes)
        self.count_need(before=window.need_bytes, after=0)

    @property
    def has_room_for_others(self) -> bool:
        """Whether links came off short, and something came back since."""
        return bool(self._short) and self.leased_bytes < self._budget_bytes

    def told_of_room(self) -> Iterator[Route]:
        """Grow windows that came off short, as long as there is room, and yield whose limit has to be told."""
        while self.has_room_for_others:
            window = next(iter(self._short))
            if window.grow():
                yield window.route
            elif window in self._short:
                # Too little for a beat. More will come, and it is still the next one then.
                return

    def target(self, window: ReceiveWindow) -> tuple[int, bool]:
        """Return what may be under way on a link now, and whether it could use more than is left for it."""
        wanted = min(self.base_bytes + window.need_bytes, self._window_bytes)
        share = self._budget_bytes // max(1, self._num_needing)
        left = window.leased_bytes + self._budget_bytes - self.leased_bytes
        most = min(wanted, self.base_bytes + share)
        return min(most, self.base_bytes + left), most > self.base_bytes + left

    def note(self, window: ReceiveWindow, is_short: bool, has_grown: bool) -> None:
        """Remember a link that came off short, behind all others if it got something; forget one that did not."""
        if self._short and (has_grown or not is_short):
            self._short.pop(window, None)
        if is_short:
            self._short.setdefault(window)

    def count_lease(self, more: int) -> None:
        """A window leased that much more."""
        self.leased_bytes += more

    def count_need(self, before: int, after: int) -> None:
        """What a link needs has changed."""
        self._num_needing += (after > 0) - (before > 0)

    def check_invariants(self) -> None:
        """Raise AssertionError if more may be under way than the bounds allow, or the counts are wrong."""
        assert sum(window.leased_bytes for window in self._windows) == self.leased_bytes, "leases are counted wrongly"
        assert self.leased_bytes <= self._budget_bytes, "more is leased than there is"
        assert sum(window.need_bytes > 0 for window in self._windows) == self._num_needing, "needs are counted wrongly"
        assert self._short.keys() <= self._windows, "a window of a link that is gone waits for room"
        for window in self._windows:
            assert window.need_bytes == sum(window._needs.values()), "the needs of a link are counted wrongly"
            most = max(self._window_bytes, self.base_bytes)
            assert window.limit - window.received <= most, "more is under way on one link than its window"
