"""`pdserve status`: a cluster as its router sees it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.api_keys import ApiKeyOption, operators_key
from pdserve.cli.request_options import SERVER, ServerOption, takes_options
from pdserve.cli.tls_options import TlsOptions
from pdserve.core.build import process_as_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pdserve.client import Tls
    from pdserve.client.cluster import ClusterState, ModelCard, NodeView

STATE_STYLES = {
    "ready": "green",
    "draining": "yellow",
    "loading": "yellow",
    "connecting": "yellow",
    "not ready": "yellow",
}


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a cluster found. `is_ready` is what the router's health says."""

    server: str
    state: "ClusterState"
    models: "tuple[ModelCard, ...]"
    is_ready: bool

    @property
    def router_state(self) -> str:
        """Return "ready", "draining" or "not ready"."""
        if self.state.gauges.get("draining"):
            return "draining"
        return "ready" if self.is_ready else "not ready"


@takes_options
def status(
    trust: TlsOptions,
    server: ServerOption = SERVER,
    api_key: ApiKeyOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show a router, its nodes, their load and the open sessions."""
    from pdserve.cli.report import errors_as_json, output, run_async, write_json

    with errors_as_json(as_json):
        seen = run_async(look(server, trust.client_tls(), operators_key(api_key, server)))
        if as_json:
            write_json(state_as_json(seen))
        else:
            output().print(state_view(seen))


async def look(server: str, tls: "Tls | None" = None, api_key: str | None = None) -> Look:
    """Ask a router for its state and its models."""
    from pdserve.client import AsyncClient

    async with AsyncClient(server, tls=tls, api_key=api_key) as client:
        return Look(server, await client.cluster_state(), await client.models(), await client.is_ready())


def state_as_json(seen: Look) -> dict[str, object]:
    """Return the whole state as JSON values."""
    state = seen.state
    router = {"address": seen.server, "state": seen.router_state, **process_as_json(state.router)}
    return {
        "router": router | {"gauges": dict(state.gauges)},
        "models": [asdict(model) for model in seen.models],
        "nodes": [
            {
                "address": node.address,
                "kv_addresses": list(node.kv_addresses),
                "state": node.state,
                "reason": node.reason,
                **(process_as_json(node.process) if node.process else {}),
                "gauges": dict(node.gauges),
            }
            for node in state.nodes
        ],
        "sessions": [asdict(session) for session in state.sessions],
    }


def state_view(seen: Look) -> "RenderableType":
    """Return the state for people: a table of who is there, why some are not well, and what they are."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    state = seen.state
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("role", "address", "state"):
        table.add_column(column, no_wrap=True, overflow="fold")
    table.add_column("load")
    rows = [("router", seen.server, seen.router_state, router_load(state.gauges))]
    rows += [(role_of(node), node.address, node.state, node_load(node)) for node in state.nodes]
    for role, address, told, load in rows:
        table.add_row(role, address, Text(told, style=STATE_STYLES.get(told, "red")), load)
    lines = [
        *reason_lines(state),
        "",
        *build_lines(seen),
        *engine_lines(state),
        *model_lines(seen),
        *session_lines(state),
    ]
    return Group(table, *(Text(line) for line in lines))


def role_of(node: "NodeView") -> str:
    """Return the node's role, or "?" before it said hello."""
    return node.process.role.label if node.process else "?"


def router_load(gauges: Mapping[str, float]) -> str:
    """Return a router's load: its requests."""
    told = [("open", gauges.get("admitted", 0)), ("waiting", gauges.get("waiting", 0))]
    past = [(name, gauges.get(f"{name}_total", 0)) for name in ("served", "failed", "cancelled", "refused")]
    now = ", ".join(f"{name} {number:,.0f}" for name, number in told if number) or "idle"
    return ", ".join([now, *(f"{name} {number:,.0f}" for name, number in past if number)])


def node_load(node: "NodeView") -> str:
    """Return a node's load: what it works on, and its blocks."""
    gauges, role = node.gauges, role_of(node)
    sums = {"running": ("running", "ready"), "receiving": ("receiving",), "waiting": ("waiting", "expected")}
    told = [
        (word, sum(gauges.get(f"{role}.{name}", 0) for name in names))
        for word, names in (*sums.items(), ("stalled", ("stalled",)))
    ]
    parts = [f"{word} {number:,.0f}" for word, number in told if number] or (["idle"] if gauges else [])
    total = gauges.get("blocks.total")
    if total is not None:
        parts.append(f"{total - gauges.get('blocks.free', 0) - gauges.get('blocks.cached', 0):.0f}/{total:.0f} blocks")
    return ", ".join(parts)


def reason_lines(state: "ClusterState") -> list[str]:
    """Return why nodes are as they are, where the state alone does not tell."""
    from pdserve.client.unreachable import essence_of

    told = [node for node in state.nodes if node.reason]
    return ["", *(f"{node.address} is {node.state}: {essence_of(node.reason)}" for node in told)] if told else []


def build_lines(seen: Look) -> list[str]:
    """Return the version of all processes, or of each where they differ."""
    processes = [(seen.server, seen.state.router)]
    processes += [(node.address, node.process) for node in seen.state.nodes if node.process]
    return once("version", [(address, f"{its.version} ({its.commit})") for address, its in processes])


def engine_lines(state: "ClusterState") -> list[str]:
    """Return what the nodes compute with, or each node where they differ."""
    from pdserve.cli.report import count

    processes = [(node.address, node.process) for node in state.nodes if node.process]
    engines = [
        (address, f"{its.dtype} on {its.device}, blocks of {its.block_size}, {count(its.threads, 'thread')}")
        for address, its in processes
    ]
    weights = [(address, its.weight_digest[:12]) for address, its in processes]
    return [*once("engine", engines), *once("weights", weights)]


def once(name: str, facts: list[tuple[str, str]]) -> list[str]:
    """Return one line for a fact that all have in common, else one line for each address."""
    values = {fact for _, fact in facts}
    if len(values) < 2:
        return [f"{name + ':':<9}{fact}" for fact in values]
    return [f"{name + ':':<9}{fact}  {address}" for address, fact in facts]


def model_lines(seen: Look) -> list[str]:
    """Return the served models."""
    served = [
        f"{model.name} ({f'up to {model.max_model_len:,} tokens' if model.max_model_len else 'no node yet'})"
        for model in seen.models
    ]
    return [f"models:  {', '.join(served) or 'none yet'}"]


def session_lines(state: "ClusterState") -> list[str]:
    """Return the open sessions."""
    from pdserve.cli.report import count

    lines = [f"open sessions: {len(state.sessions)}"]
    return lines + [
        f"  {s.session_id} {s.state}, attempt {s.attempt}, {count(s.num_output_tokens, 'token')}, {s.age_s:.1f} s"
        + (f", {s.request_id}" if s.request_id else "")
        for s in state.sessions
    ]
