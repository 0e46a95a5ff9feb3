"""Where the public contract's protobuf meets our types: requests in, answers and views out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pdserve.core.build import ProcessInfo
from pdserve.core.errors import InvalidRequest
from pdserve.core.work import FinishReason, TopLogprobs
from pdserve.router.instructions import Answer, Finish
from pdserve.router.mailbox import Parcel
from pdserve.router.output import Gain, PromptToken
from pdserve.router.request import (
    ChatInput,
    ChatTurn,
    ChoiceOutput,
    GenerateCall,
    GrammarOutput,
    JsonObjectOutput,
    JsonSchemaOutput,
    PromptInput,
    RegexOutput,
    StructuredOutput,
    TextInput,
    TokenInput,
    ToolCall,
    ToolMode,
    ValidRequest,
)
from pdserve.router.timeline import SCHEMA_VERSION, NodeDuration, Timeline
from pdserve.rpc.process import process_to_pb
from pdserve.v1 import inference_pb2, timeline_pb2

MAX_SCORES_PER_MESSAGE = 4096
"""Prompt tokens with 20 alternatives each take up to 240 bytes: this many stay under 1 MiB."""
MAX_TURNS = 4096
"""Turns of a conversation; each costs time on the event loop before it can be known to be too long."""


def parse_generate(raw: bytes, max_bytes: int) -> GenerateCall:
    """Return the call in `raw`. Raises InvalidRequest if it is too large or does not parse."""
    if len(raw) > max_bytes:
        raise InvalidRequest(
            f"the request has {len(raw)} bytes", hint=f"at most {max_bytes}; send less", field="GenerateRequest"
        )
    try:
        message = inference_pb2.GenerateRequest.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest(
            f"the bytes are no GenerateRequest: {error}", hint="see pdserve/v1/inference.proto", field="GenerateRequest"
        ) from None
    num_turns = len(message.chat.messages)
    if num_turns > MAX_TURNS:
        raise InvalidRequest(
            f"the conversation has {num_turns} turns", hint=f"at most {MAX_TURNS}; send less", field="chat.messages"
        )
    return call_from_pb(message)


def call_from_pb(message: inference_pb2.GenerateRequest) -> GenerateCall:
    """Return the call as plain values; fields that were not set are None."""
    sampling, stop = message.sampling, message.stop
    return GenerateCall(
        request_id=message.request_id,
        model=message.model,
        input=_input_from_pb(message),
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        min_p=sampling.min_p if sampling.HasField("min_p") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None,
        presence_penalty=sampling.presence_penalty if sampling.HasField("presence_penalty") else None,
        frequency_penalty=sampling.frequency_penalty if sampling.HasField("frequency_penalty") else None,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        banned_token_ids=tuple(sampling.banned_token_ids),
        banned_words=tuple(sampling.banned_words),
        max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None,
        stop=tuple(stop.stop),
        stop_token_ids=tuple(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos if stop.HasField("ignore_eos") else None,
        min_tokens=stop.min_tokens if stop.HasField("min_tokens") else None,
        include_stop=stop.include_stop if stop.HasField("include_stop") else None,
        n=message.n if message.HasField("n") else None,
        priority=message.priority if message.HasField("priority") else None,
        has_objectives=message.HasField("objectives"),
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        stream=message.stream if message.HasField("stream") else None,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        structured_output=_structured_from_pb(message.structured_output),
        unknown_fields=tuple(_unknown_fields(message, "")),
    )


@dataclass(frozen=True, slots=True)
class Closing:
    """What the summary says besides the session's own answer."""

    request: ValidRequest
    processes: Sequence[ProcessInfo]


def response(parcel: Parcel, closing: Closing) -> Message:
    """Return one message of an answer; with a parcel that holds the Answer it is the last."""
    message = inference_pb2.GenerateResponse(
        prompt=[_scored_to_pb(token) for token in parcel.prompt],
        deltas=[_delta_to_pb(gain, closing.request.top_logprobs > 0) for gain in parcel.gains if gain.shown],
        finished=[_finished_to_pb(finish) for finish in parcel.finished],
    )
    if isinstance(parcel.end, Answer):
        message.summary.CopyFrom(_summary_to_pb(parcel.end, closing))
    return message


def prompt_pieces(parcel: Parcel) -> Iterable[Parcel]:
    """Cut a parcel so that no message of a stream holds the scores of more than `MAX_SCORES_PER_MESSAGE` prompt tokens."""
    tokens = parcel.prompt
    starts = range(0, len(tokens) - MAX_SCORES_PER_MESSAGE, MAX_SCORES_PER_MESSAGE)
    for start in starts:
        yield Parcel(prompt=tokens[start : start + MAX_SCORES_PER_MESSAGE])
    yield replace(parcel, prompt=tokens[len(starts) * MAX_SCORES_PER_MESSAGE :])


def models_response(name: str, max_model_len: int, vocab_size: int, has_template: bool) -> Message:
    """Return the list of the one served model."""
    model = inference_pb2.Model(
        name=name, max_model_len=max_model_len, vocab_size=vocab_size, has_chat_template=has_template
    )
    return inference_pb2.ListModelsResponse(models=[model])


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node for GetClusterState."""

    address: str
    state: str
    reason: str
    process: ProcessInfo | None
    gauges: Mapping[str, float]
    kv_addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One open session for GetClusterState."""

    session_id: int
    label: str
    state: str
    attempt: int
    age_s: float
    num_output_tokens: int


def cluster_response(
    router: ProcessInfo, nodes: Iterable[NodeRow], gauges: Mapping[str, float], sessions: Iterable[SessionRow]
) -> Message:
    """Return the router's view of the cluster."""
    return inference_pb2.GetClusterStateResponse(
        router=process_to_pb(router),
        nodes=[
            inference_pb2.NodeView(
                address=row.address,
                state=row.state,
                reason=row.reason,
                process=None if row.process is None else process_to_pb(row.process),
                gauges=dict(row.gauges),
                kv_addresses=row.kv_addresses,
            )
            for row in nodes
        ],
        gauges=dict(gauges),
        sessions=[
            inference_pb2.SessionView(
                session_id=row.session_id,
                request_id=row.label,
                state=row.state,
                attempt=row.attempt,
                age_s=row.age_s,
                num_output_tokens=row.num_output_tokens,
            )
            for row in sessions
        ],
    )


def _input_from_pb(message: inference_pb2.GenerateRequest) -> PromptInput | None:
    match message.WhichOneof("input"):
        case "text":
            return TextInput(message.text)
        case "token_ids":
            return TokenInput(tuple(message.token_ids.ids))
        case "chat":
            return _chat_from_pb(message.chat)
        case _:
            return None


def _chat_from_pb(chat: inference_pb2.ChatInput) -> ChatInput:
    return ChatInput(
        turns=tuple(
            ChatTurn(
                role=turn.role,
                content=turn.content if turn.HasField("content") else None,
                name=turn.name,
                tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in turn.tool_calls),
                tool_call_id=turn.tool_call_id,
                reasoning=turn.reasoning,
            )
            for turn in chat.messages
        ),
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
        tools=tuple(chat.tools),
        continue_final_message=chat.continue_final_message,
        template_arguments=chat.template_arguments,
        tool_mode=_tool_mode_from_pb(chat.tool_choice.mode),
        tool_name=chat.tool_choice.name,
        parse_output=chat.parse_output if chat.HasField("parse_output") else None,
    )


def _tool_mode_from_pb(mode: int) -> ToolMode:
    try:
        return ToolMode(mode or ToolMode.AUTO)
    except ValueError:
        raise InvalidRequest(
            f"there is no mode {mode}", hint="see ToolChoice.Mode in the contract", field="chat.tool_choice.mode"
        ) from None


def _structured_from_pb(message: inference_pb2.StructuredOutput) -> StructuredOutput | None:
    match message.WhichOneof("language"):
        case "json_schema":
            return JsonSchemaOutput(message.json_schema)
        case "json_object" if message.json_object:
            return JsonObjectOutput()
        case "regex":
            return RegexOutput(message.regex)
        case "choice":
            return ChoiceOutput(tuple(message.choice.texts))
        case "grammar":
            return GrammarOutput(message.grammar)
        case _:
            return None


def _unknown_fields(message: Message, path: str) -> Iterable[str]:
    """Yield the path of every field that a newer contract added, at any depth."""
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        yield f"{path}#{unknown[index].field_number}"
    for descriptor, value in message.ListFields():
        inner = descriptor.message_type
        if inner is None or inner.GetOptions().map_entry:
            continue  # the contract's maps hold plain numbers
        children = value if isinstance(value, Iterable) else (value,)
        for child in children:
            yield from _unknown_fields(child, f"{path}{descriptor.name}.")


def _delta_to_pb(gain: Gain, has_top: bool) -> inference_pb2.Delta:
    tokens = tuple(gain.shown.tokens)
    return inference_pb2.Delta(
        sequence=gain.sequence,
        text=gain.shown.text,
        token_ids=[token.token_id for token in tokens],
        logprobs=[token.logprob for token in tokens],
        top_logprobs=[_top_to_pb(token.top) for token in tokens] if has_top else (),
        reasoning=gain.shown.reasoning,
        tool_calls=[
            inference_pb2.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in gain.shown.tool_calls
        ],
    )


def _scored_to_pb(token: PromptToken) -> inference_pb2.ScoredToken:
    return inference_pb2.ScoredToken(
        token_id=token.token_id,
        logprob=token.logprob,
        top=_top_to_pb(token.top) if token.top else None,
    )


def _top_to_pb(top: TopLogprobs) -> inference_pb2.TopLogprobs:
    return inference_pb2.TopLogprobs(
        token_ids=[token_id for token_id, _ in top], logprobs=[logprob for _, logprob in top]
    )


def _finished_to_pb(finish: Finish) -> inference_pb2.Finished:
    message = inference_pb2.Finished(
        sequence=finish.sequence,
        reason=inference_pb2.FinishReason.ValueType(finish.reason),
        stop=finish.stop,
    )
    if finish.reason is FinishReason.STOP and finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    return message


def _summary_to_pb(answer: Answer, closing: Closing) -> inference_pb2.Summary:
    return inference_pb2.Summary(
        request_id=closing.request.label,
        model=closing.request.model,
        usage=inference_pb2.Usage(
            prompt_tokens=answer.num_prompt_tokens,
            cached_prompt_tokens=answer.num_cached_tokens or 0,
            completion_tokens=answer.num_completion_tokens,
        ),
        timeline=_timeline_to_pb(answer.timeline),
        seed=closing.request.sampling.seed,
        processes=[process_to_pb(process) for process in closing.processes],
    )


def _timeline_to_pb(timeline: Timeline) -> timeline_pb2.Timeline:
    beside = timeline.overlapped
    return timeline_pb2.Timeline(
        schema_version=SCHEMA_VERSION,
        e2el_s=timeline.e2el_s,
        ttft_s=timeline.ttft_s,
        tpot_s=timeline.tpot_s,
        stages=[
            timeline_pb2.Stage(
                name=stage.name,
                attempt=stage.attempt,
                duration_s=stage.duration_s,
                nodes=_nodes_to_pb(stage.nodes),
                hop_s=stage.hop_s,
            )
            for stage in timeline.stages
        ],
        overlapped=timeline_pb2.Overlapped(
            exposed_transfer_s=beside.exposed_transfer_s,
            kv_bytes=beside.kv_bytes,
            kv_frames=beside.kv_frames,
            pack_s=beside.pack_s,
            reserve_wait_s=beside.reserve_wait_s,
            place_s=beside.place_s,
            stalled_s=beside.stalled_s,
            nodes=_nodes_to_pb(beside.nodes),
        ),
        attempts=timeline.attempts,
        stalls=[
            timeline_pb2.Stall(attempt=stall.attempt, cause=stall.cause, duration_s=stall.duration_s)
            for stall in timeline.stalls
        ],
    )


def _nodes_to_pb(nodes: Iterable[NodeDuration]) -> list[timeline_pb2.NodeDuration]:
    return [timeline_pb2.NodeDuration(name=node.name, duration_s=node.duration_s) for node in nodes]
