"""Made-up bytes at the decoder, at both machines and at the open port: refused or understood, never an exception, never a leak.

`corpus/frames.txt` holds the frames of a coverage-guided run (atheris, 120 s, from one sample of each kind): each line is the hex
of kind and body, which get envelope and seal here, because a fuzzer cannot guess a checksum. It grows when something is found.
"""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
import zmq
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pdserve.core.ids import TransferId
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.codec import Kind, decode, encode
from pdserve.kvtransfer.messages import Data
from pdserve.kvtransfer.wire import MAGIC, FrameError
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.nodes import Pair, check_a_transfer_works, settings
from tests.kvtransfer.test_codec import PAYLOAD, SAMPLES, reseal
from tests.kvtransfer.world import World

CORPUS = Path(__file__).parent / "corpus/frames.txt"
NUM_SHOTS = 400


@cache
def corpus() -> tuple[bytes, ...]:
    """Kind and body of each frame."""
    return tuple(bytes.fromhex(line) for line in CORPUS.read_text(encoding="ascii").split())


def sealed(body: bytes) -> bytes:
    """Return a frame of kind and body."""
    return reseal(MAGIC + body + bytes(8))


def mutate(body: bytes, random: Random) -> bytes:
    """Flip, cut, grow or splice."""
    changed = bytearray(body)
    for _ in range(random.randrange(1, 4)):
        at = random.randrange(len(changed) + 1)
        match random.randrange(4):
            case 0 if at < len(changed):
                changed[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
            case 1:
                del changed[at : at + random.randrange(8)]
            case 2:
                changed[at:at] = random.randbytes(random.randrange(8))
            case _:
                other = random.choice(corpus())
                changed[at:] = other[random.randrange(len(other) + 1) :]
    return bytes(changed)


def understood_or_refused(frames: list[bytes]) -> bool:
    """Decode; what is understood must survive being written and read again. Return whether it was."""
    try:
        message, payload = decode(frames)
    except FrameError:
        return False
    again = [encode(message), bytes(payload)] if isinstance(message, Data) else [encode(message)]
    assert decode(again)[0] == message
    return True


@pytest.mark.parametrize("rest", [[], [PAYLOAD], [PAYLOAD, PAYLOAD]], ids=["alone", "payload", "two payloads"])
def test_the_corpus(rest: list[bytes]) -> None:
    results = [understood_or_refused([sealed(body), *rest]) for body in corpus()]
    assert any(results) is (len(rest) < 2)
    assert not all(results)


@hypothesis_settings(max_examples=1000, deadline=None)
@given(st.sampled_from(range(len(corpus()))), st.integers(0, 2**32), st.booleans())
def test_mutated_frames(which: int, seed: int, has_payload: bool) -> None:
    understood_or_refused([sealed(mutate(corpus()[which], Random(seed))), *([PAYLOAD] if has_payload else [])])


@hypothesis_settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes(frames: list[bytes]) -> None:
    assert not understood_or_refused(frames), "a frame without a seal was understood"


def shots_at(transfer_id: TransferId, random: Random) -> Iterator[list[bytes]]:
    """Yield made-up messages, half of them about a live transfer."""
    while True:
        sample = SAMPLES[random.choice(list(Kind))]
        if random.random() < 0.5 and hasattr(sample, "transfer_id"):
            sample = replace(sample, transfer_id=transfer_id)  # type: ignore[arg-type]  # those that have one
        body = encode(sample)[len(MAGIC) : -8] if random.random() < 0.7 else random.choice(corpus())
        header = sealed(mutate(body, random)) if random.random() < 0.6 else sealed(body)
        yield [header, PAYLOAD] if isinstance(sample, Data) else [header]


@hypothesis_settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_both_machines_take_anything_from_a_peer_and_from_strangers(seed: int) -> None:
    random = Random(seed)
    world = World(settings(produce_wait_s=20.0), settings(open_wait_s=20.0)).meet()
    transfer_id = world.open()
    shots = shots_at(transfer_id, random)
    for _ in range(20):
        route = random.choice([*world.alive, Route(b"stranger")])
        to_receiver = random.random() < 0.7
        with contextlib.suppress(FrameError):
            message, payload = decode(next(shots))
            if to_receiver:
                world.receiver.message(route, message, payload, world.now_s)
            else:
                world.sender.message(route, message, world.now_s)
        world.settle()
        if random.random() < 0.1:
            world.advance(1.0)
    world.advance(60.0, step_s=0.5)
    world.assert_nothing_left()
    assert world.sent_kinds(transfer_id).count("SendClosed") == 1
    assert world.received_kinds(transfer_id).count("ReceiveClosed") == 1


def test_the_open_port() -> None:
    """Hundreds of made-up messages from a stranger, and torn greetings: service goes on as if nothing had been."""
    random = Random(20261129)
    pair = Pair.make(ZeroMqChannel).start()
    mine, theirs = pair.specs()
    pair.receiver.expect(theirs)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(pair.receiver.endpoint)
    shots = shots_at(mine.transfer_id, random)
    for _ in range(NUM_SHOTS):
        stranger.send_multipart(next(shots))
    port = int(pair.receiver.endpoint.rpartition(":")[2])
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for _ in range(20):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as torn:
            torn.sendall(mutate(greeting, random) + random.randbytes(random.randrange(64)))
    stranger.send(encode(SAMPLES[Kind.OPEN]))
    assert stranger.poll(30_000), "a well-formed message of a stranger is told to say HELLO first"
    check_a_transfer_works(pair)
    pair.receiver.cancel(mine.transfer_id, "the test ends")
    stranger.close(0)
    context.term()
    assert pair.receiver.gauges()["kv_io_errors_total"] == 0
    pair.stop()
