"""The paths of the HTTP front, as a Starlette application."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pdserve.core.build import product_version
from pdserve.core.errors import PdserveError
from pdserve.router.access import AccessCheck
from pdserve.router.answering import Answering
from pdserve.router.http.answer import AnswerResponse, Head, error_response, fault_of
from pdserve.router.http.body import BodyRoom, parsed_object, read_body
from pdserve.router.http.chat_request import CHAT_PARAMS, parse_chat
from pdserve.router.http.chat_shape import ChatShape
from pdserve.router.http.completion_request import parse_completion
from pdserve.router.http.completion_shape import CompletionShape
from pdserve.router.http.errors import HttpFault, JsonObject
from pdserve.router.http.fields import PARAMS, Asked
from pdserve.router.http.guard import CALLER, LABEL, Guard
from pdserve.router.http.shape import Shape, TokenFormat
from pdserve.router.http.text_requests import TEXT_PARAMS, parse_detokenize, parse_tokenize, tokenized_json
from pdserve.router.http.token_texts import TokenTexts
from pdserve.router.text_calls import TextCalls
from pdserve.router.views import load_json, state_json
from pdserve.rpc.admin_port import health_response
from pdserve.rpc.gauge_metrics import METRICS_TYPE

MAX_INLINE_BYTES = 64 * 1024
"""Bodies up to this size are parsed on the event loop (some milliseconds at worst); larger ones on a thread."""
EXPOSED_HEADERS = ("x-request-id", "server-timing", "retry-after", "retry-after-ms")
"""Headers that pages of another origin may read."""

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Parser = Callable[[JsonObject, str], Asked]
MakeShape = Callable[[TokenFormat], Shape]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What the front is told."""

    max_body_bytes: int
    origins: tuple[str, ...] = ()


class HttpFront:
    """Serves every path; `app` is the ASGI application."""

    def __init__(self, answering: Answering, texts: TextCalls, access: AccessCheck, settings: HttpSettings) -> None:
        self._answering, self._texts, self._bodies = answering, texts, BodyRoom(settings.max_body_bytes)
        self._token_texts = TokenTexts(answering.model.vocabulary)
        self._started_s = int(time.time())
        routes = [
            Route("/v1/completions", self._endpoint(self.completions, PARAMS), methods=["POST"]),
            Route("/v1/chat/completions", self._endpoint(self.chat, {**PARAMS, **CHAT_PARAMS}), methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._endpoint(self.model, {}), methods=["GET"]),
            Route("/tokenize", self._endpoint(self.tokenize, TEXT_PARAMS), methods=["POST"]),
            Route("/detokenize", self._endpoint(self.detokenize, TEXT_PARAMS), methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/load", self.load, methods=["GET"]),
            Route("/debug/state", self.state, methods=["GET"]),
        ]
        guard = Middleware(Guard, access=access, routes=routes, count=answering.meters.http)
        self.app: ASGIApp = Starlette(
            routes=routes,
            middleware=[*_cross_origin(settings.origins), guard],
            exception_handlers={HTTPException: _no_such_path},
        )

    async def completions(self, request: Request) -> ASGIApp:
        """Continue prompts."""
        return await self._generate(request, parse_completion, CompletionShape)

    async def chat(self, request: Request) -> ASGIApp:
        """Continue a conversation."""
        return await self._generate(request, parse_chat, ChatShape)

    async def models(self, request: Request) -> Response:  # noqa: ARG002 - Starlette's signature
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._model_json()]})

    async def model(self, request: Request) -> Response:
        """Show one model."""
        self._answering.check_model(request.path_params["name"])
        return JSONResponse(self._model_json())

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or of a conversation."""
        call, with_names = await self._parsed(request, parse_tokenize)
        return JSONResponse(tokenized_json(await self._texts.tokenize(call), with_names=with_names))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        call = await self._parsed(request, parse_detokenize)
        return JSONResponse({"prompt": await self._texts.detokenize(call)})

    async def health(self, request: Request) -> Response:
        """Tell readiness: 200 if requests can be served, else 503 and why."""
        return health_response(self._answering.why_not_ready(request.scope[CALLER]))

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        """Tell the version."""
        return JSONResponse({"version": product_version()})

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """Return everything for Prometheus."""
        return Response(self._answering.meters.render(), headers={"content-type": METRICS_TYPE})

    async def load(self, request: Request) -> Response:  # noqa: ARG002
        """Tell how busy the pools are."""
        return JSONResponse(load_json(self._answering))

    async def state(self, request: Request) -> Response:  # noqa: ARG002
        """Show nodes, gauges and open sessions."""
        return JSONResponse(state_json(self._answering))

    async def _generate(self, request: Request, parser: Parser, make: MakeShape) -> ASGIApp:
        body = await read_body(request, self._bodies)
        received_s = self._answering.clock.now_s()
        label, caller = request.scope[LABEL], request.scope[CALLER]
        try:
            asked = await self._from_json(body, lambda fields: parser(fields, label))
        except PdserveError as error:
            self._answering.refused(label, error, caller.owner)
            raise
        shape = make(TokenFormat(self._token_texts, asked.wishes))
        head = Head(shape.id_prefix + asked.label, int(time.time()), self._answering.model.name)
        return AnswerResponse(self._answering, asked, caller, shape, head, received_s)

    async def _parsed(self, request: Request, parser: Callable[[JsonObject], T]) -> T:
        return await self._from_json(await read_body(request, self._bodies), parser)

    async def _from_json(self, body: bytes, parser: Callable[[JsonObject], T]) -> T:
        if len(body) <= MAX_INLINE_BYTES:
            return parser(parsed_object(body))
        return await self._answering.on_thread(lambda: parser(parsed_object(body)))

    def _endpoint(self, serve: Endpoint, names: Mapping[str, str]) -> Endpoint:
        """Return the endpoint with its errors answered."""

        @wraps(serve)
        async def answered(request: Request) -> ASGIApp:
            try:
                return await serve(request)
            except (PdserveError, HttpFault) as error:
                return error_response(error, names)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001 - told as an internal error, and logged by `fault_of`
                return error_response(fault_of(error), names)

        return answered

    def _model_json(self) -> JsonObject:
        model = self._answering.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "pdserve",
            "max_model_len": self._answering.max_model_len,
        }


def _cross_origin(origins: tuple[str, ...]) -> list[Middleware]:
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=list(EXPOSED_HEADERS),
        )
    ]


async def _no_such_path(request: Request, error: Exception) -> Response:
    """Answer what no route takes, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        fault = HttpFault(405, "method_not_allowed", f"{request.method} is not served at {request.url.path}")
        fault.headers = dict(error.headers or {})
    else:
        fault = HttpFault(error.status_code, "not_found", f"there is nothing at {request.url.path}")
    return error_response(fault, {})
