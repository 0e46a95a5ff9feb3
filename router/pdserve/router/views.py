"""What operators see of a router, as JSON values: the load in a few numbers, and the whole state."""

from collections.abc import Mapping
from dataclasses import asdict

from pdserve.core.build import Role, process_as_json
from pdserve.router.answering import Answering

MAX_SESSION_ROWS = 1000

Json = dict[str, object]


def load_json(answering: Answering) -> Json:
    """Return how busy the router and its pools are. Blocks are in each node's own size; only usable nodes are summed up."""
    gauges = answering.sessions.gauges()
    return {
        "ready": answering.membership.is_ready,
        "draining": answering.admission.is_draining,
        "sessions": {"open": int(gauges["admitted"]), "waiting": int(gauges["waiting"])},
        "pools": {role.label: _pool(answering, role) for role in (Role.PREFILL, Role.DECODE)},
    }


def state_json(answering: Answering) -> Json:
    """Return what GetClusterState shows."""
    return {
        "router": process_as_json(answering.process) | {"gauges": answering.all_gauges()},
        "nodes": [
            {
                "address": row.address,
                "kv_addresses": list(row.kv_addresses),
                "state": row.state,
                "reason": row.reason,
                **({} if row.process is None else process_as_json(row.process)),
                "gauges": dict(row.gauges),
            }
            for row in answering.membership.rows()
        ],
        "sessions": [
            {("request_id" if name == "label" else name): value for name, value in asdict(row).items()}
            for row in answering.sessions.rows(MAX_SESSION_ROWS)
        ],
    }


def _pool(answering: Answering, role: Role) -> Mapping[str, int]:
    loads = [load for load in answering.membership.loads() if load.role is role]
    return {
        "nodes": sum(member.role is role for member in answering.membership.members),
        "usable": len(loads),
        "running": sum(load.num_running for load in loads),
        "waiting": sum(load.num_waiting for load in loads),
        "waiting_tokens": sum(load.num_waiting_tokens for load in loads),
        "blocks": sum(load.num_blocks for load in loads),
        "free_blocks": sum(max(0, load.num_free_blocks) for load in loads),
    }
