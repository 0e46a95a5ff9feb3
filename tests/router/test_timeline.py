"""The timeline: a partition of the whole time, by an injected clock; a delayed stage grows, and no other."""

import pytest

from pdserve.core.work import LegOutcome, SampledToken
from pdserve.router.events import FirstToken, LegReleased, Placed, Submitted
from pdserve.router.instructions import Answer
from pdserve.router.timeline import NodeDuration, StageName, Timeline, TimelineRecorder
from tests.router.session_world import IDS, NODES, ROLES, World

P, D = NODES[ROLES["P"]][0], NODES[ROLES["D"]][0]
STEP_S = 0.25
STAGES = ["admission", "placement", "prefill", "handover", "decode", "answer"]


def walk(delays: dict[str, float], max_tokens: int = 4) -> Timeline:
    """Walk a request through all stages; each takes STEP_S and the delay that is stated for it."""

    def spend(stage: str) -> None:
        world.now_s += STEP_S + delays.get(stage, 0.0)

    start_s = STEP_S + delays.get("admission", 0.0)
    world = World(max_tokens=max_tokens, now_s=start_s)
    spend("placement")
    world.place()
    spend("prefill")
    world.tell(FirstToken(P, 1, (world.token(0),), 0, {"prefill.queue": 0.0625, "prefill.compute": 0.125}))
    spend("handover")
    world.adopted()
    for index in range(1, max_tokens):
        spend("decode")
        world.tokens(index)
    world.ended("D", LegOutcome.FINISHED)
    world.released("D")
    spend("answer")
    world.ended("P", LegOutcome.FINISHED)
    world.released("P")
    answer = next(entry for entry in world.log if isinstance(entry, Answer))
    return answer.timeline


def durations(timeline: Timeline) -> dict[str, float]:
    return {str(stage.name): stage.duration_s for stage in timeline.stages}


def test_the_stages_partition_the_whole_time() -> None:
    timeline = walk({})
    assert list(durations(timeline)) == STAGES
    assert sum(durations(timeline).values()) == pytest.approx(timeline.e2el_s)
    assert timeline.e2el_s == pytest.approx(8 * STEP_S)
    assert timeline.ttft_s == pytest.approx(3 * STEP_S)
    assert timeline.tpot_s == pytest.approx((timeline.e2el_s - timeline.ttft_s) / 3)
    assert (timeline.attempts, timeline.stalls) == (1, ())


@pytest.mark.parametrize("stage", STAGES)
def test_a_delayed_stage_grows_and_no_other(stage: str) -> None:
    plain, delayed = durations(walk({})), durations(walk({stage: 1.5}))
    steps = 3 if stage == "decode" else 1
    grown = {name: delayed[name] - plain[name] for name in STAGES}
    assert grown == pytest.approx({name: 1.5 * steps if name == stage else 0.0 for name in STAGES})


def test_node_durations_nest_and_the_rest_is_hop() -> None:
    timeline = walk({})
    by_name = {str(stage.name): stage for stage in timeline.stages}
    prefill = by_name["prefill"]
    assert {node.name: node.duration_s for node in prefill.nodes} == {"prefill.queue": 0.0625, "prefill.compute": 0.125}
    assert prefill.hop_s == pytest.approx(STEP_S - 0.1875)
    assert by_name["handover"].nodes == ()
    assert timeline.overlapped.place_s > 0
    assert [node.name for node in by_name["decode"].nodes] == ["decode.compute"]
    assert all(sum(node.duration_s for node in stage.nodes) <= stage.duration_s for stage in timeline.stages)
    assert all(stage.hop_s >= 0 for stage in timeline.stages)


def test_what_a_node_reports_is_never_trimmed_to_fit() -> None:
    """Prefill work always lies inside its stage: if a node claims more, that is a fault, and it shows."""
    recorder = TimelineRecorder(0.0)
    recorder.enter(StageName.PREFILL, 1, 1.0)
    recorder.nest(StageName.PREFILL, 1, {"prefill.compute": 5.0})
    stage = recorder.build(1, 1, 2.0).stages[1]
    assert (stage.nodes[0].duration_s, stage.hop_s) == (5.0, -4.0)


@pytest.mark.parametrize("name", [StageName.HANDOVER, StageName.DECODE])
def test_work_that_began_before_its_stage_is_shown_beside_the_sum(name: StageName) -> None:
    """The first token and `adopted` come from two nodes: they may arrive together, after the KV was placed."""
    recorder = TimelineRecorder(0.0)
    recorder.enter(name, 1, 1.0)
    recorder.nest(name, 1, {"decode.compute": 0.5, "decode.queue": 0.25})
    timeline = recorder.build(1, 1, 1.5)
    assert (timeline.stages[1].nodes, timeline.stages[1].hop_s) == ((), 0.5)
    assert timeline.overlapped.nodes == [NodeDuration("decode.compute", 0.5), NodeDuration("decode.queue", 0.25)]


def test_a_late_word_of_adoption_is_dated_back_by_the_decode_nodes_own_work() -> None:
    """2.5 s of decode work before the last token at 6 s: adopted at 3.5 s at the latest, though heard of at 5 s."""
    recorder = TimelineRecorder(0.0)
    recorder.enter(StageName.HANDOVER, 1, 1.0)
    recorder.enter(StageName.DECODE, 1, 5.0)
    recorder.enter(StageName.ANSWER, 1, 6.0)
    recorder.nest(StageName.DECODE, 1, {"decode.compute": 2.5})
    timeline = recorder.build(2, 1, 7.0)
    assert [stage.duration_s for stage in timeline.stages] == pytest.approx([1.0, 2.5, 2.5, 1.0])
    assert [stage.hop_s for stage in timeline.stages] == pytest.approx([1.0, 2.5, 0.0, 1.0], abs=1e-6)
    assert all(stage.hop_s >= 0 for stage in timeline.stages)
    assert timeline.overlapped.nodes == []


def test_overlapped_work_is_beside_the_sum() -> None:
    beside = walk({}).overlapped
    assert (beside.exposed_transfer_s, beside.pack_s) == (0.1, 0.05)
    assert (beside.kv_bytes, beside.kv_frames) == (200, 4), "both legs report; the decode leg's are its own"


def test_one_token_has_neither_handover_nor_decode() -> None:
    world = World(max_tokens=1)
    world.place()
    world.first()
    world.ended("P", LegOutcome.FINISHED)
    world.released("P")
    timeline = next(entry for entry in world.log if isinstance(entry, Answer)).timeline
    assert list(durations(timeline)) == ["admission", "placement", "prefill", "answer"]
    assert timeline.tpot_s == 0.0


def test_a_resume_is_a_stage_and_a_stall() -> None:
    world = World(max_tokens=3)
    world.place()
    world.first()
    world.now_s += 1.0
    world.lost("D")
    world.now_s += 2.0
    world.place()
    world.now_s += 4.0
    world.adopted(2)
    world.now_s += 8.0
    world.tokens(2, attempt=2)
    for attempt in (1, 2):
        world.tell(LegReleased(P, attempt, {"prefill.pack": 0.5}, 10, 1))
    world.tell(LegReleased(D, 2, {}, 0, 0))
    timeline = next(entry for entry in world.log if isinstance(entry, Answer)).timeline
    assert [(str(stage.name), stage.attempt) for stage in timeline.stages] == [
        ("admission", 0),
        ("placement", 1),
        ("prefill", 1),
        ("handover", 1),
        ("resume", 2),
        ("prefill", 2),
        ("handover", 2),
        ("decode", 2),
        ("answer", 2),
    ]
    assert [(stall.attempt, stall.duration_s) for stall in timeline.stalls] == [(1, 6.0)]
    assert timeline.stalls[0].cause.startswith("decode_lost")
    assert sum(stage.duration_s for stage in timeline.stages) == pytest.approx(timeline.e2el_s)
    assert (timeline.overlapped.pack_s, timeline.overlapped.kv_bytes) == (1.0, 20)


def test_a_late_report_of_the_first_token_still_nests() -> None:
    """The adopted copy came first; the prefill node's durations arrive with its own message."""
    world = World(max_tokens=2)
    world.tell(Placed(P, D, "identity", frozenset()))
    world.tell(Submitted(1))
    world.now_s += 1.0
    world.adopted()
    world.tell(FirstToken(P, 1, (SampledToken(0, IDS[0], -1.0),), 0, {"prefill.compute": 0.5}))
    world.now_s += 1.0
    world.tokens(1)
    world.released("P")
    world.released("D")
    timeline = next(entry for entry in world.log if isinstance(entry, Answer)).timeline
    prefill = next(stage for stage in timeline.stages if stage.name is StageName.PREFILL)
    assert (prefill.duration_s, prefill.hop_s) == (1.0, 0.5)


def test_stalls_never_overlap() -> None:
    """The client waited 7 s for a token after the first loss, and the stalls of three attempts are these 7 s."""
    recorder = TimelineRecorder(0.0)
    recorder.attempt_ended(1, "decode_lost", 1.0)
    recorder.attempt_ended(2, "prefill_lost", 2.0)
    recorder.attempt_ended(3, "prefill_lost", 4.0)
    recorder.token(8.0)
    recorder.token(9.0)
    recorder.attempt_ended(4, "decode_lost", 10.0)
    timeline = recorder.build(3, 5, 12.0)
    assert [(stall.attempt, stall.duration_s) for stall in timeline.stalls] == [(1, 1.0), (2, 2.0), (3, 4.0), (4, 2.0)]
