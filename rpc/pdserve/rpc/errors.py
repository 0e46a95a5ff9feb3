"""`PdserveError` to gRPC status with `google.rpc` details, and back."""

from collections.abc import Iterable
from typing import Any, NoReturn, cast

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pdserve.core import errors
from pdserve.core.errors import GRPC_CODES, PdserveError

DOMAIN = "pdserve"


def code_of(error: PdserveError) -> grpc.StatusCode:
    """Return the status code that the table in `core.errors` gives."""
    return grpc.StatusCode[GRPC_CODES[type(error)]]


def status_of(error: PdserveError) -> status_pb2.Status:
    """Return the full status: ErrorInfo always (the hint is in its metadata); BadRequest with a field; RetryInfo with a time."""
    metadata = dict(error.metadata)
    if error.hint:
        metadata["hint"] = error.hint
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata),
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    return status_pb2.Status(code=code_of(error).value[0], message=str(error), details=packed)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: PdserveError) -> NoReturn:
    """End the call with `error`. Raises, as `context.abort` does."""
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("context.abort always raises")


def terse(reason: str, message: str) -> str:
    """Return the message of a status that has no room for details; `error_from_rpc` reads the reason off it."""
    return f"{reason}: {message}" if reason else message


def reason_in(trailing_metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the reason of the error whose details the metadata hold; "" if they hold none."""
    status, info = _status_of(trailing_metadata), error_details_pb2.ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    return str(info.reason)


def error_from_rpc(error: grpc.RpcError) -> PdserveError:
    """Return the typed error that a failed call carries; calls without our details become the class of their code."""
    status = _status_in(error)
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details if status is not None else ():
        for kind in (info, bad, retry):
            if detail.Is(kind.DESCRIPTOR):
                detail.Unpack(kind)
    metadata = dict(info.metadata)
    hint = metadata.pop("hint", "")
    message = (error.details() or error.code().name).removesuffix(f" ({hint})")
    first, _, rest = message.partition(": ")
    if status is None and rest and _kind_of(first) is not None:
        info.reason, message = first, rest
    return _class_of(info.reason, error.code())(
        message,
        hint=hint,
        field=bad.field_violations[0].field if bad.field_violations else "",
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
        metadata=metadata,
    )


def _status_in(error: grpc.RpcError) -> status_pb2.Status | None:
    # The stubs know metadata as objects with two attributes; they are pairs.
    return _status_of(cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()))


def _status_of(pairs: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status | None:
    for key, value in pairs:
        if key == rpc_status.GRPC_DETAILS_METADATA_KEY:
            raw = value if isinstance(value, bytes) else value.encode("latin-1")
            return status_pb2.Status.FromString(raw)
    return None


def _class_of(reason: str, code: grpc.StatusCode) -> type[PdserveError]:
    return _kind_of(reason) or _BY_CODE.get(code, errors.InternalError)


def _kind_of(reason: str) -> type[PdserveError] | None:
    kinds = (kind for kind in GRPC_CODES if kind is not errors.ConfigError)
    return next((kind for kind in kinds if kind("").reason == reason), None)


_BY_CODE: dict[grpc.StatusCode, type[PdserveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: errors.NotServed,
    grpc.StatusCode.NOT_FOUND: errors.UnknownModel,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.NoNodes,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.Forbidden,
    grpc.StatusCode.FAILED_PRECONDITION: errors.SetupError,
}
