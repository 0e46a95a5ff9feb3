"""Settings of each process: where they come from, their bounds, and every fault at once.

Order, first wins: command line, environment (`PDSERVE_…`), TOML file (`--config`, or PDSERVE_CONFIG), default. In the file,
keys at the top level are for every role and a table `[router]`, `[prefill]` or `[decode]` is for one role.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, PrivateAttr, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pdserve.core.certificates import TlsFiles, tls_faults
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import ConfigError
from pdserve.core.handed_secret import read_handed_secret
from pdserve.core.hold import parse_hold
from pdserve.core.link_faults import parse_link_faults
from pdserve.core.link_shape import parse_link_shape
from pdserve.core.models import DEFAULT_MODEL
from pdserve.core.secret_file import SHORTEST_SECRET, SecretWatch, read_secret_file
from pdserve.core.setting_faults import HINT, Places, faults_in, unknown_variables
from pdserve.core.settings_file import read_settings_file

WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::", "[::]", "*"})  # noqa: S104 - compared with, never bound
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
HTTP_OFF = "off"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")

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
    tls_cert: Path | None = Field(
        None, description="PEM file of this process's certificate chain; its ports speak TLS then."
    )
    tls_key: Path | None = Field(None, description="PEM file of the key of tls_cert, without a passphrase.")
    tls_ca: Path | None = Field(
        None,
        description="PEM file of the authorities of the cluster's certificates: a router dials nodes by TLS, "
        "a node takes only callers that they signed.",
    )
    cluster_secret_file: Path | None = Field(
        None,
        description="File of the secret, or of two while it is changed: the first proves. Read anew while running.",
    )
    cluster_secret_fd: int | None = Field(
        None, ge=0, description="File descriptor of the secret that a supervisor made; used where no other is set."
    )
    hold_at: str | None = Field(None, description="Test hook STAGE[:N]; refused unless PDSERVE_TEST=1.")
    ready_fd: int | None = Field(None, ge=0, description="File descriptor that gets one JSON line of bound addresses.")
    _secret: ClusterSecret | None = PrivateAttr(None)
    _warnings: tuple[str, ...] = PrivateAttr(())

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
        faults += self._take_in_secret()
        faults += tls_faults(self.tls_cert, self.tls_key, (self.tls_listening, self.tls_dialling))
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def _take_in_secret(self) -> list[str]:
        """Find the secret where it was set, and return what is wrong with it."""
        if self.cluster_secret is not None and self.cluster_secret_file is not None:
            return ["cluster_secret_file: the secret is given twice; leave out this or cluster_secret"]
        if self.cluster_secret_file is not None:
            try:
                content = read_secret_file(self.cluster_secret_file, self._fewest_chars)
            except ConfigError as error:
                return [f"cluster_secret_file: {fault}" for fault in error.faults]
            self._secret, self._warnings = ClusterSecret(*content.values), tuple(filter(None, [content.warning]))
        elif self.cluster_secret is not None:
            if len(self.cluster_secret) < self._fewest_chars:
                return [f"cluster_secret: must have at least {SHORTEST_SECRET} characters off loopback"]
            # The environment's bytes, even where they are not UTF-8.
            self._secret = ClusterSecret(self.cluster_secret.get_secret_value().encode(errors="surrogateescape"))
        elif self.cluster_secret_fd is not None:
            try:
                self._secret = read_handed_secret(self.cluster_secret_fd)
            except ConfigError as error:
                return [f"cluster_secret_fd: {fault}" for fault in error.faults]
        elif self.needs_secret:
            words = "required off loopback; set PDSERVE_CLUSTER_SECRET or PDSERVE_CLUSTER_SECRET_FILE on every process"
            return [f"cluster_secret: {words}"]
        return []

    @property
    def _fewest_chars(self) -> int:
        return SHORTEST_SECRET if self.needs_secret else 1

    @property
    def tls_listening(self) -> TlsFiles | None:
        """Files of the TLS that this process's ports speak; None: they speak plainly."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca) if self.tls_cert or self.tls_ca else None

    @property
    def tls_dialling(self) -> TlsFiles | None:
        """Files of the TLS that this process speaks to nodes; None: it dials none, or plainly."""
        return None

    @property
    def needs_secret(self) -> bool:
        """Whether strangers could reach this process."""
        return self.host not in LOOPBACK_HOSTS

    @property
    def advertised_host(self) -> str:
        """Host that others reach this process by."""
        return self.advertise or self.host

    @property
    def secret(self) -> ClusterSecret | None:
        """The cluster secret: one object for the whole process."""
        return self._secret

    @property
    def has_own_secret(self) -> bool:
        """Whether a secret was set, rather than handed on by a supervisor."""
        return self.cluster_secret is not None or self.cluster_secret_file is not None

    def take_secret(self, secret: ClusterSecret) -> None:
        """Take a secret that was found elsewhere; only before anything has read it, and where none was set."""
        assert self._secret is None, "there is a secret"
        self._secret = secret

    def secret_watch(self) -> SecretWatch | None:
        """Return what reads the secret's file anew; None where it comes from elsewhere."""
        if self.cluster_secret_file is None or self._secret is None:
            return None
        return SecretWatch(self.cluster_secret_file, self._secret, self._fewest_chars)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed, and should be told."""
        return self._warnings


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
    max_unread_bytes: Positive = Field(
        1 << 20, description="Memory for text and tokens of a stream whose client does not read; more ends its request."
    )
    max_unread_s: Seconds = Field(
        60.0, description="Time for which a client may leave unread what it is sent before its request ends."
    )
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
        (), description="Key that HTTP clients must send, or several with commas between; unset: none is asked for."
    )
    cors_origin: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Origins whose pages may call the HTTP port, comma-separated; * allows all."
    )
    tls_client_ca: Path | None = Field(
        None, description="PEM file of authorities: clients must show a certificate that they signed, on both ports."
    )

    @property
    def tls_listening(self) -> TlsFiles | None:
        """Files of the TLS that both ports speak; None: they speak plainly."""
        files = TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca, ca_name="tls_client_ca")
        return files if files.by_setting else None

    @property
    def tls_dialling(self) -> TlsFiles | None:
        """Files of the TLS that nodes are dialled by; None: plainly."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca, is_client=True) if self.tls_ca else None

    @field_validator("prefill", "decode", "api_key", "cors_origin", mode="before")
    @classmethod
    def _split_list(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("http_port", mode="before")
    @classmethod
    def _http_can_be_off(cls, value: object) -> object:
        return None if value == HTTP_OFF else value

    @field_validator("api_key")
    @classmethod
    def _keys_can_be_sent(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            text = key.get_secret_value()
            if not text.isascii() or not text.isprintable() or " " in text:
                raise ValueError("must be printable ASCII without spaces: it travels in a header")
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
    kv_receive_bytes: Positive = Field(
        256 << 20, description="KV bytes that may be under way from all peers together, beyond two frames of each."
    )
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
        if self.kv_encryption != "none" and self.secret is None:
            raise ValueError("kv_encryption: needs cluster_secret, or its file, which its keys are made from")
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
