"""Every error as OpenAI's clients expect it: a status, and {"error": {"message", "type", "param", "code"}}."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.core import errors
from pdserve.core.errors import PdserveError

JsonObject = dict[str, object]

STATUSES: Mapping[type[PdserveError], tuple[int, str, str]] = {
    errors.InvalidRequest: (400, "invalid_request_error", "invalid_value"),
    errors.NotServed: (400, "invalid_request_error", "unsupported_parameter"),
    errors.GrammarNotServed: (400, "invalid_request_error", "grammar_not_served"),
    errors.GrammarTooSlow: (400, "invalid_request_error", "grammar_too_slow"),
    errors.UnknownModel: (404, "invalid_request_error", "model_not_found"),
    errors.Overloaded: (429, "rate_limit_error", "overloaded"),
    errors.SlowReader: (408, "timeout_error", "slow_reader"),
    errors.NoNodes: (503, "service_unavailable_error", "no_nodes"),
    errors.Unreachable: (503, "service_unavailable_error", "unreachable"),
    errors.AttemptsExhausted: (503, "service_unavailable_error", "attempts_exhausted"),
    errors.DeadlineExceeded: (504, "timeout_error", "deadline_exceeded"),
    errors.Cancelled: (499, "cancelled_error", "cancelled"),
    errors.Unauthenticated: (401, "authentication_error", "invalid_api_key"),
    errors.Forbidden: (403, "permission_error", "forbidden"),
    errors.Draining: (503, "service_unavailable_error", "draining"),
    errors.InternalError: (500, "server_error", "internal_error"),
    errors.SetupError: (500, "server_error", "setup_error"),
    errors.ConfigError: (500, "server_error", "config_error"),
    errors.ModelUnavailable: (500, "server_error", "model_unavailable"),
    errors.ModelUnsupported: (500, "server_error", "model_unsupported"),
    errors.AddressInUse: (500, "server_error", "address_in_use"),
}
"""Status, `type` and `code` of each error class; a test holds it complete."""


class HttpFault(Exception):
    """What is wrong with a request as HTTP, before it is a request to a model."""

    def __init__(self, status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What to send for an error."""

    status: int
    body: JsonObject
    headers: Mapping[str, str]


def answer_of(error: PdserveError | HttpFault, names: Mapping[str, str]) -> ErrorAnswer:
    """Return the answer; `names` maps the contract's field names to those that the client used."""
    if isinstance(error, HttpFault):
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        return ErrorAnswer(error.status, _body(error.message, kind, None, error.code), error.headers)
    status, kind, code = STATUSES[type(error)]
    headers = {}
    if error.retry_after_s is not None:
        # openai's client reads the first, others the second, which has whole seconds.
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1e3)))
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return ErrorAnswer(status, _body(str(error), kind, param_of(error.field, names) or None, code), headers)


def param_of(field: str, names: Mapping[str, str]) -> str:
    """Return the client's name of a field: that of its longest known beginning, with what follows it."""
    for end in range(len(field), 0, -1):
        if field[:end] in names and (end == len(field) or field[end] in ".["):
            return names[field[:end]] + field[end:]
    return field


def _body(message: str, kind: str, param: str | None, code: str) -> JsonObject:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
