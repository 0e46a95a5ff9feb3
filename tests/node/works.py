"""Short ways to make legs for scheduler and node tests."""

from pdserve.core.ids import Incarnation, LegKey, SessionKey, TransferId
from pdserve.core.work import Sampling, Work

ROUTER = Incarnation(b"R" * 16)
PREFILL = Incarnation(b"P" * 16)
DECODE = Incarnation(b"D" * 16)
GREEDY = Sampling()


def leg(session_id: int, attempt: int = 1) -> LegKey:
    return LegKey(SessionKey(ROUTER, session_id), attempt)


def transfer(session_id: int, attempt: int = 1) -> TransferId:
    return TransferId(session_id.to_bytes(8, "big") + attempt.to_bytes(8, "big"))


def work(
    session_id: int,
    *,
    prompt: int = 8,
    output: int = 0,
    max_tokens: int = 4,
    arrived_s: float | None = None,
    deadline_s: float | None = None,
    hands_over: bool = True,
    stop_token_ids: frozenset[int] = frozenset(),
    sequences: int = 1,
    first_sequence: int = 0,
    sampling: Sampling = GREEDY,
) -> Work:
    """A leg with `prompt` prompt tokens and `output` accepted output tokens; older with a smaller session id."""
    return Work(
        leg=leg(session_id),
        transfer_id=transfer(session_id) if hands_over else None,
        prefill=PREFILL,
        decode=DECODE if hands_over else None,
        label=f"r{session_id}",
        prompt_ids=tuple(range(10, 10 + prompt)),
        output_ids=tuple(range(100, 100 + output)),
        sampling=sampling,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=False,
        arrived_s=float(session_id) if arrived_s is None else arrived_s,
        deadline_s=deadline_s,
        num_sequences=sequences,
        first_sequence=first_sequence,
    )
