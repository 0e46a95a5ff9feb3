"""Errors of the HTTP front: each has a status, OpenAI's form, and the client's own name of the field."""

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.router.http.errors import STATUSES, answer_of, param_of
from pdserve.router.http.fields import PARAMS
from pdserve.v1 import inference_pb2 as pb


def test_params_name_fields_of_the_contract() -> None:
    """A renamed field must not leave a name behind that nobody maps."""
    for path in PARAMS:
        fields = pb.GenerateRequest.DESCRIPTOR.fields_by_name
        for part in path.split("."):
            kind = fields[part].message_type
            fields = {} if kind is None else kind.fields_by_name


def test_the_longest_known_beginning_names_the_field() -> None:
    names = {"chat": "messages", "chat.tools": "tools", "stop.stop": "stop"}
    assert param_of("chat.messages[2].role", {"chat.messages": "messages"}) == "messages[2].role"
    assert param_of("chat.tools[0]", names) == "tools[0]"
    assert param_of("stop.stop_token_ids", names) == "stop.stop_token_ids"
    assert param_of("other", names) == "other"


def every_error(kind: type[PdserveError] = PdserveError) -> list[type[PdserveError]]:
    return [each for child in kind.__subclasses__() for each in (child, *every_error(child))]


def test_every_error_class_has_a_status() -> None:
    ours = {kind for kind in every_error() if kind.__module__ == "pdserve.core.errors"}
    assert ours == set(STATUSES)


def test_errors_have_openais_form() -> None:
    error = InvalidRequest("bad", hint="do this", field="sampling.top_p")
    answer = answer_of(error, PARAMS)
    assert answer.status == 400
    assert answer.body == {
        "error": {
            "message": "bad (do this)",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "invalid_value",
        }
    }
    busy = answer_of(next(kind for kind in STATUSES if kind.can_retry)("full", retry_after_s=0.25), {})
    assert busy.headers == {"retry-after-ms": "250", "retry-after": "1"}
