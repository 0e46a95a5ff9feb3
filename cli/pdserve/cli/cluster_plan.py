"""From the options of `pdserve up` to the command line of every process."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.cli.api_keys import own_key
from pdserve.cli.child import ProcessPlan
from pdserve.cli.cluster_tls import client_files, tls_faults
from pdserve.cli.supervisor import ClusterPlan
from pdserve.core.errors import ConfigError
from pdserve.core.handed_secret import HandedSecret
from pdserve.core.process_settings import ProcessSettings
from pdserve.core.router_settings import RouterSettings
from pdserve.core.setting_faults import HINT, did_you_mean
from pdserve.core.settings import ROLE_SETTINGS, load_settings

HOST = "127.0.0.1"
MOST_NODES = 64
SUPERVISED = frozenset(
    {"host", "advertise", "kv_advertise", "kv_port", "ready_fd", "cluster_secret_fd", "prefill", "decode"}
)
"""Settings that a local cluster decides itself."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the user asked for, all of it text. `shared` maps settings' names to values; None counts as not given."""

    num_prefill: str = "1"
    num_decode: str = "1"
    shared: Mapping[str, str | None] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    config: Path | None = None


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """A cluster to run, the models that it needs, and whether its log lines are "text" or "json".

    `api_key`, if there is one, is what the supervisor itself asks the router with.
    """

    plan: ClusterPlan
    models: tuple[str, ...]
    log_format: str
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Sets:
    """What `--set` options say: settings for every role that has them, settings by role, and what is wrong with the rest."""

    shared: dict[str, str] = field(default_factory=dict)
    by_role: dict[str, dict[str, str]] = field(default_factory=lambda: {role: {} for role in ROLE_SETTINGS})
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Given:
    """The settings that were given for one role, by name, and what to call each in an error."""

    values: dict[str, str]
    places: dict[str, str]


def plan_cluster(options: ClusterOptions, secret: HandedSecret | None = None) -> PlannedCluster:
    """Return the plan, with `secret` for every process unless one is configured.

    Raises ConfigError with the faults of all options, of every role, and of the whole file together.
    """
    decided = {"host": HOST} | ({} if secret is None else {"cluster_secret_fd": str(secret.fd)})
    sets = parse_sets(options.sets)
    faults = [*count_faults(options), *sets.faults]
    given = {role: given_of(role, kind, options, sets) for role, kind in ROLE_SETTINGS.items()}
    settings: dict[str, ProcessSettings] = {}
    for role, kind in ROLE_SETTINGS.items():
        try:
            settings[role] = load_settings(
                kind, given[role].values | decided, options.config, options=given[role].places
            )
        except ConfigError as error:
            faults += [fault for fault in error.faults if fault not in faults]
    if faults:
        raise ConfigError(faults, hint=HINT)
    router = settings["router"]
    assert isinstance(router, RouterSettings)
    if apart := tls_faults(settings, HOST):
        raise ConfigError(apart, hint="docs/tls.md shows how to make the files")
    commands = {role: command_of(role, given[role].values, options.config) for role in ROLE_SETTINGS}
    counts = (("prefill", int(options.num_prefill)), ("decode", int(options.num_decode)))
    nodes = [ProcessPlan(f"{role}-{i}", role, commands[role]) for role, count in counts for i in range(count)]
    plan = ClusterPlan(
        router=ProcessPlan("router", "router", commands["router"]),
        nodes=tuple(nodes),
        host=HOST,
        port=router.port,
        http_port=router.http_port,
        tls=client_files(router),
        secret=None if any(its.has_own_secret for its in settings.values()) else secret,
        drain_s=router.drain_s,
    )
    models = tuple(dict.fromkeys(its.model for its in settings.values()))
    return PlannedCluster(plan, models, router.log_format, own_key(router))


def count_faults(options: ClusterOptions) -> list[str]:
    """Return what is wrong with the numbers of nodes."""
    counts = (("--prefill", options.num_prefill), ("--decode", options.num_decode))
    return [
        f"{name}: must be a whole number from 1 to {MOST_NODES} (given: {text!r})"
        for name, text in counts
        if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= MOST_NODES)
    ]


def given_of(role: str, kind: type[ProcessSettings], options: ClusterOptions, sets: Sets) -> Given:
    """Return what was given for `role`. The port is the router's alone."""
    named = {name: value for name, value in options.shared.items() if value is not None}
    shared = {
        name: value
        for name, value in (sets.shared | named).items()
        if name in kind.model_fields and (name != "port" or role == "router")
    }
    places = {name: f"--set {name}" for name in shared if name not in named}
    own = sets.by_role[role]
    return Given(shared | own, places | {name: f"--set {role}.{name}" for name in own})


def parse_sets(texts: Sequence[str]) -> Sets:
    """Return what texts NAME=VALUE and ROLE.NAME=VALUE say, with a fault for every text that says nothing."""
    sets = Sets()
    everything = {name for kind in ROLE_SETTINGS.values() for name in kind.model_fields}
    for text in texts:
        target, is_set, value = text.partition("=")
        role, dot, name = target.rpartition(".")
        name = name.replace("-", "_")
        known = set(ROLE_SETTINGS[role].model_fields) if role in ROLE_SETTINGS else everything
        if not is_set or (dot and role not in ROLE_SETTINGS):
            # The value may be a secret, and is not what is wrong.
            shown = f"{target}=…" if is_set else target
            sets.faults.append(
                f"--set {shown}: must be NAME=VALUE or ROLE.NAME=VALUE with a role of {', '.join(ROLE_SETTINGS)}"
            )
        elif name not in known:
            sets.faults.append(f"--set {target}: unknown setting{did_you_mean(name, known)}")
        elif name in SUPERVISED or (name == "port" and role in ("prefill", "decode")):
            sets.faults.append(f"--set {target}: a local cluster decides {name} itself")
        else:
            (sets.by_role[role] if dot else sets.shared)[name] = value
    return sets


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
