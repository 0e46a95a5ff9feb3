"""Protobuf messages to values and back: the only place of this room that sees generated types' fields."""

from collections.abc import Iterator

from pdserve.client.answer import (
    ClusterState,
    Delta,
    Finished,
    ModelCard,
    NodeView,
    Overlapped,
    SessionView,
    Stage,
    Stall,
    Summary,
    Timeline,
    Usage,
)
from pdserve.client.request import Chat, Options, Prompt
from pdserve.core.work import FinishReason
from pdserve.rpc.process import process_from_pb
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import timeline_pb2


def request_to_pb(prompt: Prompt, options: Options, *, stream: bool) -> pb.GenerateRequest:
    """Return the message of a request. Raises ValueError for a number that the field cannot hold, e.g. a negative count."""
    request = pb.GenerateRequest(request_id=options.request_id, model=options.model, stream=stream)
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        turns = [pb.ChatMessage(role=turn.role, content=turn.content) for turn in prompt.turns]
        request.chat.CopyFrom(pb.ChatInput(messages=turns))
    else:
        try:
            request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
        except (ValueError, TypeError) as error:
            raise ValueError(f"token_ids: {error}") from None
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        _set(request.sampling, name, getattr(options, name))
    for name in ("max_tokens", "ignore_eos"):
        _set(request.stop, name, getattr(options, name))
    request.stop.stop.extend(options.stop)
    request.stop.stop_token_ids.extend(options.stop_token_ids)
    return request


def _set(message: pb.SamplingParameters | pb.StopConditions, name: str, value: float | None) -> None:
    if value is not None:
        try:
            setattr(message, name, value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None


def parts_from_pb(message: pb.GenerateResponse, arrival_s: float) -> Iterator[Delta | Finished | Summary]:
    """Yield the parts of one message in their order."""
    for delta in message.deltas:
        yield Delta(delta.text, tuple(delta.token_ids), tuple(delta.logprobs), arrival_s)
    for end in message.finished:
        token_id = end.stop_token_id if end.HasField("stop_token_id") else None
        yield Finished(FinishReason(end.reason), end.stop, token_id)
    if message.HasField("summary"):
        yield summary_from_pb(message.summary)


def summary_from_pb(message: pb.Summary) -> Summary:
    """Return the value of a summary."""
    usage = message.usage
    return Summary(
        request_id=message.request_id,
        model=message.model,
        usage=Usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens),
        timeline=timeline_from_pb(message.timeline),
        seed=message.seed,
        processes=tuple(process_from_pb(process) for process in message.processes),
    )


def timeline_from_pb(message: timeline_pb2.Timeline) -> Timeline:
    """Return the value of a timeline."""
    overlapped = message.overlapped
    return Timeline(
        schema_version=message.schema_version,
        e2el_s=message.e2el_s,
        ttft_s=message.ttft_s,
        tpot_s=message.tpot_s,
        stages=tuple(
            Stage(
                name=stage.name,
                attempt=stage.attempt,
                duration_s=stage.duration_s,
                nodes=tuple((node.name, node.duration_s) for node in stage.nodes),
                hop_s=stage.hop_s,
            )
            for stage in message.stages
        ),
        overlapped=Overlapped(
            exposed_transfer_s=overlapped.exposed_transfer_s,
            kv_bytes=overlapped.kv_bytes,
            kv_frames=overlapped.kv_frames,
            pack_s=overlapped.pack_s,
            reserve_wait_s=overlapped.reserve_wait_s,
            place_s=overlapped.place_s,
            stalled_s=overlapped.stalled_s,
            nodes=tuple((node.name, node.duration_s) for node in overlapped.nodes),
        ),
        attempts=message.attempts,
        stalls=tuple(Stall(stall.attempt, stall.cause, stall.duration_s) for stall in message.stalls),
    )


def models_from_pb(message: pb.ListModelsResponse) -> tuple[ModelCard, ...]:
    """Return the served models."""
    return tuple(ModelCard(m.name, m.max_model_len, m.vocab_size, m.has_chat_template) for m in message.models)


def cluster_from_pb(message: pb.GetClusterStateResponse) -> ClusterState:
    """Return the value of a cluster state."""
    return ClusterState(
        router=process_from_pb(message.router),
        nodes=tuple(
            NodeView(
                address=node.address,
                state=node.state,
                reason=node.reason,
                process=process_from_pb(node.process) if node.HasField("process") else None,
                gauges=dict(node.gauges),
                kv_addresses=tuple(node.kv_addresses),
            )
            for node in message.nodes
        ),
        gauges=dict(message.gauges),
        sessions=tuple(
            SessionView(s.session_id, s.request_id, s.state, s.attempt, s.age_s, s.num_output_tokens)
            for s in message.sessions
        ),
    )
