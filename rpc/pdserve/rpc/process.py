"""`ProcessInfo` to protobuf and back."""

from pdserve.core.build import ProcessInfo, Role
from pdserve.core.ids import Incarnation
from pdserve.v1 import inference_pb2 as pb


def process_to_pb(info: ProcessInfo) -> pb.ProcessInfo:
    """Return the message of `info`."""
    return pb.ProcessInfo(
        role=pb.Role.ValueType(info.role),
        incarnation=info.incarnation.hex(),
        version=info.version,
        commit=info.commit,
        dtype=info.dtype,
        threads=info.threads,
        block_size=info.block_size,
        weight_digest=info.weight_digest,
        device=info.device,
        attention_backend=info.attention_backend,
    )


def process_from_pb(message: pb.ProcessInfo) -> ProcessInfo:
    """Return the value of `message`; raises ValueError if its role or incarnation makes no sense."""
    return ProcessInfo(
        role=Role(message.role),
        incarnation=Incarnation(bytes.fromhex(message.incarnation)),
        version=message.version,
        commit=message.commit,
        dtype=message.dtype,
        threads=message.threads,
        block_size=message.block_size,
        weight_digest=message.weight_digest,
        device=message.device,
        attention_backend=message.attention_backend,
    )
