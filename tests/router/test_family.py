"""Requests of several sequences: each ends on its own, failures part them, and the client has one answer (failure class 11)."""

from collections import Counter
from random import Random

import pytest

from pdserve.core.errors import AttemptsExhausted, SlowReader
from pdserve.core.work import FinishReason, LegOutcome
from pdserve.router.events import Aborted, ClientLeft, Tick
from pdserve.router.instructions import Answer, Fail
from pdserve.router.session import SUMMARY_GRACE_S
from tests.router.family_world import LETTERS, PROMPT, FamilyWorld
from tests.router.session_world import EOS


def answer(world: FamilyWorld) -> Answer:
    assert isinstance(world.end, Answer)
    return world.end


def complete(world: FamilyWorld, num_cached: int = 2) -> None:
    """Check that every sequence was answered to its end. The first report of the prefill node says what was cached."""
    end = answer(world)
    for sequence, script in enumerate(world.scripts):
        ids = script[: world.max_tokens]
        ids = ids[: ids.index(EOS) + 1] if EOS in ids else ids
        assert tuple(world.shown[sequence]) == ids
    assert end.num_completion_tokens == sum(map(len, world.shown.values()))
    assert (end.num_prompt_tokens, end.num_cached_tokens) == (len(PROMPT), num_cached)


def test_one_submit_serves_all_sequences_and_one_summary_closes() -> None:
    world = FamilyWorld()
    world.place()
    submit = world.submits[1, 1]
    assert (submit.first_sequence, submit.num_sequences, submit.output_ids) == (0, 3, ())
    world.first()
    assert [ids for _, ids in sorted(world.shown.items())] == [[script[0]] for script in LETTERS]
    world.run_to_the_end()
    assert list(world.sessions) == [1]
    complete(world)
    assert answer(world).timeline.attempts == 1


def test_sequences_end_on_their_own() -> None:
    world = FamilyWorld(((EOS,), LETTERS[1], (LETTERS[2][0], EOS)))
    world.place()
    world.first()
    assert world.finished.keys() == {0}
    world.adopted()
    world.tokens(1, 1, (1, 1), (2, 1))
    assert world.finished.keys() == {0, 2}
    assert not world.cancels(1), "the nodes know of these ends"
    world.tokens(1, 1, (1, 2))
    assert world.finished[1].reason is FinishReason.LENGTH
    world.run_to_the_end()
    complete(world)


def test_a_stop_text_ends_only_its_sequence_on_the_nodes() -> None:
    world = FamilyWorld(stops=("f",))
    world.place()
    world.first()
    world.adopted()
    world.tokens(1, 1, (0, 1), (1, 1), (2, 1))
    assert (world.finished[1].reason, world.finished[1].stop) == (FinishReason.STOP_SEQUENCE, "f")
    assert [cancel.sequences for cancel in world.cancels(1)] == [(1,), (1,)], "both nodes are told"
    world.tokens(1, 1, (1, 2), (0, 2), (2, 2))
    assert world.texts == {0: "abc", 1: "e", 2: "ijk"}
    assert [cancel.sequences for cancel in world.cancels(1)][2:] == [(), ()], "what is left goes as a whole"
    world.close()
    assert answer(world).num_completion_tokens == 7


def test_the_last_stop_text_cancels_the_whole_leg() -> None:
    world = FamilyWorld(LETTERS[:2], stops=("b", "f"))
    world.place()
    world.adopted()
    world.tokens(1, 1, (0, 1), (1, 1))
    assert [cancel.sequences for cancel in world.cancels(1)] == [(), ()]


def test_a_failure_before_any_token_keeps_the_sequences_together() -> None:
    """A busy node costs nothing: the prompt is still computed once."""
    world = FamilyWorld()
    world.place()
    world.ended(1, "D", LegOutcome.BUSY, 1)
    world.place()
    submit = world.submits[1, 2]
    assert (list(world.sessions), submit.num_sequences) == ([1], 3)
    world.run_to_the_end()
    complete(world, num_cached=0)


@pytest.mark.parametrize("is_adopted", [False, True])
def test_after_the_first_token_each_unfinished_sequence_goes_on_alone(is_adopted: bool) -> None:
    world = FamilyWorld((LETTERS[0], (EOS,), LETTERS[2]))
    world.place()
    world.first()
    if is_adopted:
        world.adopted()
        world.tokens(1, 1, (2, 1))
    world.lost("D")
    assert list(world.sessions) == [1, 2]
    for number in (1, 2):
        assert world.asked[number].is_resume
        world.place(number)
    first, second = world.submits[1, 2], world.submits[2, 2]
    assert (first.first_sequence, first.num_sequences, first.output_ids) == (0, 1, LETTERS[0][:1])
    assert (second.first_sequence, second.num_sequences, second.output_ids) == (2, 1, LETTERS[2][: 1 + is_adopted])
    world.run_to_the_end()
    complete(world)
    timeline = answer(world).timeline
    assert sum(stage.duration_s for stage in timeline.stages) == pytest.approx(timeline.e2el_s)
    assert [stall.attempt for stall in timeline.stalls] == [1], "what happened before the fork is in the story"


def test_one_remaining_sequence_goes_on_in_its_own_session() -> None:
    world = FamilyWorld((LETTERS[0], (EOS,), (EOS,)))
    world.place()
    world.first()
    world.lost("D")
    world.run_to_the_end()
    assert list(world.sessions) == [1]
    complete(world)


def test_a_part_that_fails_fails_the_answer_and_ends_the_others() -> None:
    world = FamilyWorld(LETTERS[:2], max_attempts=2)
    world.place()
    world.first()
    world.lost("D")
    world.place(1)
    world.place(2)
    world.ended(2, "P", LegOutcome.FAILED, 2)
    assert isinstance(world.end, Fail)
    assert isinstance(world.end.error, AttemptsExhausted)
    assert world.end.error.metadata["num_tokens_sent"] == "2", "of all sequences"
    assert len(world.cancels(1)) >= 2, "the other part's legs are cancelled"
    world.close()


def test_a_client_that_leaves_ends_every_part() -> None:
    world = FamilyWorld(LETTERS[:2])
    world.place()
    world.adopted()
    world.lost("D")
    world.place(1)
    world.tell_all(ClientLeft())
    assert not world.asked
    world.close()
    assert world.end is None


def test_a_part_that_is_complete_waits_for_the_others() -> None:
    world = FamilyWorld(LETTERS[:2])
    world.place()
    world.first()
    world.lost("D")
    world.place(1)
    world.adopted(1, 2)
    world.tokens(1, 2, (0, 1), (0, 2))
    world.now_s += SUMMARY_GRACE_S
    world.tell_all(Tick())
    assert world.sessions[1].is_answered
    assert (world.end, world.family.is_answered) == (None, False)
    world.run_to_the_end()
    complete(world)


def test_prompt_scores_come_once_whole_and_before_any_token() -> None:
    world = FamilyWorld(LETTERS[:2], prompt_logprobs=True)
    world.place()
    assert world.submits[1, 1].prompt_logprobs
    world.scored(1, 1)
    world.adopted()
    assert not world.shown, "the decode node's stream overtook the scores"
    world.scored(2, 1)
    tokens = world.prompt[0].tokens
    assert [(token.token_id, token.logprob) for token in tokens] == [(5, None), (6, -1.0), (7, -2.0)]
    assert world.shown, "what waited is shown"
    world.lost("D")
    world.place(1)
    assert not world.submits[1, 2].prompt_logprobs, "a resume does not ask for them again"
    world.run_to_the_end()
    assert len(world.prompt) == 1
    complete(world, num_cached=0)


def test_lost_prompt_scores_are_asked_for_again_even_after_adoption() -> None:
    world = FamilyWorld(LETTERS[:2], prompt_logprobs=True)
    world.place()
    world.scored(1, 1)
    world.adopted()
    world.lost("P")
    assert not world.shown
    world.place(1)
    assert world.submits[1, 2].prompt_logprobs
    assert world.submits[1, 2].num_sequences == 2
    world.run_to_the_end()
    assert len(world.prompt) == 1
    complete(world, num_cached=0)


def test_tokens_that_wait_for_scores_go_with_their_attempt() -> None:
    world = FamilyWorld(LETTERS[:2], prompt_logprobs=True)
    world.place()
    world.adopted()
    world.lost("D")
    world.place(1)
    world.scored(1, 2, attempt=2)
    assert not world.shown
    world.run_to_the_end()
    complete(world, num_cached=0)


def test_tokens_ahead_of_a_missing_one_go_with_their_attempt() -> None:
    world = FamilyWorld(LETTERS[:2], max_tokens=4)
    world.place()
    world.adopted()
    world.tokens(1, 1, (0, 2), (1, 2))
    world.lost("D")
    for number, sequence in ((1, 0), (2, 1)):
        world.place(number)
        world.tokens(number, 2, (sequence, 1))
    assert [len(ids) for ids in world.shown.values()] == [2, 2]
    world.run_to_the_end()


def test_parts_tell_their_own_story_from_the_fork_on() -> None:
    world = FamilyWorld(LETTERS[:2])
    world.place()
    world.first()
    world.lost("D")
    world.place(1)
    world.place(2)
    world.ended(1, "P", LegOutcome.FAILED, 2)
    world.place(1)
    world.adopted(1, 3)
    world.tokens(1, 3, (0, 1), (0, 2))
    world.now_s += SUMMARY_GRACE_S
    world.tell_all(Tick())
    world.run_to_the_end()
    assert [stall.attempt for stall in answer(world).timeline.stalls] == [1], "of the part that ended last"


@pytest.mark.parametrize(("start", "count"), [(0, 1), (1, 3), (3, 1)])
def test_scores_that_do_not_fit_the_prompt_are_strays(start: int, count: int) -> None:
    world = FamilyWorld(prompt_logprobs=True)
    world.place()
    world.scored(start, count)
    assert (world.sessions[1].num_stray_events, world.prompt) == (1, [])


def test_tokens_of_sequences_that_nobody_asked_for_are_strays() -> None:
    world = FamilyWorld(LETTERS[:2])
    world.place()
    world.adopted()
    world.scripts = LETTERS
    world.tokens(1, 1, (2, 1))
    assert (world.sessions[1].num_stray_events, 2 in world.shown) == (1, False)


OUTCOMES = (LegOutcome.FINISHED, LegOutcome.FAILED, LegOutcome.EVICTED, LegOutcome.BUSY, LegOutcome.REFUSED)
SCRIPTS = (LETTERS[0], (LETTERS[1][0], EOS), LETTERS[2])
WEIGHTS = {
    "place": 8,
    "first": 3,
    "adopted": 3,
    "token": 8,
    "scored": 4,
    "ended": 1,
    "released": 1,
    "lost": 1,
    "tick": 1,
    "leave": 0.1,
    "slow": 0.1,
}
Step = tuple[str, int, object]


def walk(rng: Random, num_steps: int) -> list[Step]:
    """Draw what happens: mostly progress, with losses, ends, late and repeated words at every point."""
    steps: list[Step] = []
    for kind in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=num_steps):
        what: object = 0
        match kind:
            case "place":
                what = rng.randrange(2)
            case "first" | "adopted":
                what = rng.random() < 0.2
            case "token":
                what = rng.randrange(9)
            case "scored":
                what = rng.choice([1, 2, 1, 2, 0, 3])
            case "ended":
                what = (rng.choice("PD"), rng.choice(OUTCOMES))
            case "released" | "lost":
                what = rng.choice("PD")
        steps.append((kind, rng.randrange(3), what))
    return steps


def is_refusal(step: Step) -> bool:
    """Whether a node says that it can never serve the request: then no other may be left."""
    return isinstance(step[2], tuple) and LegOutcome.REFUSED in step[2]


def play(world: FamilyWorld, step: Step) -> None:
    """Let one thing happen to one of the sessions: to the latest attempt, or with an old one's words."""
    kind, which, what = step
    number = 1 + which % len(world.sessions)
    attempt = world.sessions[number].attempt
    is_known = (number, attempt) in world.submits
    match kind, what:
        case "place", int(node):
            world.place(number, node)
        case "first" | "adopted", int(age) if (number, attempt - age) in world.submits:
            (world.first if kind == "first" else world.adopted)(number, attempt - age)
        case "token", int(spot) if is_known:
            world.tokens(number, attempt, (spot // 3 % len(world.scripts), spot % 3))
        case "scored", int(start) if is_known:
            world.scored(start, 1, number, attempt)
        case "ended", (str(who), LegOutcome() as outcome):
            world.ended(number, who, outcome, attempt)
        case "released", str(who):
            world.released(number, who, attempt)
        case "lost", str(who):
            world.lost(who)
        case "leave", _:
            world.tell_all(ClientLeft())
        case "slow", _:
            world.tell(number, Aborted(SlowReader("slow")))
        case "tick", _:
            world.now_s += 1.0
            world.tell_all(Tick())
        case _:
            pass


GOOD_WALKS: dict[str, list[Step]] = {
    "undisturbed": [
        ("place", 0, 0),
        ("first", 0, 0),
        ("adopted", 0, 0),
        *[("token", 0, spot) for spot in (1, 4, 2, 5)],
    ],
    "parted": [
        ("place", 0, 0),
        ("first", 0, 0),
        ("lost", 0, "D"),
        ("place", 0, 1),
        ("place", 1, 1),
        ("adopted", 1, 0),
        ("first", 0, 0),
        *[("token", 1, spot) for spot in (4, 5)],
    ],
}
ANYTHING: list[Step] = [
    *[(kind, number, age) for kind in ("first", "adopted") for number in (0, 1) for age in (0, 1)],
    *[("token", number, spot) for number in (0, 1) for spot in (1, 2, 4, 5)],
    *[("place", number, 0) for number in (0, 1)],
    *[
        ("ended", number, (who, outcome))
        for number in (0, 1)
        for who in "PD"
        for outcome in (LegOutcome.FINISHED, LegOutcome.FAILED, LegOutcome.EVICTED)
    ],
    *[("released", number, who) for number in (0, 1) for who in "PD"],
    ("lost", 0, "P"),
    ("lost", 0, "D"),
    ("tick", 0, 0),
]
LOSSES = [
    ("lost", 0, "P"),
    ("lost", 0, "D"),
    ("ended", 0, ("D", LegOutcome.EVICTED)),
    ("ended", 1, ("P", LegOutcome.FAILED)),
]


@pytest.mark.parametrize("name", GOOD_WALKS)
def test_whatever_is_said_at_whatever_point_and_then_a_loss(name: str) -> None:
    """Every event at every point of a walk, followed by every loss: good nodes still complete both sequences."""
    steps = GOOD_WALKS[name]
    for point in range(len(steps) + 1):
        for event in ANYTHING:
            for loss in LOSSES:
                world = FamilyWorld(LETTERS[:2], max_attempts=100)
                for step in (*steps[:point], event, loss, *steps[point:]):
                    play(world, step)
                world.run_to_the_end()
                assert isinstance(world.end, Answer), (point, event, loss)
                for sequence in (0, 1):
                    assert tuple(world.shown[sequence]) == LETTERS[sequence][:3], (point, event, loss)


@pytest.mark.parametrize("batch", range(6))
def test_any_order_of_events_ends_well(batch: int) -> None:
    """Never raises; tokens once and in order per sequence; one end per sequence; one summary or error; no leg left."""
    seen: Counter[str] = Counter()
    for seed in range(200 * batch, 200 * (batch + 1)):
        rng = Random(seed)
        stops = rng.choice([(), (), ("b",), ("jk",)])
        world = FamilyWorld(
            SCRIPTS[: rng.randint(2, 3)], rng.randint(1, 3), stops, max_attempts=6, prompt_logprobs=rng.random() < 0.4
        )
        for step in walk(rng, rng.randint(5, 60)):
            play(world, step)
        if rng.random() < 0.5 and not (world.is_client_gone or world.end):
            world.run_to_the_end()
        world.close()
        seen.update(parts=len(world.sessions) > 1, tokens=bool(world.shown), answers=isinstance(world.end, Answer))
    assert min(seen["parts"], seen["tokens"], seen["answers"]) > 15, "the walks must reach something"


@pytest.mark.parametrize("batch", range(4))
def test_whatever_happened_good_nodes_complete_the_answer(batch: int) -> None:
    for seed in range(200 * batch, 200 * (batch + 1)):
        rng = Random(seed)
        world = FamilyWorld(SCRIPTS[: rng.randint(2, 3)], max_attempts=100, prompt_logprobs=rng.random() < 0.4)
        steps = walk(rng, rng.randint(5, 40))
        for step in [step for step in steps if step[0] not in ("leave", "slow") and not is_refusal(step)]:
            play(world, step)
        world.run_to_the_end()
        assert isinstance(world.end, Answer), seed
        for sequence, script in enumerate(world.scripts):
            ids = script[:3]
            assert tuple(world.shown[sequence]) == (ids[: ids.index(EOS) + 1] if EOS in ids else ids)
