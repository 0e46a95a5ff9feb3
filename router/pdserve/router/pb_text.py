"""Where Tokenize and Detokenize meet our types."""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from pdserve.core.errors import InvalidRequest, NotServed
from pdserve.router import pb
from pdserve.router.text_calls import DetokenizeCall, TokenizeCall, Tokenized
from pdserve.v1 import inference_pb2

M = TypeVar("M", bound=Message)


def parse_tokenize(raw: bytes, max_bytes: int) -> TokenizeCall:
    """Return the call in `raw`. Raises InvalidRequest if it is too large or does not parse."""
    message = _parsed(inference_pb2.TokenizeRequest(), raw, max_bytes)
    asked = inference_pb2.GenerateRequest(model=message.model)
    match message.WhichOneof("input"):
        case "text":
            asked.text = message.text
        case "chat":
            asked.chat.CopyFrom(message.chat)
        case _:
            pass
    call = pb.parse_generate(asked.SerializeToString(), max_bytes)
    if call.unknown_fields:
        name = call.unknown_fields[0]
        raise NotServed(
            f"this router does not know the field {name}", hint="the client's contract is newer", field=name
        )
    return TokenizeCall(
        call.model, call.input, message.add_special_tokens if message.HasField("add_special_tokens") else True
    )


def parse_detokenize(raw: bytes, max_bytes: int) -> DetokenizeCall:
    """Return the call in `raw`. Raises InvalidRequest if it is too large or does not parse."""
    message = _parsed(inference_pb2.DetokenizeRequest(), raw, max_bytes)
    return DetokenizeCall(message.model, tuple(message.token_ids), message.show_special_tokens)


def tokenized_to_pb(tokenized: Tokenized) -> Message:
    """Return the answer of Tokenize."""
    return inference_pb2.TokenizeResponse(
        token_ids=tokenized.token_ids, tokens=tokenized.tokens, max_model_len=tokenized.max_model_len
    )


def _parsed(empty: M, raw: bytes, max_bytes: int) -> M:
    name = empty.DESCRIPTOR.name
    if len(raw) > max_bytes:
        raise InvalidRequest(f"the request has {len(raw)} bytes", hint=f"at most {max_bytes}; send less", field=name)
    try:
        empty.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidRequest(
            f"the bytes are no {name}: {error}", hint="see pdserve/v1/inference.proto", field=name
        ) from None
    return empty
