"""`pdserve status`: a cluster as its router sees it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.generate import SERVER, ServerOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pdserve.client.answer import ClusterState, ModelCard
    from pdserve.core.build import ProcessInfo

STATE_STYLES = {"ready": "green", "draining": "yellow", "loading": "yellow", "connecting": "yellow"}
STANDING = ("process.", "blocks.", "nodes.", "kv_links", "routers", "steps", "failed_steps", "forwards")
"""Gauges that say nothing of load; `--json` has all."""


def status(
    server: ServerOption = SERVER,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show a router, its nodes, their load and the open sessions."""
    from pdserve.cli.report import output, run_async, write_json

    state, models = run_async(look(server))
    if as_json:
        write_json(state_as_json(server, state, models))
    else:
        output().print(state_view(server, state, models))


async def look(server: str) -> "tuple[ClusterState, tuple[ModelCard, ...]]":
    """Ask a router for its state and its models."""
    from pdserve.client import Client

    async with Client(server) as client:
        return await client.cluster_state(), await client.models()


def state_as_json(server: str, state: "ClusterState", models: "tuple[ModelCard, ...]") -> dict[str, object]:
    """Return the whole state as JSON values."""
    return {
        "router": {"address": server, **process_as_json(state.router), "gauges": dict(state.gauges)},
        "models": [asdict(model) for model in models],
        "nodes": [
            {
                "address": node.address,
                "state": node.state,
                "reason": node.reason,
                **(process_as_json(node.process) if node.process else {}),
                "gauges": dict(node.gauges),
            }
            for node in state.nodes
        ],
        "sessions": [asdict(session) for session in state.sessions],
    }


def process_as_json(process: "ProcessInfo") -> dict[str, object]:
    """Return a process's facts as JSON values."""
    return asdict(process) | {"role": process.role.label, "incarnation": process.incarnation.hex()}


def state_view(server: str, state: "ClusterState", models: "tuple[ModelCard, ...]") -> "RenderableType":
    """Return the state as tables for people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("role", "address", "state", "run", "version", "engine", "weights", "load"):
        table.add_column(column, overflow="fold")
    router = state.router
    table.add_row(
        "router", server, Text("answers", style="green"), router.incarnation.hex()[:8], version_of(router), "", "",
        load_of(state.gauges),
    )  # fmt: skip
    for node in state.nodes:
        told = Text(node.state, style=STATE_STYLES.get(node.state, "red"))
        if node.reason:
            told.append(f" ({node.reason})")
        process = node.process
        if process is None:
            table.add_row("?", node.address, told)
            continue
        engine = f"{process.dtype} {process.device}, blocks of {process.block_size}, threads: {process.threads}"
        table.add_row(
            process.role.label, node.address, told, process.incarnation.hex()[:8], version_of(process), engine,
            process.weight_digest[:12], load_of(node.gauges),
        )  # fmt: skip
    served = ", ".join(f"{model.name} (up to {model.max_model_len} tokens)" for model in models) or "none yet"
    lines = [Text(f"models: {served}"), Text(f"open sessions: {len(state.sessions)}")]
    lines += [
        Text(
            f"  {s.session_id} {s.state} attempt {s.attempt}, {s.num_output_tokens} tokens, {s.age_s:.1f} s {s.request_id}"
        )
        for s in state.sessions
    ]
    return Group(table, Text(), *lines)


def version_of(process: "ProcessInfo") -> str:
    """Return version and commit."""
    return f"{process.version} ({process.commit})"


def load_of(gauges: Mapping[str, float]) -> str:
    """Return what is going on: gauges of work that are not zero, and the blocks in use."""
    busy = [f"{name} {value:g}" for name, value in sorted(gauges.items()) if value and not name.startswith(STANDING)]
    busy = [text for text in busy if not text.partition(" ")[0].endswith("_total")]
    shown = ", ".join(busy) or "idle"
    total = gauges.get("blocks.total")
    return shown if total is None else f"{shown}; {total - gauges.get('blocks.free', 0.0):g} of {total:g} blocks taken"
