"""Protobuf messages of a router to values. With `pb_request`, the only place of this room that sees generated types' fields."""

from collections.abc import Iterator

from pdserve.client.answer import (
    Delta,
    Finished,
    Part,
    PromptScores,
    ScoredToken,
    Summary,
    Tokens,
    ToolCallDelta,
    TopLogprobs,
    Usage,
)
from pdserve.client.cluster import ClusterState, ModelCard, NodeView, SessionView
from pdserve.client.timeline import Overlapped, Stage, Stall, Timeline
from pdserve.core.work import FinishReason
from pdserve.rpc.process import process_from_pb
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import timeline_pb2


def parts_from_pb(message: pb.GenerateResponse, arrival_s: float) -> Iterator[Part]:
    """Yield the parts of one message in their order."""
    if message.prompt:
        yield PromptScores(tuple(_scored_from_pb(token) for token in message.prompt))
    for delta in message.deltas:
        yield Delta(
            text=delta.text,
            token_ids=tuple(delta.token_ids),
            logprobs=tuple(delta.logprobs),
            arrival_s=arrival_s,
            sequence=delta.sequence,
            top_logprobs=tuple(_top_from_pb(top) for top in delta.top_logprobs),
            reasoning=delta.reasoning,
            tool_calls=tuple(ToolCallDelta(t.index, t.id, t.name, t.arguments) for t in delta.tool_calls),
        )
    for end in message.finished:
        token_id = end.stop_token_id if end.HasField("stop_token_id") else None
        yield Finished(FinishReason(end.reason), end.stop, token_id, end.sequence)
    if message.HasField("summary"):
        yield summary_from_pb(message.summary)


def _scored_from_pb(token: pb.ScoredToken) -> ScoredToken:
    return ScoredToken(token.token_id, token.logprob if token.HasField("logprob") else None, _top_from_pb(token.top))


def _top_from_pb(top: pb.TopLogprobs) -> TopLogprobs:
    return tuple(zip(top.token_ids, top.logprobs, strict=True))


def tokens_from_pb(message: pb.TokenizeResponse) -> Tokens:
    """Return the tokens of an input."""
    return Tokens(tuple(message.token_ids), tuple(message.tokens), message.max_model_len)


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
