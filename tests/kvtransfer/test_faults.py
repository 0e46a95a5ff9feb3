"""Every frame of a transfer, lost, cut, damaged or repeated: both sides end by name, in time, and never with wrong bytes.

This is the class of failures in which a request waits for ever for KV, or is answered from bytes that did not arrive.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pdserve.core.ids import TransferId
from pdserve.kvtransfer.messages import Data, Message
from tests.kvtransfer.nodes import settings
from tests.kvtransfer.world import Frames, World


def lose(frames: Frames) -> list[Frames]:
    return []


def repeat(frames: Frames) -> list[Frames]:
    return [frames, frames]


def cut_header(frames: Frames) -> list[Frames]:
    return [(frames[0][: len(frames[0]) // 2], *frames[1:])]


def cut_payload(frames: Frames) -> list[Frames]:
    return [(*frames[:-1], frames[-1][:-1])]


def flip(frame: int, bit: int) -> Callable[[Frames], list[Frames]]:
    def damage(frames: Frames) -> list[Frames]:
        which = frame % len(frames)
        changed = bytearray(frames[which])
        at = bit % (8 * len(changed))
        changed[at // 8] ^= 1 << at % 8
        return [(*frames[:which], bytes(changed), *frames[which + 1 :])]

    return damage


FAULTS: dict[str, Callable[[Frames], list[Frames]]] = {
    "lose": lose,
    "repeat": repeat,
    "cut_header": cut_header,
    "cut_payload": cut_payload,
    "flip_header": flip(0, 77),
    "flip_payload": flip(1, 1001),
}


def run(fault: Callable[[Frames], list[Frames]], at: int) -> tuple[World, TransferId, int]:
    """One transfer in which the message number `at` after the handshake meets `fault`; also how many messages there were."""
    world = World(settings(produce_wait_s=20.0), settings(grant_wait_s=5.0, open_wait_s=20.0)).meet()
    first = world.num_on_wire

    def at_one(to_receiver: bool, k: int, message: Message, frames: Frames) -> list[Frames]:
        return fault(frames) if k == first + at else [frames]

    world.fault = at_one
    transfer_id = world.open()
    world.send_all(transfer_id)
    num = world.num_on_wire - first
    # A lost OPEN is said again; the node grants when it comes.
    for _ in range(60):
        world.receiver.grant(transfer_id, 0, world.now_s)
        world.advance(1.0)
    return world, transfer_id, num


def check(world: World, transfer_id: TransferId) -> None:
    sent, received = world.sent_kinds(transfer_id), world.received_kinds(transfer_id)
    assert sent[-1] == "SendClosed", sent
    assert sent[-2] in ("Acked", "SendFailed"), sent
    assert received[-1] == "ReceiveClosed", received
    assert received[-2] in ("Received", "ReceiveFailed"), received
    if "Received" in received:
        world.sink.check(transfer_id, 20)
    if "Acked" in sent:
        assert "Received" in received, "ACK without adoption"
    world.assert_nothing_left()


def test_without_a_fault_it_works() -> None:
    world, transfer_id, num = run(lambda frames: [frames], 0)
    assert num >= 5, "OPEN, GRANT, at least two DATA, COMMIT and ACK are under test"
    assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]


@pytest.mark.parametrize("name", FAULTS)
def test_every_message_meets_every_fault(name: str) -> None:
    _, _, num = run(lambda frames: [frames], 0)
    for at in range(num):
        world, transfer_id, _ = run(FAULTS[name], at)
        check(world, transfer_id)


@pytest.mark.parametrize("name", ["cut_header", "cut_payload", "flip_header", "flip_payload"])
def test_a_damaged_data_frame_never_ends_in_adoption(name: str) -> None:
    _, _, num = run(lambda frames: [frames], 0)
    met = 0
    for at in range(num):
        damaged: list[bool] = []

        def fault(frames: Frames, damaged: list[bool] = damaged) -> list[Frames]:
            damaged.append(len(frames) == 2)
            return FAULTS[name](frames)

        world, transfer_id, _ = run(fault, at)
        if damaged == [True]:
            met += 1
            assert "Received" not in world.received_kinds(transfer_id)
            assert "Acked" not in world.sent_kinds(transfer_id)
    assert met >= 2


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.integers(0, 7), st.integers(0, 1), st.integers(0, 1 << 16))
def test_any_flipped_bit_in_any_frame(at: int, frame: int, bit: int) -> None:
    world, transfer_id, _ = run(flip(frame, bit), at)
    check(world, transfer_id)


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.data())
def test_events_in_any_order_never_raise_and_leave_nothing(data: st.DataObject) -> None:
    """Both nodes do anything at any time, the wire loses, repeats and breaks: no exception, no leak, one last event each."""
    world = World(settings(produce_wait_s=20.0), settings(open_wait_s=20.0)).meet()
    specs = [world.specs() for _ in range(3)]

    def chaos(to_receiver: bool, k: int, message: Message, frames: Frames) -> list[Frames]:
        what = data.draw(st.sampled_from(["pass"] * 12 + ["lose", "repeat", "flip"]))
        return {"pass": lambda f: [f], "lose": lose, "repeat": repeat, "flip": flip(k, 99)}[what](frames)

    world.fault = chaos
    for _ in range(data.draw(st.integers(1, 25))):
        mine, theirs = specs[data.draw(st.integers(0, 2))]
        now_s, transfer_id = world.now_s, mine.transfer_id
        actions: list[Callable[[], None]] = [
            lambda: world.receiver.expect(theirs, now_s),  # noqa: B023 - called at once
            lambda: world.sender.open(mine, now_s),  # noqa: B023
            lambda: world.receiver.grant(transfer_id, 0, now_s),  # noqa: B023
            lambda: world.receiver.refuse(transfer_id, "BUSY", now_s),  # noqa: B023
            lambda: world.receiver.cancel(transfer_id, "gone", now_s),  # noqa: B023
            lambda: world.mark(transfer_id, range(4), range(10)),  # noqa: B023
            lambda: world.mark(transfer_id, range(4), range(10, 20)),  # noqa: B023
            lambda: world.commit(transfer_id),  # noqa: B023
            lambda: world.sender.abort(transfer_id, "stop", True, now_s),  # noqa: B023
            lambda: world.advance(1.0),
            lambda: world.advance(4.0),
            world.cut,
        ]
        actions[data.draw(st.integers(0, len(actions) - 1))]()
        world.settle()
    world.fault = lambda *args: [args[3]]
    world.advance(120.0, step_s=0.5)
    world.assert_nothing_left()
    for mine, _ in specs:
        for kinds, last in (
            (world.sent_kinds(mine.transfer_id), "SendClosed"),
            (world.received_kinds(mine.transfer_id), "ReceiveClosed"),
        ):
            assert not kinds or kinds[-1] == last
        if "Received" in world.received_kinds(mine.transfer_id):
            world.sink.check(mine.transfer_id, 20)


def test_the_checks_look_at_bytes() -> None:
    """A planted fault: a byte that changes after its checksum was taken must be noticed by `check`."""
    world = World().meet()
    transfer_id = world.open()
    world.send_all(transfer_id)
    assert any(isinstance(message, Data) for _, message in world.log)
    cells = world.sink.placed[transfer_id]
    cells[0, 0] = bytes(len(cells[0, 0]))
    with pytest.raises(AssertionError):
        check(world, transfer_id)
