"""Every end at every stage, from either side, by message, loss or deadline: named, answered, nothing left."""

from functools import partial

import pytest

from pdserve.core.ids import TransferId
from pdserve.kvtransfer.events import ReceiveFailed, SendFailed
from pdserve.kvtransfer.messages import (
    Abort,
    Ack,
    Commit,
    Data,
    Gone,
    Grant,
    Nack,
    Open,
)
from tests.kvtransfer.nodes import settings
from tests.kvtransfer.world import World, failure, loss

STAGES = ["waiting", "opening", "granted", "streaming", "committed"]


def at_stage(world: World, stage: str) -> TransferId:
    """Bring a transfer to a stage of the sender."""
    if stage == "committed":
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Commit) else [frames]
    if stage != "waiting":
        world.meet()
    transfer_id = world.open(grant=stage not in ("waiting", "opening"))
    if stage in ("streaming", "committed"):
        world.mark(transfer_id, range(4), range(10))
    if stage == "committed":
        world.mark(transfer_id, range(4), range(10, 20))
        world.commit(transfer_id)
    world.fault = lambda *args: [args[3]]
    return transfer_id


class TestEnds:
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize(("finished", "busy"), [(False, False), (True, False), (False, True)])
    def test_the_sender_aborts(self, stage: str, finished: bool, busy: bool) -> None:
        world = World()
        transfer_id = at_stage(world, stage)
        world.sender.abort(transfer_id, "cancelled", finished, world.now_s, busy=busy)
        world.settle()
        assert "SendFailed" not in world.sent_kinds(transfer_id)
        assert world.sent_kinds(transfer_id)[-1] == "SendClosed"
        if stage == "waiting":
            world.advance(world.theirs.open_wait_s + 1, step_s=50)
        elif finished:
            assert world.received_kinds(transfer_id) == ["Opened", "FinishedEarly", "ReceiveClosed"]
        else:
            lost = next(event for event in world.received if isinstance(event, ReceiveFailed))
            assert (lost.reason, lost.busy) == ("peer_aborted", busy)
        assert world.received_kinds(transfer_id)[-1] == "ReceiveClosed"
        world.assert_nothing_left()

    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("how", ["cancel", "cancel_busy", "refuse"])
    def test_the_receiver_ends_it(self, stage: str, how: str) -> None:
        world = World()
        transfer_id = at_stage(world, stage)
        end = world.receiver.refuse if how == "refuse" else partial(world.receiver.cancel, busy=how == "cancel_busy")
        end(transfer_id, "BUSY", world.now_s)
        world.settle()
        assert "ReceiveFailed" not in world.received_kinds(transfer_id)
        assert world.received_kinds(transfer_id)[-1] == "ReceiveClosed"
        if stage == "waiting":
            world.meet()
        failed = next(event for event in world.sent if isinstance(event, SendFailed))
        assert failed.reason == ("kv_nack_busy" if how == "refuse" else "peer_aborted")
        assert failed.busy == (how != "cancel"), "evicted or drained is no failure of the prefill node"
        assert world.sent_kinds(transfer_id)[-1] == "SendClosed"
        world.assert_nothing_left()

    @pytest.mark.parametrize("stage", STAGES)
    def test_each_side_stops(self, stage: str) -> None:
        for side in ("sender", "receiver"):
            world = World()
            transfer_id = at_stage(world, stage)
            (world.sender if side == "sender" else world.receiver).close(world.now_s)
            world.settle()
            kinds = world.sent_kinds(transfer_id) if side == "sender" else world.received_kinds(transfer_id)
            assert kinds[-2:] in (["SendFailed", "SendClosed"], ["ReceiveFailed", "ReceiveClosed"])

    @pytest.mark.parametrize("stage", STAGES)
    def test_a_side_that_falls_silent_is_given_up(self, stage: str) -> None:
        """The link lives (beats pass), but one transfer's messages are lost for good."""
        world = World(settings(produce_wait_s=20.0), settings(open_wait_s=20.0))
        transfer_id = at_stage(world, stage)
        about = (Open, Data, Commit, Abort, Grant, Ack, Nack, Gone)
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, about) else [frames]
        world.advance(60.0)
        assert world.sent_kinds(transfer_id)[-2:] == ["SendFailed", "SendClosed"]
        assert world.received_kinds(transfer_id)[-2:] == ["ReceiveFailed", "ReceiveClosed"]
        world.assert_nothing_left()

    def test_a_commit_without_answer_ends_soon(self) -> None:
        world = World()
        transfer_id = at_stage(world, "committed")
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Commit) else [frames]
        world.advance(world.mine.transfer_idle_s + 0.5)
        assert failure(world, transfer_id) == "no_ack"
        assert loss(world, transfer_id) == "peer_aborted"

    def test_no_grant_in_time_is_busy_not_failure(self) -> None:
        world = World().meet()
        transfer_id = world.open(grant=False)
        world.advance(world.theirs.grant_wait_s + 0.5)
        failed = next(event for event in world.sent if isinstance(event, SendFailed))
        assert (failed.reason, failed.busy) == ("kv_nack_busy", True)
        lost = next(event for event in world.received if isinstance(event, ReceiveFailed))
        assert (lost.transfer_id, lost.reason, lost.busy) == (transfer_id, "no_grant", True)

    @pytest.mark.parametrize(("reason", "label"), [("BUSY", "kv_nack_busy"), ("pool_too_small", "kv_nack_refused")])
    def test_a_refusal_says_why(self, reason: str, label: str) -> None:
        world = World().meet()
        transfer_id = world.open(grant=False)
        world.receiver.refuse(transfer_id, reason, world.now_s)
        world.settle()
        failed = next(event for event in world.sent if isinstance(event, SendFailed))
        assert failed.reason == label
        assert failed.busy == (reason == "BUSY")
        assert failed.detail == ("" if reason == "BUSY" else reason)

    def test_a_pool_that_cannot_be_read_or_written_fails_one_transfer(self) -> None:
        for side in ("source", "sink"):
            world = World().meet()
            other, transfer_id = world.open(), world.open()
            broken = world.source if side == "source" else world.sink
            broken.fails = True
            world.mark(transfer_id, range(4), range(20))
            broken.fails = False
            assert failure(world, transfer_id) == ("pack_failed" if side == "source" else "kv_nack_place")
            assert world.received_kinds(transfer_id)[-1] == "ReceiveClosed"
            world.send_all(other)
            assert world.sent_kinds(other) == ["Granted", "Acked", "SendClosed"]
            world.assert_nothing_left()

    def test_a_slow_prefill_is_not_idle(self) -> None:
        """The sender's beats name its transfers, so a long queue on its side is no reason to give up."""
        world = World().meet()
        transfer_id = world.open()
        world.advance(10 * world.theirs.transfer_idle_s)
        world.send_all(transfer_id)
        assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]

    def test_a_sender_that_forgot_a_transfer_lets_it_expire(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Abort) else [frames]
        world.sender.abort(transfer_id, "cancelled", False, world.now_s)
        world.advance(world.theirs.transfer_idle_s + 1)
        assert loss(world, transfer_id) == "kv_nack_idle"
        world.assert_nothing_left()

    def test_beats_alone_do_not_keep_blocks_for_ever(self) -> None:
        """A sender that beats and never sends: the receiver's own backstop ends it."""
        world = World(settings(produce_wait_s=1e6), settings(produce_wait_s=40.0)).meet()
        transfer_id = world.open()
        world.advance(39.0)
        assert world.received_kinds(transfer_id) == ["Opened"], "no news is not yet a loss"
        world.advance(10.0)
        assert loss(world, transfer_id) == failure(world, transfer_id) == "kv_nack_idle"
        world.assert_nothing_left()
