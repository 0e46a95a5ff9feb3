"""The small parts: cutting frames, covering ranges, deadlines, staging leases, memory of what is over."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve.core.identity import Identity
from pdserve.core.ids import TransferId, new_incarnation, new_transfer_id
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.coverage import Coverage
from pdserve.kvtransfer.framing import FILL_BYTES, FramePlanner, FrameRange
from pdserve.kvtransfer.memory import ParkedOpen, ParkedOpens, Tombstones
from pdserve.kvtransfer.messages import Ack, Open
from pdserve.kvtransfer.send_service import KvSendService
from pdserve.kvtransfer.timers import Timers
from tests.kvtransfer.nodes import BytesSource, Events
from tests.kvtransfer.nodes import settings as link_settings

LAYER = LayerLayout(4, 64, 64)
"""2 KiB per token in fp32."""
LAYOUT = KvLayout((LAYER,) * 6, "float32")


@st.composite
def spans(draw: st.DrawFn, limit: int) -> range:
    start = draw(st.integers(0, limit - 1))
    return range(start, draw(st.integers(start + 1, limit)))


def drain(planner: FramePlanner) -> list[FrameRange]:
    frames = []
    while (frame := planner.peek()) is not None:
        planner.take(frame)
        frames.append(frame)
    return frames


class TestFramePlanner:
    def test_layers_share_a_frame_until_it_is_full_enough(self) -> None:
        planner = FramePlanner(LAYOUT, 1000)
        taken = []
        for layer in range(6):
            assert planner.mark_ready(range(layer, layer + 1), range(50))
            taken.append([frame.layers for frame in drain(planner)])
        assert taken == [[], [], [range(3)], [], [], [range(3, 6)]]
        assert LAYOUT.range_bytes(range(2), 50) < FILL_BYTES <= LAYOUT.range_bytes(range(3), 50)

    def test_a_large_layer_goes_at_once(self) -> None:
        planner = FramePlanner(LAYOUT, 1000)
        planner.mark_ready(range(1), range(128))
        assert drain(planner) == [FrameRange(range(1), range(128), FILL_BYTES)]

    def test_no_frame_is_longer_than_the_limit(self) -> None:
        planner = FramePlanner(LAYOUT, 1000)
        planner.mark_ready(range(6), range(700))
        frames = drain(planner)
        assert all(frame.num_bytes <= MAX_FRAME_BYTES for frame in frames)
        cells = [(layer, token) for frame in frames for layer in frame.layers for token in frame.tokens]
        assert len(cells) == len(set(cells)) == 6 * 700
        assert all(frame.num_bytes == LAYOUT.range_bytes(frame.layers, len(frame.tokens)) for frame in frames)

    def test_other_tokens_end_the_wait(self) -> None:
        planner = FramePlanner(LAYOUT, 1000)
        planner.mark_ready(range(1), range(4))
        assert drain(planner) == []
        planner.mark_ready(range(1), range(4, 8))
        assert [frame.tokens for frame in drain(planner)] == [range(4)]

    def test_close_ends_the_wait(self) -> None:
        planner = FramePlanner(LAYOUT, 1000)
        planner.mark_ready(range(1), range(4))
        planner.close()
        assert [frame.tokens for frame in drain(planner)] == [range(4)]
        assert planner.is_empty

    def test_skipped_tokens_do_not_travel(self) -> None:
        planner = FramePlanner(LAYOUT, 100)
        planner.mark_ready(range(6), range(20))
        planner.skip(30)
        planner.mark_ready(range(6), range(20, 40))
        assert [frame.tokens for frame in drain(planner)] == [range(30, 40)]

    @pytest.mark.parametrize(
        ("layers", "tokens"),
        [
            (range(5, 7), range(10)),
            (range(1), range(90, 101)),
            (range(1, 1), range(10)),
            (range(1), range(3, 3)),
            (range(-1, 1), range(2)),
            (range(0, 4, 2), range(10)),
        ],
    )
    def test_what_does_not_exist_is_not_ready(self, layers: range, tokens: range) -> None:
        assert not FramePlanner(LAYOUT, 100).mark_ready(layers, tokens)

    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_frames_are_what_summing_layer_by_layer_gives_however_often_one_asks(self, data: st.DataObject) -> None:
        """The next frame is planned once and its layers are found by bisection; here they are found anew, one by one."""
        heads = data.draw(st.lists(st.sampled_from((1, 3, 8, 100, 700)), min_size=1, max_size=6))
        layout = KvLayout(tuple(LayerLayout(num, 64, 64) for num in heads), "float32")
        planner, ready, skip, is_closed = FramePlanner(layout, 3000), list[tuple[range, range]](), 0, False
        for _ in range(data.draw(st.integers(1, 12))):
            match data.draw(st.sampled_from(("mark", "mark", "mark", "take", "take", "skip", "close", "clear"))):
                case "mark":
                    marked = data.draw(spans(len(heads))), data.draw(spans(3000))
                    assert planner.mark_ready(*marked)
                    add_ready(ready, *marked, skip)
                case "take" if (frame := planner.peek()) is not None:
                    planner.take(frame)
                    layers, tokens = ready.pop(0)
                    if frame.layers.stop < layers.stop:
                        ready.insert(0, (range(frame.layers.stop, layers.stop), tokens))
                    if frame.tokens.stop < tokens.stop:
                        ready.insert(0, (frame.layers, range(frame.tokens.stop, tokens.stop)))
                case "skip":
                    skip, before = data.draw(st.integers(0, 3000)), ready
                    planner.skip(skip)
                    ready = []
                    for each in before:
                        add_ready(ready, *each, skip)
                case "close":
                    planner.close()
                    is_closed = True
                case "clear":
                    planner.clear()
                    ready.clear()
            assert planner.peek() == next_frame(layout, ready, is_closed)
            assert planner.is_empty == (not ready)


def add_ready(ready: list[tuple[range, range]], layers: range, tokens: range, skip: int) -> None:
    """Do what `FramePlanner.mark_ready` says, on a plain list."""
    tokens = range(max(tokens.start, skip), tokens.stop)
    if tokens and ready and ready[-1][1] == tokens and ready[-1][0].stop == layers.start:
        ready[-1] = (range(ready[-1][0].start, layers.stop), tokens)
    elif tokens:
        ready.append((layers, tokens))


def next_frame(layout: KvLayout, ready: list[tuple[range, range]], is_closed: bool) -> FrameRange | None:
    """Find what may go next by adding up layers."""
    if not ready:
        return None
    layers, tokens = ready[0]
    sizes = [
        shape.num_kv_heads * (shape.key_dim + shape.value_dim) * layout.itemsize
        for shape in layout.layers[layers.start : layers.stop]
    ]
    may_grow = not is_closed and len(ready) == 1 and layers.stop < layout.num_layers
    if may_grow and sum(sizes) * len(tokens) < FILL_BYTES:
        return None
    num, num_bytes = 0, 0
    while num < len(sizes) and num_bytes + sizes[num] * len(tokens) <= MAX_FRAME_BYTES:
        num, num_bytes = num + 1, num_bytes + sizes[num] * len(tokens)
    if num:
        return FrameRange(range(layers.start, layers.start + num), tokens, num_bytes)
    fitting = tokens[: MAX_FRAME_BYTES // sizes[0]]
    return FrameRange(layers[:1], fitting, sizes[0] * len(fitting))


class TestCoverage:
    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.tuples(spans(4), spans(12)), max_size=25),
        st.integers(0, 11),
        st.lists(st.sampled_from((None, 1, 3, 5, 20)), min_size=4, max_size=4),
    )
    def test_agrees_with_a_set_of_cells(
        self, ranges: list[tuple[range, range]], skip: int, windows: list[int | None]
    ) -> None:
        layout = KvLayout(tuple(LayerLayout(4, 64, 64, window) for window in windows), "float32")
        coverage, cells = Coverage(layout, 12), set[tuple[int, int]]()
        for layers, tokens in ranges:
            new = {(layer, token) for layer in layers for token in tokens}
            assert coverage.overlaps(layers, tokens) == bool(new & cells)
            if not new & cells:
                coverage.add(layers, tokens)
                cells |= new
        wanted = [
            (layer, token)
            for layer, window in enumerate(windows)
            for token in range(skip, 12)
            if (layer, token) not in cells and (window is None or token > 12 - window)
        ]
        missing = coverage.missing(skip)
        assert (missing is None) == (not wanted)
        if missing is not None:
            layer, tokens = missing
            assert (layer, tokens.start) == wanted[0]
            assert all((layer, token) not in cells for token in tokens)

    def test_a_window_layer_needs_only_its_window(self) -> None:
        layout = KvLayout((LayerLayout(1, 8, 8, window=4), LayerLayout(1, 8, 8)), "float32")
        coverage = Coverage(layout, 20)
        coverage.add(range(2), range(17, 20))
        assert coverage.missing(0) == (1, range(17))
        coverage.add(range(1, 2), range(17))
        assert coverage.missing(0) is None
        short = Coverage(layout, 20)
        short.add(range(1), range(18, 20))
        assert short.missing(0) == (0, range(17, 18))


class TestTimers:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 20))), max_size=60))
    def test_agrees_with_a_dictionary(self, steps: list[tuple[int, int | None]]) -> None:
        timers, model, now_s = Timers[int](), dict[int, float](), 0.0
        for key, due in steps:
            if due is None:
                timers.clear(key)
                model.pop(key, None)
            else:
                timers.set(key, now_s + due)
                model[key] = now_s + due
            assert timers.next_s() == min(model.values(), default=None)
            assert len(timers) == len(model)
            now_s += 1
            expired = [model.pop(each) for each in timers.take_expired(now_s)]
            assert expired == sorted(expired)
            assert all(due_s <= now_s for due_s in expired)
            assert all(due_s > now_s for due_s in model.values())


class TestMemory:
    def test_parked_opens_are_bounded_in_number_and_time(self) -> None:
        parked, gone = ParkedOpens(2, 2.0), list[ParkedOpen]()
        opens = [Open(new_transfer_id(), 1, bytes(32), 5) for _ in range(3)]
        assert parked.park(opens[0], Route(b"r"), 0.0)
        assert parked.park(opens[1], Route(b"s"), 1.0)
        assert not parked.park(opens[2], Route(b"r"), 1.0)
        assert parked.park(opens[0], Route(b"r"), 1.5), "a repeated OPEN is not a new one"
        assert parked.next_s() == 2.0
        parked.expire(2.0, gone.append)
        assert [each.message for each in gone] == [opens[0]]
        parked.drop_route(Route(b"s"))
        assert len(parked) == 0

    def test_tombstones_are_bounded_in_number_and_time(self) -> None:
        tombs, peer = Tombstones(2, 10.0), new_incarnation()
        ids = [new_transfer_id() for _ in range(3)]
        for at_s, transfer_id in enumerate(ids):
            tombs.add(transfer_id, peer, Ack(transfer_id), float(at_s))
        assert tombs.get(ids[0], 2.0) is None, "the oldest made room"
        assert tombs.get(ids[1], 10.5) is not None
        assert tombs.get(ids[1], 11.0) is None
        assert len(tombs) == 1
        assert tombs.get(TransferId(bytes(16)), 2.0) is None


class TestSettings:
    def test_all_faults_are_named_at_once(self) -> None:
        with pytest.raises(ConfigError) as caught:
            link_settings(lease_s=1.0, beat_s=0.5, window_bytes=1000, receive_bytes=1000, staging_bytes=1000)
        assert len(caught.value.faults) == 4

    def test_a_token_that_fits_no_frame_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="one token of a layer"):
            link_settings(layout=KvLayout((LayerLayout(1024, 256, 256),), "float32"))

    def test_an_identity_that_fits_no_hello_is_refused(self) -> None:
        large = Identity("d", "a", {f"field_{i}": "x" * 100 for i in range(1000)})
        with pytest.raises(ConfigError, match="HELLO"):
            KvSendService(link_settings(identity=large), BytesSource(LAYOUT), Events())
