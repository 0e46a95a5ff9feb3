"""TLS of gRPC servers and channels, made in one place, and the files behind it, read again when they change."""

import logging
import threading
import time
from collections.abc import Callable
from typing import cast

import grpc

from pdserve.core.certificates import TlsFiles, TlsMaterial, contents, is_open_to_all, read_tls
from pdserve.core.errors import ConfigError
from pdserve.rpc.options import Options

logger = logging.getLogger(__name__)


class TlsSource:
    """One end's files. `current` is asked for each new connection, from any thread; what stands already is not touched.

    Files are compared by content, never by their times: a swapped link or a restored date hides nothing.
    """

    def __init__(self, files: TlsFiles, now_s: Callable[[], float] = time.time) -> None:
        """Read the files. Raises ConfigError with all that is wrong with them."""
        self.files, self._now_s = files, now_s
        self._lock = threading.Lock()
        self._seen = contents(files)
        self._material = read_tls(files, now_s())
        self._faults: list[str] = []
        self._warned: list[str] = []
        # A router's two sources hold one pair: the one that its ports use speaks of it.
        self._is_silent = files.is_client
        if is_open_to_all(files.key) and not self._is_silent:
            logger.warning("every user of this machine can read tls_key (%s): chmod 600 it", files.key)
        self._warn()

    @property
    def asks_for_certificates(self) -> bool:
        """Whether the other end must show a certificate to a server of these files."""
        return self.files.ca is not None

    def current(self) -> TlsMaterial:
        """Return what the files hold; while they are of no use, what they held before. Says each change, and each fault once."""
        with self._lock:
            content = contents(self.files)
            # What is of no use now may be so later without a change: a certificate that is not valid yet.
            if content != self._seen or self._faults:
                self._seen = content
                self._read_again()
            self._warn()
            return self._material

    def _read_again(self) -> None:
        faults: list[str] = []
        try:
            self._material = read_tls(self.files, self._now_s())
        except ConfigError as error:
            faults = error.faults
        if not faults:
            logger.info(
                "the TLS files changed: %s use them", "calls to nodes" if self._is_silent else "new connections"
            )
        elif faults != self._faults:
            logger.error("the TLS files changed and cannot be used, so the old ones stay: %s", "; ".join(faults))
        self._faults = faults

    def _warn(self) -> None:
        """Say that the certificate's end is near, once per end."""
        warnings = self._material.warnings(self._now_s())
        if warnings != self._warned and not self._is_silent:
            self._warned = warnings
            for warning in warnings:
                logger.warning("%s", warning)


def tls_source(files: TlsFiles | None) -> TlsSource | None:
    """Return the source of `files`, or nothing without any. Raises ConfigError."""
    return None if files is None else TlsSource(files)


def server_credentials(source: TlsSource) -> grpc.ServerCredentials:
    """Return credentials that look at the files for every handshake; with authorities a client must show a certificate."""
    given = source.current()

    def fetch() -> grpc.ServerCertificateConfiguration:
        """Called by gRPC, one handshake at a time, on a thread of its own; None leaves all as it is."""
        nonlocal given
        now = source.current()
        if now is given:
            return cast("grpc.ServerCertificateConfiguration", None)  # gRPC takes it, though the stubs do not know
        given = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given), fetch, require_client_authentication=source.asks_for_certificates
    )


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], material.authorities or None)


def open_channel(address: str, tls: TlsMaterial | None, options: Options) -> grpc.Channel:
    """Return a channel of plain stubs, with TLS if there is `tls`."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _channel_credentials(tls), options=options)


def open_async_channel(address: str, tls: TlsMaterial | None, options: Options) -> grpc.aio.Channel:
    """Return a channel of asyncio's stubs, with TLS if there is `tls`."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _channel_credentials(tls), options=options)


def _channel_credentials(tls: TlsMaterial) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.authorities or None, tls.key or None, tls.chain or None)
