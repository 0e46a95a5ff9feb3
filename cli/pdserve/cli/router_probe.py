"""Asks a starting router what it still waits for."""

from pdserve.client.async_client import AsyncClient
from pdserve.client.tls import Tls
from pdserve.client.unreachable import essence_of
from pdserve.core.errors import PdserveError


class RouterProbe:
    """A question that may be asked again and again; close it at the end. `tls` is what the router's port needs, if anything."""

    def __init__(self, tls: Tls | None = None, api_key: str | None = None) -> None:
        self._tls, self._api_key = tls, api_key
        self._client: AsyncClient | None = None

    async def __call__(self, address: str) -> str:
        """Return "" when the router at `address` serves, else what it waits for."""
        if self._client is None or self._client.address != address:
            await self.close()
            self._client = AsyncClient(address, tls=self._tls, api_key=self._api_key)
        if await self._client.is_ready():
            return ""
        try:
            state = await self._client.cluster_state()
        except PdserveError as error:
            return str(error)
        late = [node for node in state.nodes if node.state != "ready"]
        told = [
            f"{node.address} {node.state}" + (f" ({essence_of(node.reason)})" if node.reason else "") for node in late
        ]
        return "; ".join(told) or "the router is not ready yet"

    async def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            await self._client.close()
            self._client = None
