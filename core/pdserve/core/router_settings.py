"""What a router is told."""

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    NoDecode,
)

from pdserve.core.api_keys import OPTION_CALLER, SHORTEST_KEY, ApiKeys, key_fault, parse_keys, read_keys_file
from pdserve.core.certificates import TlsFiles
from pdserve.core.errors import ConfigError
from pdserve.core.process_settings import WILDCARD_HOSTS, Positive, ProcessSettings, Seconds

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


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
        (), description="Key that clients must send, or several with commas between; they allow everything."
    )
    api_keys_file: Path | None = Field(
        None,
        description="File of keys, each line OWNER use|operate KEY; read again when it changes. No key: none is asked for.",
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
