"""Settings of each process: where they come from, their bounds, and every fault at once.

Order, first wins: command line, environment (`PDSERVE_…`), TOML file (`--config`, or PDSERVE_CONFIG), default. In the file,
keys at the top level are for every role and a table `[router]`, `[prefill]` or `[decode]` is for one role.
"""

import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pdserve.core.api_keys import OPTION_CALLER, SHORTEST_KEY, ApiKeys, key_fault, parse_keys, read_keys_file
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import ConfigError
from pdserve.core.hold import parse_hold
from pdserve.core.link_faults import parse_link_faults
from pdserve.core.link_shape import parse_link_shape
from pdserve.core.models import DEFAULT_MODEL
from pdserve.core.setting_faults import HINT, Places, faults_in, unknown_variables
from pdserve.core.settings_file import read_settings_file

WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::", "[::]", "*"})  # noqa: S104 - compared with, never bound
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
PORT_OFF = "off"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
SHORTEST_SECRET = 16
"""Characters of a secret that strangers could try to guess."""

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
    log_format: Literal["text", "json"] = Field("text", description="text or json.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug, info, warning or error."
    )
    lease_s: Seconds = Field(3.0, description="Silence after which the other side of a stream counts as gone.")
    beat_s: Seconds = Field(0.5, description="Interval of signs of life.")
    drain_s: Seconds = Field(30.0, description="Time that accepted work gets at shutdown.")
    cluster_secret: SecretStr | None = Field(
        None, description="Shared secret of the cluster; required off loopback, at least 16 characters there."
    )
    hold_at: str | None = Field(None, description="Test hook STAGE[:N]; refused unless PDSERVE_TEST=1.")
    ready_fd: int | None = Field(None, ge=0, description="File descriptor that gets one JSON line of bound addresses.")
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65_535,
        description="HTTP port of metrics, load and debug views; it asks for no key. 0: a free one; off by default.",
    )
    admin_host: str = Field("127.0.0.1", description="Address of the admin port; whoever reaches it sees everything.")

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

    @field_validator("admin_port", "http_port", mode="before", check_fields=False)
    @classmethod
    def _ports_can_be_off(cls, value: object) -> object:
        return None if value == PORT_OFF else value

    @field_validator("host", "admin_host")
    @classmethod
    def _host_is_set(cls, host: str) -> str:
        if not host:
            raise ValueError("must not be empty")
        return host

    @field_validator("cluster_secret")
    @classmethod
    def _secret_is_set(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and not secret.get_secret_value():
            raise ValueError("must not be empty; leave it unset on loopback")
        return secret

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
        if self.needs_secret and self.cluster_secret is not None and len(self.cluster_secret) < SHORTEST_SECRET:
            faults.append(f"cluster_secret: must have at least {SHORTEST_SECRET} characters off loopback")
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

    @cached_property
    def secret(self) -> ClusterSecret | None:
        """The cluster secret: one object for the whole process."""
        if self.cluster_secret is None:
            return None
        # The environment's bytes, even where they are not UTF-8.
        return ClusterSecret(self.cluster_secret.get_secret_value().encode(errors="surrogateescape"))


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
    max_sessions: Positive = Field(
        1024, description="Open answers (n of each request), waiting ones included; more are refused."
    )
    max_queue: Positive = Field(256, description="Requests that may wait for a node; more are refused.")
    queue_wait_s: Seconds = Field(60.0, description="Longest wait for a node before a request is refused.")
    max_attempts: Positive = Field(4, description="Failed attempts after which a request ends with an error.")
    resume_wait_s: Seconds = Field(30.0, description="Longest wait for a node that can take over a request.")
    max_unread_bytes: Positive = Field(1 << 20, description="Text and tokens kept for a client that does not read.")
    max_message_bytes: Positive = Field(4 << 20, description="Largest request.")
    chat_template: Path | None = Field(None, description="Jinja file of a chat template to use instead of the model's.")
    tool_format: Literal["auto", "none", "hermes", "llama3", "mistral"] = Field(
        "auto", description="How the model writes tool calls: auto (by its template), none, hermes, llama3 or mistral."
    )
    reasoning_format: Literal["auto", "none", "think"] = Field(
        "auto", description="How the model marks its reasoning: auto (by its template), none or think (<think>)."
    )
    http_port: int | None = Field(
        8000, ge=0, le=65_535, description="HTTP port; 0 takes a free one, off serves no HTTP."
    )
    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="Key that clients must send, or several with commas between; they allow everything."
    )
    api_keys_file: Path | None = Field(
        None,
        description="File of keys, each line OWNER use|operate KEY; read again when it changes. No key: none is asked for.",
    )
    cors_origin: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Origins whose pages may call the HTTP port, comma-separated; * allows all."
    )

    @field_validator("prefill", "decode", "api_key", "cors_origin", mode="before")
    @classmethod
    def _split_list(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("api_key")
    @classmethod
    def _keys_can_be_sent(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            fault = key_fault(key.get_secret_value())
            if fault:
                raise ValueError(fault)
        return keys

    @field_validator("cors_origin")
    @classmethod
    def _origins_are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin; give SCHEME://HOST[:PORT] without a path, or *")
        return origins

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
    def _keys_file_is_good(self) -> Self:
        try:
            if self.api_keys_file is not None:
                self.keys_in(read_keys_file(self.api_keys_file))
        except ConfigError as error:
            raise ValueError("\n".join(f"api_keys_file: {fault}" for fault in error.faults)) from None
        return self

    @cached_property
    def given_keys(self) -> ApiKeys:
        """The keys that the setting `api_key` holds."""
        return ApiKeys.of([key.get_secret_value() for key in self.api_key], OPTION_CALLER)

    def keys_in(self, raw: bytes) -> ApiKeys:
        """Return the keys of `api_keys_file`, whose bytes these are. Raises ConfigError with the faults by line."""
        return parse_keys(raw, shortest=SHORTEST_KEY if self.needs_secret else 1, taken=self.given_keys)

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
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto (float32 on CPU), float32, bfloat16 or float16."
    )
    device: str = Field("auto", description="auto, cpu or cuda[:N].")
    attention_backend: Literal["auto", "torch-sdpa", "triton"] = Field(
        "auto", description="auto (triton on CUDA where it is installed), torch-sdpa or triton (CUDA only)."
    )
    max_waiting: Positive = Field(256, description="Submits that may wait; more are answered BUSY.")
    kv_window_bytes: Positive = Field(64 << 20, description="KV bytes that may be under way from one peer.")
    kv_staging_bytes: Positive = Field(16 << 20, description="KV bytes that may be packed and not yet sent.")
    kv_engine: Literal["zeromq", "nixl"] = Field(
        "zeromq",
        description="zeromq or nixl: what carries KV. nixl is for RDMA fabrics, needs pdserve[nixl]; the same on every node.",
    )
    kv_encryption: Literal["none", "curve"] = Field(
        "none",
        description="none or curve: KV encrypted with keys made from the cluster secret; the same on every node.",
    )
    kv_shared_memory: Literal["auto", "off"] = Field(
        "auto", description="auto or off: KV to and from nodes of this host and user goes through shared memory."
    )
    kv_wire: Literal["plain", "int8", "fp8"] = Field(
        "plain",
        description="plain, int8 or fp8: a prefill node sends KV in 8 bits, a decode node takes them. Not exact.",
    )
    kv_link: str | None = Field(
        None, description="For experiments: what this node sends of KV goes as over BANDWIDTH,LATENCY[,JITTER]."
    )
    kv_faults: str | None = Field(
        None, description="For experiments, never for service: faults of the KV link, e.g. drop=0.01,corrupt@12,seed=7."
    )
    grant_wait_s: Seconds = Field(30.0, description="Longest wait for blocks on the decode node.")
    transfer_idle_s: Seconds = Field(10.0, description="Silence after which a running transfer is given up.")
    step_limit_s: Seconds = Field(60.0, description="Age of a running step at which the engine counts as stuck.")

    @model_validator(mode="after")
    def _encryption_has_a_secret(self) -> Self:
        if self.kv_encryption != "none" and self.cluster_secret is None:
            raise ValueError("kv_encryption: needs cluster_secret, which its keys are made from")
        if self.kv_encryption != "none" and self.kv_engine == "nixl":
            raise ValueError(
                "kv_encryption: what NIXL carries is not encrypted; set kv_engine to zeromq, or this to none"
            )
        return self

    @field_validator("kv_link", "kv_faults")
    @classmethod
    def _experiments_are_known(cls, text: str | None, info: ValidationInfo) -> str | None:
        try:
            (parse_link_shape if info.field_name == "kv_link" else parse_link_faults)(text)
        except ConfigError as error:
            raise ValueError("\n".join(fault.removeprefix(f"{info.field_name}: ") for fault in error.faults)) from None
        return text


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
    reserve: Literal["on_submit", "on_open"] = Field(
        "on_open", description="When blocks are promised: on_submit or on_open."
    )
    growth_blocks: int = Field(1, ge=0, description="Blocks kept free per running sequence when another is let in.")

    @field_validator("kv_advertise")
    @classmethod
    def _kv_is_reachable(cls, kv_advertise: str | None) -> str | None:
        if kv_advertise is not None and kv_advertise in WILDCARD_HOSTS:
            raise ValueError(f"{kv_advertise!r} is no address that others can reach")
        return kv_advertise


ROLE_SETTINGS: Mapping[str, type[ProcessSettings]] = {
    kind.table: kind for kind in (RouterSettings, PrefillSettings, DecodeSettings)
}


def load_settings(
    kind: type[T],
    given: Mapping[str, Any],
    config: Path | None = None,
    *,
    options: Mapping[str, str] | None = None,
) -> T:
    """Return the settings of one process.

    `given` holds what the command line set (values that are None count as not set), and `options` what to call an option that
    is not named like its setting. Raises ConfigError naming every fault of every source, in the whole file too.
    """
    stated = os.environ.get("PDSERVE_CONFIG")
    file = read_settings_file(config or (Path(stated) if stated else None), ROLE_SETTINGS)
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    named = {name: f"--{name.replace('_', '-')}" for name in values} | dict(options or {})
    values["__file__"] = dict(file.values.get(kind.table, {}))
    try:
        settings = kind(**values)
    except ValidationError as error:
        places = Places(named, file.places.get(kind.table, {}))
        faults = [*_faults(kind, values, error, places), *file.faults]
        raise ConfigError(list(dict.fromkeys(faults)), hint=HINT) from None
    if file.faults:
        raise ConfigError(list(file.faults), hint=HINT)
    return settings


def environment_warnings() -> dict[str, str]:
    """Return the PDSERVE_ variables that no process and no command knows, each with what to say of it."""
    return unknown_variables(name for kind in ROLE_SETTINGS.values() for name in kind.model_fields)


def _faults(
    kind: type[ProcessSettings], values: Mapping[str, Any], error: ValidationError, places: Places
) -> list[str]:
    """Return every fault: those of single fields, then those between fields, found with the faulty ones at their defaults."""
    details = error.errors()
    faults = list(faults_in(kind, details, places))
    wrong = {str(detail["loc"][0]) for detail in details if detail["loc"]} & kind.model_fields.keys()
    if wrong:
        defaults = {name: kind.model_fields[name].default for name in wrong}
        known = {name: value for name, value in values.items() if name in kind.model_fields or name == "__file__"}
        try:
            kind(**(known | defaults))
        except ValidationError as rest:
            faults += faults_in(kind, rest.errors(), places)
    return faults
