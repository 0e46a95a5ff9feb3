"""A router's cluster as it shows it: models, nodes, sessions."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.core.build import ProcessInfo


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model; lengths and sizes in tokens."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as the router sees it. `process` is None until it said hello."""

    address: str
    state: str
    reason: str
    process: ProcessInfo | None
    gauges: Mapping[str, float]
    kv_addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionView:
    """An open session."""

    session_id: int
    request_id: str
    state: str
    attempt: int
    age_s: float
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A router, its nodes and its open sessions."""

    router: ProcessInfo
    nodes: tuple[NodeView, ...]
    gauges: Mapping[str, float]
    sessions: tuple[SessionView, ...]
