"""The lease of a stream: silence for too long means that the other side is gone. Time is passed in."""


class Lease:
    """Expires `lease_s` after the last sign of life, lengthened by this side's own lateness.

    `check` is meant to be called every `interval_s`; when it comes later than that, this process was busy, and messages may
    wait unread: the lease grows by the delay.
    """

    def __init__(self, lease_s: float, interval_s: float, now_s: float) -> None:
        self._lease_s, self._interval_s = lease_s, interval_s
        self._checked_s = now_s
        self._expires_s = now_s + lease_s

    def heard(self, now_s: float) -> None:
        """Take any message as a sign of life."""
        self._expires_s = max(self._expires_s, now_s + self._lease_s)

    def is_expired(self, now_s: float) -> bool:
        """Return whether the other side counts as gone."""
        self._expires_s += max(0.0, now_s - self._checked_s - self._interval_s)
        self._checked_s = now_s
        return now_s >= self._expires_s
