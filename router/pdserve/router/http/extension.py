"""What pdserve says beside OpenAI's members: the timeline, the seed, the processes; and the `Server-Timing` header."""

from collections.abc import Iterable, Sequence

from pdserve.core.build import ProcessInfo
from pdserve.router.answering import Reply
from pdserve.router.http.errors import JsonObject
from pdserve.router.instructions import Answer
from pdserve.router.timeline import NodeDuration, Timeline


def extension(answered: Sequence[tuple[Reply, Answer]]) -> JsonObject:
    """Return the member `pdserve`: of the one prompt, or, under `prompts`, of each."""
    every = [_of_prompt(reply, answer) for reply, answer in answered]
    return every[0] if len(every) == 1 else {"prompts": every}


def server_timing(answers: Iterable[Answer]) -> str:
    """Return the header's value (W3C Server Timing), durations in ms, of the prompt that took longest."""
    timeline = max((answer.timeline for answer in answers), key=lambda each: each.e2el_s)
    parts = [("total", timeline.e2el_s), ("ttft", timeline.ttft_s)]
    parts += [
        (stage.name if stage.attempt <= 1 else f"{stage.name}-{stage.attempt}", stage.duration_s)
        for stage in timeline.stages
    ]
    return ", ".join(f"{name};dur={duration_s * 1e3:.3f}" for name, duration_s in parts)


def _of_prompt(reply: Reply, answer: Answer) -> JsonObject:
    return {
        "request_id": reply.request.label,
        "seed": reply.request.sampling.seed,
        "timeline": timeline_json(answer.timeline),
        "processes": [_process(process) for process in reply.processes],
    }


def timeline_json(timeline: Timeline) -> JsonObject:
    """Return the timeline with the contract's names (timeline.proto); seconds."""
    beside = timeline.overlapped
    return {
        "e2el_s": timeline.e2el_s,
        "ttft_s": timeline.ttft_s,
        "tpot_s": timeline.tpot_s,
        "attempts": timeline.attempts,
        "stages": [
            {
                "name": str(stage.name),
                "attempt": stage.attempt,
                "duration_s": stage.duration_s,
                "nodes": _nodes(stage.nodes),
                "hop_s": stage.hop_s,
            }
            for stage in timeline.stages
        ],
        "overlapped": {
            "exposed_transfer_s": beside.exposed_transfer_s,
            "kv_bytes": beside.kv_bytes,
            "kv_frames": beside.kv_frames,
            "pack_s": beside.pack_s,
            "reserve_wait_s": beside.reserve_wait_s,
            "place_s": beside.place_s,
            "stalled_s": beside.stalled_s,
            "nodes": _nodes(beside.nodes),
        },
        "stalls": [
            {"attempt": stall.attempt, "cause": stall.cause, "duration_s": stall.duration_s}
            for stall in timeline.stalls
        ],
    }


def _nodes(nodes: Iterable[NodeDuration]) -> list[JsonObject]:
    return [{"name": node.name, "duration_s": node.duration_s} for node in nodes]


def _process(process: ProcessInfo) -> JsonObject:
    return {
        "role": process.role.label,
        "incarnation": process.incarnation.hex(),
        "version": process.version,
        "commit": process.commit,
        "dtype": process.dtype,
        "threads": process.threads,
        "block_size": process.block_size,
        "weight_digest": process.weight_digest,
        "device": process.device,
        "attention_backend": process.attention_backend,
    }
