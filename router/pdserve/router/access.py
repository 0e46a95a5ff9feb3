"""Who may do what at the router's fronts: one table for both, and the one check of keys. What is in no table is for operators."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto

from pdserve.core.api_keys import ANYONE, ON_LOOPBACK, Caller, bearer_key
from pdserve.core.errors import Forbidden, PdserveError, Unauthenticated
from pdserve.router.key_ring import KeyRing


class Access(Enum):
    """What a method or path asks of its caller."""

    OPEN = auto()
    """Nothing. It names no prompt, no label and no address."""
    USE = auto()
    """A key, where keys are configured."""
    OPERATE = auto()
    """An operator's key, unless nobody but this host can reach the port and no keys are configured."""


GRPC_ACCESS: Mapping[str, Access] = {
    "/pdserve.v1.InferenceService/Generate": Access.USE,
    "/pdserve.v1.InferenceService/Tokenize": Access.USE,
    "/pdserve.v1.InferenceService/Detokenize": Access.USE,
    "/pdserve.v1.InferenceService/ListModels": Access.USE,
    "/pdserve.v1.InferenceService/GetClusterState": Access.OPERATE,
    "/grpc.health.v1.Health/Check": Access.OPEN,
    "/grpc.health.v1.Health/Watch": Access.OPEN,
    # grpcio's servicer does not serve it, and writes a traceback into the log for whoever asks.
    "/grpc.health.v1.Health/List": Access.OPERATE,
    # It tells only what the contract in the repository tells; but it is a stream that strangers could hold open.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.USE,
}
"""By gRPC's full name of the method."""

HTTP_ACCESS: Mapping[str, Access] = {
    "/v1/completions": Access.USE,
    "/v1/chat/completions": Access.USE,
    "/v1/models": Access.USE,
    "/v1/models/{name:path}": Access.USE,
    "/tokenize": Access.USE,
    "/detokenize": Access.USE,
    "/health": Access.OPEN,
    "/version": Access.OPEN,
    "/metrics": Access.OPERATE,
    "/load": Access.OPERATE,
    "/debug/state": Access.OPERATE,
}
"""By the path as its route spells it."""

SEND_IT = "send it as `authorization: Bearer KEY`; pdserve's commands take --api-key, its Python client api_key"
HAVE_ONE = (
    "set --api-keys-file at the router, or look at its --admin-port; `pdserve status` can use PDSERVE_CLUSTER_SECRET"
)


class AccessCheck:
    """Tells callers by their keys, and refuses what they may not do. Counts whom it refused."""

    def __init__(self, keys: KeyRing, *, is_reachable: bool) -> None:
        """`is_reachable`: whether others than this host's own processes may reach the fronts."""
        self._keys, self._is_reachable = keys, is_reachable
        self._num_denied = 0

    def caller(self, authorizations: Sequence[str | bytes], access: Access) -> Caller:
        """Return who calls. `authorizations` are the values of its headers of that name.

        Raises Unauthenticated without a good key where one is asked for, and Forbidden for one that does not allow it. What is
        open to all is open with a wrong key too, which makes nobody an operator.
        """
        try:
            return self._checked(authorizations, access)
        except PdserveError:
            self._num_denied += 1
            raise

    def gauges(self) -> dict[str, float]:
        """Return how many calls were refused."""
        return {"denied_calls_total": float(self._num_denied)}

    def _checked(self, authorizations: Sequence[str | bytes], access: Access) -> Caller:
        key = bearer_key(authorizations)
        known = None if key is None else self._keys.find(key)
        if known is not None:
            if access is Access.OPERATE and not known.is_operator:
                raise Forbidden("this is for operators", hint="send a key whose scope is operate")
            return known
        if self._keys.is_empty and not self._is_reachable:
            return ON_LOOPBACK
        if access is Access.OPEN or (access is Access.USE and self._keys.is_empty):
            return ANYONE
        raise Unauthenticated("the API key is missing or wrong", hint=HAVE_ONE if self._keys.is_empty else SEND_IT)
