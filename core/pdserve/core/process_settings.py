"""What every process is told: its address, model, log, leases, secret and certificates."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pdserve.core.certificates import TlsFiles, tls_faults
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import ConfigError
from pdserve.core.handed_secret import read_handed_secret
from pdserve.core.hold import parse_hold
from pdserve.core.models import DEFAULT_MODEL
from pdserve.core.secret_file import SHORTEST_SECRET, SecretWatch, read_secret_file

WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::", "[::]", "*"})  # noqa: S104 - compared with, never bound
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
PORT_OFF = "off"

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


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
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65_535,
        description="HTTP port of metrics, load and debug views; it asks for no key. 0: a free one; off by default.",
    )
    admin_host: str = Field("127.0.0.1", description="Address of the admin port; whoever reaches it sees everything.")
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
