"""What the exhaustive search goes through: in CI, and (`python -m tests.kvtransfer.explore deep`) with larger budgets."""

from dataclasses import replace

from tests.kvtransfer.explore import Scenario
from tests.kvtransfer.model_parts import FRAME_BYTES, NUM_TOKENS, Plan

EVERY_FAULT = ("lose", "duplicate", "repeat_later", "swap", "corrupt")
TWO = (Plan(0), Plan(1))

ONE_CLEAN = Scenario("one transfer, nothing wrong", must_succeed=True)
FAULTS = Scenario("every pair of faults, an end", faults=EVERY_FAULT, num_faults=2, num_aborts=1)
REPEATS = Scenario(
    "a frame that comes again late, a repeated submit",
    faults=("repeat_later",),
    num_faults=1,
    num_repeats=1,
    num_aborts=1,
)
TIME = Scenario("a deadline that passes, an end", num_times=1, num_aborts=1)
TIMES = replace(TIME, name="deadlines that pass, an end", num_times=2)
TIME_AND_LOSS = Scenario("deadlines that pass, a lost message", num_times=2, faults=("lose",), num_faults=1)
CUTS = Scenario("a connection that breaks, a deadline, an end", num_cuts=1, num_times=1, num_aborts=1)
REOPENS = Scenario("a connection breaks, nothing else wrong", num_cuts=1, redials=True, must_succeed=True)
REOPENS_DELTA = replace(REOPENS, name="the decode node holds the first token, a connection breaks", skip_tokens=1)
REOPENS_TWICE = replace(REOPENS, name="two connections break, nothing else wrong", num_cuts=2)
REOPENS_FAULTS = replace(
    REOPENS, name="a connection breaks, a lost message", faults=("lose",), num_faults=1, must_succeed=False
)
REOPENS_ENDS = replace(REOPENS, name="a connection breaks and is made anew, an end", num_aborts=1, must_succeed=False)
RESTARTS = Scenario("either process restarts, a deadline passes", num_restarts=1, num_times=1)
TWO_ENDS = Scenario("two transfers take one place in turn, an end", plans=TWO, num_aborts=1)
TWO_FAULTS = Scenario(
    "two transfers take one place in turn, a frame that comes again late",
    plans=TWO,
    faults=("repeat_later",),
    num_faults=1,
)
DELTA = Scenario(
    "the decode node holds the first token, a fault, an end",
    skip_tokens=1,
    faults=EVERY_FAULT,
    num_faults=1,
    num_aborts=1,
)
DELTA_CLEAN = Scenario("the decode node holds the first token", skip_tokens=1, must_succeed=True)
DELTA_ENDS = Scenario(
    "the decode node holds the first token, a deadline, a break, an end",
    skip_tokens=1,
    num_times=1,
    num_cuts=1,
    num_aborts=1,
)
DELTA_TWO = Scenario(
    "two transfers of which the decode node holds the first token, a late repeat",
    plans=TWO,
    skip_tokens=1,
    faults=("repeat_later",),
    num_faults=1,
)
DELTA_ALL = Scenario(
    "the decode node holds every token, a fault, an end",
    skip_tokens=NUM_TOKENS,
    faults=EVERY_FAULT,
    num_faults=1,
    num_aborts=1,
)
FALSELY_HELD = Scenario("the decode node says that it holds what it does not", skip_tokens=1, holds_falsely=True)
SMALL = Scenario(
    "KV goes in eight bits, a fault, an end", wire_dtype="int8", faults=EVERY_FAULT, num_faults=1, num_aborts=1
)
SMALL_CLEAN = Scenario("KV goes in eight bits", wire_dtype="int8", must_succeed=True)
STALE = Scenario(
    "the two submits name different attempts",
    plans=(Plan(0, sent_attempt=1, expected_attempt=2),),
    faults=EVERY_FAULT,
    num_faults=1,
)
WINDOW = Scenario(
    "a window of one frame, a lost beat",
    faults=("lose",),
    num_faults=1,
    num_times=1,
    beats_only=True,
    must_succeed=True,
    window_bytes=FRAME_BYTES,
)
LEASE = replace(WINDOW, name="a window of one frame and a leased one, a lost beat", window_bytes=2 * FRAME_BYTES)
LEASE_TWO = Scenario("two transfers lease a window in turn", plans=TWO, window_bytes=2 * FRAME_BYTES, must_succeed=True)

GREETING = Scenario("a handshake with a secret, named late", has_secret=True, is_met=False)
GREETING_FAULTS = replace(
    GREETING, name=GREETING.name + ", a fault, a break", faults=EVERY_FAULT, num_faults=1, num_cuts=1
)
GREETING_TIMES = replace(GREETING, name=GREETING.name + ", a deadline, a break", num_times=1, num_cuts=1)
GREETING_RESTARTS = replace(GREETING, name=GREETING.name + ", a restart", num_restarts=1)

SCENARIOS = [
    ONE_CLEAN,
    FAULTS,
    REPEATS,
    TIME,
    TIME_AND_LOSS,
    CUTS,
    REOPENS,
    REOPENS_DELTA,
    REOPENS_FAULTS,
    REOPENS_ENDS,
    RESTARTS,
    DELTA_CLEAN,
    DELTA,
    DELTA_ENDS,
    DELTA_ALL,
    SMALL_CLEAN,
    SMALL,
    STALE,
    WINDOW,
    LEASE,
    LEASE_TWO,
    GREETING_FAULTS,
    GREETING_TIMES,
    GREETING_RESTARTS,
]

DEEP = [
    TIMES,
    TWO_ENDS,
    TWO_FAULTS,
    DELTA_TWO,
    REOPENS_TWICE,
    replace(REOPENS, name="a connection of two transfers breaks", plans=TWO),
    replace(REOPENS_FAULTS, name="a connection breaks, a fault", faults=EVERY_FAULT),
    replace(
        GREETING, name="a handshake with a secret, a fault, a deadline", faults=EVERY_FAULT, num_faults=1, num_times=1
    ),
    Scenario("three faults", faults=EVERY_FAULT, num_faults=3, num_aborts=1, num_repeats=1),
    Scenario("three deadlines, an end", num_times=3, num_aborts=1),
    Scenario("two breaks, two deadlines", num_cuts=2, num_times=2),
    Scenario("two restarts, a deadline, a fault", num_restarts=2, num_times=1, faults=("lose",), num_faults=1),
    Scenario(
        "two transfers, an end, a fault",
        plans=TWO,
        num_aborts=1,
        faults=("repeat_later", "lose"),
        num_faults=1,
        depth=20,
    ),
]
