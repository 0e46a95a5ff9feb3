"""Log lines for people."""

import logging

import pytest

from pdserve.core.logs import TextFormatter


@pytest.mark.parametrize(("peer", "is_repeated"), [("127.0.0.1:1", False), ("127.0.0.1:2", True)])
def test_peer_that_the_message_names_is_not_told_twice(peer: str, is_repeated: bool) -> None:
    record = logging.makeLogRecord({"msg": "lost 127.0.0.1:1", "peer": peer, "request_id": "lost"})
    line = TextFormatter().format(record)
    assert ("peer=" in line) == is_repeated
    assert line.endswith("request_id=lost") or is_repeated


def test_control_characters_never_reach_a_terminal() -> None:
    record = logging.makeLogRecord({"msg": "ended: a\nb", "request_id": "x\x1b[2J"})
    line = TextFormatter().format(record)
    assert line.isprintable()
    assert line.endswith(r"ended: a\x0ab  request_id=x\x1b[2J")
