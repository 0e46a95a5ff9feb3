"""The outbox keeps tokens per sequence, in an order that a router can follow."""

from pdserve.core.work import FinishReason, LegOutcome
from pdserve.node.outbox import Outbox
from pdserve.node.pb import ended_event, granted_event
from tests.node.works import leg


def test_a_blocked_stream_merges_steps() -> None:
    outbox = Outbox()
    for index in range(1000):
        for session in range(3):
            outbox.add_tokens(leg(session), index, (index,), (-0.5,), None)
    message = outbox.take()
    assert message is not None
    assert [list(entry.token_ids) for entry in message.tokens] == [list(range(1000))] * 3
    assert [entry.first_index for entry in message.tokens] == [0, 0, 0]
    assert outbox.take() is None
    assert outbox.size_bytes == 0


def test_tokens_after_an_event_of_the_same_leg_go_into_a_later_message() -> None:
    outbox = Outbox()
    outbox.add_event(leg(1), granted_event(leg(1), 0))
    outbox.add_tokens(leg(2), 0, (7,), (-1.0,), None)
    outbox.add_tokens(leg(1), 1, (8,), (-1.0,), FinishReason.LENGTH)
    outbox.add_event(leg(1), ended_event(leg(1), LegOutcome.FINISHED, "finished", ""))
    first, second, third = outbox.take(), outbox.take(), outbox.take()
    assert first is not None
    assert second is not None
    assert [entry.session_id for entry in first.tokens] == [2]
    assert [event.WhichOneof("event") for event in first.events] == ["granted"]
    assert [entry.session_id for entry in second.tokens] == [1]
    assert int(second.tokens[0].finish_reason) == FinishReason.LENGTH
    assert [event.WhichOneof("event") for event in second.events] == ["ended"]
    assert third is None
