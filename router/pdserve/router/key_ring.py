"""The API keys that are good now: those of the settings, those of the file as it was last read, and the cluster secret's."""

import asyncio
import hashlib
import logging

from pdserve.core.api_keys import CLUSTER_CALLER, ApiKeys, Caller, operator_key, read_keys_file
from pdserve.core.errors import ConfigError
from pdserve.core.router_settings import RouterSettings

POLL_S = 1.0
"""Interval at which the file of keys is read again."""

logger = logging.getLogger(__name__)


class KeyRing:
    """Looks keys up. The file is judged by its bytes: sizes and times may stay as they were while keys change."""

    def __init__(self, settings: RouterSettings) -> None:
        """Read the file. Raises ConfigError if it is wrong."""
        self._settings = settings
        self._given = settings.given_keys
        self._filed = ApiKeys()
        self._seen = b""
        self._of_cluster: tuple[tuple[bytes, ...], ApiKeys] = ((), ApiKeys())
        path = settings.api_keys_file
        if path is not None:
            try:
                raw = read_keys_file(path)
                self._filed, self._seen = settings.keys_in(raw), _identity(raw)
            except ConfigError as error:
                raise ConfigError([f"api_keys_file: {path}: {fault}" for fault in error.faults]) from None

    @property
    def is_empty(self) -> bool:
        """Whether no key was configured, so that none is asked for. The cluster secret's does not count."""
        return self._settings.api_keys_file is None and not len(self._given)

    def find(self, key: str) -> Caller | None:
        """Return whose key this is, or None if it is good no more, or never was."""
        return self._given.find(key) or self._filed.find(key) or self._cluster_keys().find(key)

    async def watch(self) -> None:
        """Read the file again and again until cancelled. Returns at once where there is none.

        A content counts once two looks in a row find it: of a file that is just being written the beginning would do as well.
        """
        path, before = self._settings.api_keys_file, b""
        while path is not None:
            await asyncio.sleep(POLL_S)
            try:
                raw = await asyncio.to_thread(read_keys_file, path)
            except ConfigError as error:
                self._keep(error.faults, _identity(str(error).encode()))
            else:
                is_settled, before = _identity(raw) == before, _identity(raw)
                if is_settled:
                    self.renew(raw)

    def renew(self, raw: bytes) -> None:
        """Take what the file says now. Bytes that are wrong change nothing, and are told once."""
        identity = _identity(raw)
        if identity == self._seen:
            return
        try:
            keys = self._settings.keys_in(raw)
        except ConfigError as error:
            self._keep(error.faults, identity)
            return
        self._filed, self._seen = keys, identity
        logger.info("the file of API keys changed: %d keys of %d owners are good", len(keys), len(keys.owners))

    def _keep(self, faults: list[str], identity: bytes) -> None:
        if identity == self._seen:
            return
        self._seen = identity
        told = "; ".join(faults)
        logger.error("%s is wrong, and the keys stay as they were: %s", self._settings.api_keys_file, told)

    def _cluster_keys(self) -> ApiKeys:
        """Return the operator's keys that the accepted values of the cluster secret stand for; they may change at any time."""
        secret = self._settings.secret
        values = () if secret is None else secret.accepted
        if values != self._of_cluster[0]:
            self._of_cluster = values, ApiKeys.of([operator_key(value) for value in values], CLUSTER_CALLER)
        return self._of_cluster[1]


def _identity(raw: bytes) -> bytes:
    """Return what bytes are told apart by, without keeping them."""
    return hashlib.sha256(raw).digest()
