"""From the options of `pdserve up` to the command line of every process."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.cli.child import ProcessPlan
from pdserve.cli.supervisor import ClusterPlan
from pdserve.core.errors import ConfigError
from pdserve.core.settings import (
    DecodeSettings,
    PrefillSettings,
    ProcessSettings,
    RouterSettings,
    load_settings,
)

HOST = "127.0.0.1"
SUPERVISED = frozenset({"host", "advertise", "kv_advertise", "kv_port", "ready_fd", "prefill", "decode"})
"""Settings that a local cluster decides itself."""
KINDS: Mapping[str, type[ProcessSettings]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the user asked for. `shared` and `by_role` map settings' names to text; None counts as not given."""

    num_prefill: int = 1
    num_decode: int = 1
    shared: Mapping[str, str | None] | None = None
    by_role: Mapping[str, Mapping[str, str]] | None = None
    config: Path | None = None


def plan_cluster(options: ClusterOptions) -> tuple[ClusterPlan, tuple[str, ...]]:
    """Return the plan and the models that it needs. Raises ConfigError with the faults of every role together."""
    given = {role: given_of(role, kind, options) for role, kind in KINDS.items()}
    faults: list[str] = []
    models: list[str] = []
    for role, kind in KINDS.items():
        try:
            settings = load_settings(kind, given[role] | {"host": HOST}, options.config)
            models.append(settings.model)
        except ConfigError as error:
            faults += [fault for fault in error.faults if fault not in faults]
    if faults:
        raise ConfigError(faults)
    router = load_settings(RouterSettings, given["router"] | {"host": HOST}, options.config)
    commands = {role: command_of(role, given[role], options.config) for role in KINDS}
    counts = (("prefill", options.num_prefill), ("decode", options.num_decode))
    nodes = [ProcessPlan(f"{role}-{i}", role, commands[role]) for role, count in counts for i in range(count)]
    plan = ClusterPlan(
        router=ProcessPlan("router", "router", commands["router"]),
        nodes=tuple(nodes),
        host=HOST,
        port=router.port,
        drain_s=router.drain_s,
    )
    return plan, tuple(dict.fromkeys(models))


def given_of(role: str, kind: type[ProcessSettings], options: ClusterOptions) -> dict[str, str]:
    """Return the settings that were given for `role`, by name. The port is the router's alone."""
    shared = {
        name: value
        for name, value in (options.shared or {}).items()
        if value is not None and name in kind.model_fields and (name != "port" or role == "router")
    }
    return shared | dict((options.by_role or {}).get(role, {}))


def parse_sets(texts: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return shared settings and settings by role from texts NAME=VALUE and ROLE.NAME=VALUE.

    Raises ConfigError naming every text that is neither, and every name that no role knows.
    """
    shared: dict[str, str] = {}
    by_role: dict[str, dict[str, str]] = {role: {} for role in KINDS}
    faults = []
    for text in texts:
        target, is_set, value = text.partition("=")
        role, dot, name = target.rpartition(".")
        name = name.replace("-", "_")
        known = KINDS[role].model_fields if role in KINDS else {n for kind in KINDS.values() for n in kind.model_fields}
        if not is_set or (dot and role not in KINDS):
            faults.append(f"--set {text}: not NAME=VALUE or ROLE.NAME=VALUE with a role of {', '.join(KINDS)}")
        elif name not in known:
            faults.append(f"--set {text}: unknown setting {name!r}")
        elif name in SUPERVISED or (name == "port" and role in ("prefill", "decode")):
            faults.append(f"--set {text}: a local cluster decides {name} itself")
        else:
            (by_role[role] if dot else shared)[name] = value
    if faults:
        raise ConfigError(faults)
    return shared, by_role


def command_of(role: str, given: Mapping[str, str], config: Path | None) -> tuple[str, ...]:
    """Return the command of a process, less its addresses.

    `-P` keeps the working directory off the module path: in a checkout its folders would pass for other packages.
    """
    command = [sys.executable, "-P", "-m", "pdserve.cli", role]
    if config is not None:
        command += ["--config", str(config)]
    for name, value in given.items():
        if name != "port":
            command += [f"--{name.replace('_', '-')}={value}"]
    return tuple(command)
