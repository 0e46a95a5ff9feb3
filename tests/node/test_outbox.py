"""The outbox keeps tokens per sequence, in an order that a router can follow."""

from pdserve.core.work import FinishReason, LegOutcome, SampledToken, TokenScore
from pdserve.node.legs import MAX_SCORES_PER_EVENT
from pdserve.node.outbox import Outbox
from pdserve.node.pb import ended_event, granted_event, prompt_scores_event
from tests.node.works import leg


def test_a_blocked_stream_merges_steps() -> None:
    outbox = Outbox()
    for index in range(1000):
        for session in range(3):
            outbox.add_token(leg(session), SampledToken(index, index, -0.5))
    message = outbox.take()
    assert message is not None
    assert [list(entry.token_ids) for entry in message.tokens] == [list(range(1000))] * 3
    assert [entry.first_index for entry in message.tokens] == [0, 0, 0]
    assert outbox.take() is None
    assert outbox.size_bytes == 0


def test_tokens_after_an_event_of_the_same_leg_go_into_a_later_message() -> None:
    outbox = Outbox()
    outbox.add_event(leg(1), granted_event(leg(1), 0))
    outbox.add_token(leg(2), SampledToken(0, 7, -1.0))
    outbox.add_token(leg(1), SampledToken(1, 8, -1.0, FinishReason.LENGTH))
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


def test_each_sequence_of_a_leg_has_its_own_entry_with_its_alternatives() -> None:
    outbox = Outbox()
    for index in range(1, 4):
        for sequence in (2, 5):
            top = ((sequence, -0.25), (index, -2.0))
            outbox.add_token(leg(1), SampledToken(index, 10 * sequence + index, -0.25, None, sequence, top))
    message = outbox.take()
    assert message is not None
    assert [(entry.sequence, list(entry.token_ids)) for entry in message.tokens] == [
        (2, [21, 22, 23]),
        (5, [51, 52, 53]),
    ]
    assert [list(top.token_ids) for top in message.tokens[1].top_logprobs] == [[5, 1], [5, 2], [5, 3]]
    assert [list(top.logprobs) for top in message.tokens[0].top_logprobs] == [[-0.25, -2.0]] * 3


def test_no_message_is_larger_than_the_contract_allows_and_none_is_lost() -> None:
    """A blocked stream of a long answer with many alternatives, and the scores of a long prompt."""
    outbox = Outbox()
    top = tuple((2**31 + rank, -1.5) for rank in range(20))
    scores = [TokenScore(-1.5, top)] * MAX_SCORES_PER_EVENT
    for _ in range(8):
        outbox.add_event(leg(2), prompt_scores_event(leg(2), 2**31, scores))
    for index in range(4000):
        for sequence in range(4):
            outbox.add_token(leg(1), SampledToken(index, 2**32 - 1, -0.5, None, sequence, top))
    waiting = outbox.size_bytes
    sizes, num_tokens, num_scores = [], 0, 0
    while (message := outbox.take()) is not None:
        sizes.append(message.ByteSize())
        num_tokens += sum(len(entry.token_ids) for entry in message.tokens)
        num_scores += sum(len(event.prompt_logprobs.logprobs) for event in message.events)
    assert max(sizes) <= 1 << 20
    assert len(sizes) > 2
    assert (num_tokens, num_scores) == (16000, 8 * MAX_SCORES_PER_EVENT)
    assert sum(sizes) <= waiting, "what is counted is not less than what is sent"
    assert outbox.size_bytes == 0
