"""Settings of each process: where they come from, their bounds, and every fault at once.

Order, first wins: command line, environment (`PDSERVE_…`), TOML file (`--config`, or PDSERVE_CONFIG), default. In the file,
keys at the top level are for every role and a table `[router]`, `[prefill]` or `[decode]` is for one role.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pdserve.core.errors import ConfigError
from pdserve.core.hold import parse_hold
from pdserve.core.models import DEFAULT_MODEL

WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::", "[::]", "*"})  # noqa: S104 - compared with, never bound
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
T = TypeVar("T", bound="ProcessSettings")


class ProcessSettings(BaseSettings):
    """What every process is told."""

    model_config = SettingsConfigDict(env_prefix="PDSERVE_", extra="forbid", frozen=True)
    table: ClassVar[str] = ""

    host: str = Field("127.0.0.1", description="Address to listen on; loopback unless told otherwise.")
    port: int = Field(0, ge=0, le=65_535, description="gRPC port; 0 takes a free one.")
    advertise: str | None = Field(None, description="Host that others reach this process by; needed with 0.0.0.0.")
    model: str = Field(DEFAULT_MODEL, description="Built-in alias, or a Hugging Face model folder.")
    log_format: str = Field("text", pattern="^(text|json)$", description="text or json.")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error.")
    lease_s: Seconds = Field(3.0, description="Silence after which the other side of a stream counts as gone.")
    beat_s: Seconds = Field(0.5, description="Interval of signs of life.")
    drain_s: Seconds = Field(30.0, description="Time that accepted work gets at shutdown.")
    cluster_secret: SecretStr | None = Field(None, description="Shared secret of the cluster; required off loopback.")
    hold_at: str | None = Field(None, description="Test hook STAGE[:N]; refused unless PDSERVE_TEST=1.")
    ready_fd: int | None = Field(None, ge=0, description="File descriptor that gets one JSON line of bound addresses.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic-settings names the sources
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: command line, environment, file."""
        assert isinstance(init_settings, InitSettingsSource)
        given = dict(init_settings.init_kwargs)
        file = given.pop("__file__", {})
        return (
            InitSettingsSource(settings_cls, init_kwargs=given),
            env_settings,
            InitSettingsSource(settings_cls, init_kwargs=file),
        )

    @field_validator("host")
    @classmethod
    def _host_is_set(cls, host: str) -> str:
        if not host:
            raise ValueError("must not be empty")
        return host

    @field_validator("hold_at")
    @classmethod
    def _hold_is_known_and_allowed(cls, hold_at: str | None) -> str | None:
        try:
            parse_hold(hold_at)
        except ConfigError as error:
            raise ValueError(error.faults[0].removeprefix("hold_at: ")) from None
        return hold_at

    @model_validator(mode="after")
    def _is_reachable_and_guarded(self) -> Self:
        faults = []
        if self.advertise is not None and self.advertise in WILDCARD_HOSTS:
            faults.append(f"advertise: {self.advertise!r} is no address that others can reach; give a host name or IP")
        if self.host in WILDCARD_HOSTS and self.advertise is None:
            faults.append("advertise: required when listening on all addresses; give the host that others reach")
        if self.beat_s * 3 > self.lease_s:
            faults.append("lease_s: must be at least three times beat_s")
        if self.needs_secret and self.cluster_secret is None:
            faults.append("cluster_secret: required off loopback; set PDSERVE_CLUSTER_SECRET on every process")
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def needs_secret(self) -> bool:
        """Whether strangers could reach this process."""
        return self.host not in LOOPBACK_HOSTS

    @property
    def advertised_host(self) -> str:
        """Host that others reach this process by."""
        return self.advertise or self.host

    @property
    def secret(self) -> bytes | None:
        """The cluster secret, as bytes."""
        return None if self.cluster_secret is None else self.cluster_secret.get_secret_value().encode()


class RouterSettings(ProcessSettings):
    """What a router is told."""

    table: ClassVar[str] = "router"

    port: int = Field(50_051, ge=0, le=65_535, description="gRPC port; 0 takes a free one.")
    prefill: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Addresses of prefill nodes, HOST:PORT, comma-separated."
    )
    decode: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Addresses of decode nodes, HOST:PORT, comma-separated."
    )
    max_sessions: Positive = Field(1024, description="Open sessions, waiting ones included; more are refused.")
    max_queue: Positive = Field(256, description="Requests that may wait for a node; more are refused.")
    queue_wait_s: Seconds = Field(60.0, description="Longest wait for a node before a request is refused.")
    max_attempts: Positive = Field(4, description="Failed attempts after which a request ends with an error.")
    resume_wait_s: Seconds = Field(30.0, description="Longest wait for a node that can take over a request.")
    max_unread_bytes: Positive = Field(1 << 20, description="Text and tokens kept for a client that does not read.")
    max_message_bytes: Positive = Field(4 << 20, description="Largest request.")

    @field_validator("prefill", "decode", mode="before")
    @classmethod
    def _split_addresses(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("prefill", "decode")
    @classmethod
    def _addresses_are_usable(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            host, colon, port = address.rpartition(":")
            if not colon or host in WILDCARD_HOSTS or not port.isdigit() or not 0 < int(port) <= 65_535:
                raise ValueError(f"{address!r} is not HOST:PORT")
        if len(set(addresses)) != len(addresses):
            raise ValueError("names an address twice")
        return addresses

    @model_validator(mode="after")
    def _pools_are_apart(self) -> Self:
        both = set(self.prefill) & set(self.decode)
        if both:
            raise ValueError(f"decode: {', '.join(sorted(both))} is also given as prefill; a node has one role")
        return self


class NodeSettings(ProcessSettings):
    """What a prefill or decode node is told."""

    threads: Positive = Field(1, description="Engine threads; set before torch is imported.")
    block_size: int = Field(16, ge=1, le=1024, description="Token positions per KV block.")
    kv_blocks: Positive = Field(1024, description="Blocks of the KV pool, allocated once at start.")
    max_model_len: Positive | None = Field(
        None, description="Longest prompt plus answer; unset: the model's own length."
    )
    dtype: str = Field(
        "auto",
        pattern="^(auto|float32|bfloat16|float16)$",
        description="auto (float32 on CPU), float32, bfloat16 or float16.",
    )
    device: str = Field("auto", description="auto, cpu or cuda[:N].")
    max_waiting: Positive = Field(256, description="Submits that may wait; more are answered BUSY.")
    kv_window_bytes: Positive = Field(64 << 20, description="KV bytes that may be under way from one peer.")
    kv_staging_bytes: Positive = Field(16 << 20, description="KV bytes that may be packed and not yet sent.")
    grant_wait_s: Seconds = Field(30.0, description="Longest wait for blocks on the decode node.")
    transfer_idle_s: Seconds = Field(10.0, description="Silence after which a running transfer is given up.")
    step_limit_s: Seconds = Field(60.0, description="Age of a running step at which the engine counts as stuck.")


class PrefillSettings(NodeSettings):
    """What a prefill node is told."""

    table: ClassVar[str] = "prefill"

    token_budget: Positive = Field(128, description="Prompt tokens per step, over all prompts of the step.")
    max_prompts_per_step: Positive = Field(16, description="Prompts that may share a step.")
    open_ahead: Positive = Field(8, description="Waiting prompts that ask their decode node for blocks early.")


class DecodeSettings(NodeSettings):
    """What a decode node is told."""

    table: ClassVar[str] = "decode"

    kv_port: int = Field(0, ge=0, le=65_535, description="Port for KV; 0 takes a free one.")
    kv_advertise: str | None = Field(None, description="Host that prefill nodes reach for KV; unset: as advertise.")
    max_batch: Positive = Field(64, description="Sequences per step.")
    reserve: str = Field(
        "on_open", pattern="^(on_submit|on_open)$", description="When blocks are promised: on_submit or on_open."
    )
    growth_blocks: int = Field(1, ge=0, description="Blocks kept free per running sequence when another is let in.")

    @field_validator("kv_advertise")
    @classmethod
    def _kv_is_reachable(cls, kv_advertise: str | None) -> str | None:
        if kv_advertise is not None and kv_advertise in WILDCARD_HOSTS:
            raise ValueError(f"{kv_advertise!r} is no address that others can reach")
        return kv_advertise


def load_settings(kind: type[T], given: Mapping[str, Any], config: Path | None = None) -> T:
    """Return the settings of one process.

    `given` holds what the command line set (values that are None count as not set). Raises ConfigError naming every fault.
    """
    stated = os.environ.get("PDSERVE_CONFIG")
    path = config or (Path(stated) if stated else None)
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    values["__file__"] = {} if path is None else _read_file(path, kind)
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(_faults(kind, values, error)) from None


def _faults(kind: type[ProcessSettings], values: Mapping[str, Any], error: ValidationError) -> list[str]:
    """Return every fault: those of single fields, then those between fields, found with the faulty ones at their defaults."""
    details = error.errors()
    faults = [fault for detail in details for fault in _fault(detail).split("\n")]
    wrong = {str(detail["loc"][0]) for detail in details if detail["loc"]} & kind.model_fields.keys()
    if wrong:
        defaults = {name: kind.model_fields[name].default for name in wrong}
        known = {name: value for name, value in values.items() if name in kind.model_fields or name == "__file__"}
        known["__file__"] = {name: value for name, value in values["__file__"].items() if name in kind.model_fields}
        try:
            kind(**(known | defaults))
        except ValidationError as rest:
            faults += [fault for detail in rest.errors() for fault in _fault(detail).split("\n")]
    return faults


def _read_file(path: Path, kind: type[ProcessSettings]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError([f"{path}: {error}"], hint="--config names a TOML file") from None
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    unknown = sorted(tables.keys() - {"router", "prefill", "decode"})
    if unknown:
        raise ConfigError(
            [f"{path}: unknown table [{name}]" for name in unknown], hint="tables: router, prefill, decode"
        )
    shared = {name: value for name, value in content.items() if name not in tables and name in kind.model_fields}
    strays = sorted(content.keys() - tables.keys() - _all_fields())
    if strays:
        raise ConfigError([f"{path}: unknown key {name!r}" for name in strays])
    return shared | tables.get(kind.table, {})


def _all_fields() -> set[str]:
    kinds: tuple[type[ProcessSettings], ...] = (RouterSettings, PrefillSettings, DecodeSettings)
    return {name for kind in kinds for name in kind.model_fields}


def _fault(detail: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        message = "unknown setting"
    given = detail.get("input")
    shown = f" (given: {given!r})" if where and "secret" not in where and isinstance(given, str | int | float) else ""
    return f"{where}: {message}{shown}" if where else message
