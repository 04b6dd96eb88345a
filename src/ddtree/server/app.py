"""The routes."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

import ddtree
from ddtree.engine import Engine
from ddtree.engine.engine import Progress
from ddtree.errors import UserError
from ddtree.models.tokenizer import Tokenizer
from ddtree.server.answer_format import ChatFormat, CompletionFormat
from ddtree.server.answer_response import AnswerResponse
from ddtree.server.api_error import ApiError
from ddtree.server.body import read_body
from ddtree.server.facts import server_info
from ddtree.server.gate import OPEN_PATHS, Gate
from ddtree.server.openapi import (
    KEY_SCHEME,
    OF_ANSWERS,
    OF_BODIES,
    OF_EVERY_ROUTE,
    Alive,
    ChatCompletion,
    Models,
    Ready,
    Text,
    TextCompletion,
    Tokens,
    Told,
    errors,
    says,
    streams,
)
from ddtree.server.openapi import Model as ModelBody
from ddtree.server.plan import check_model, plan_chat, plan_completion
from ddtree.server.prompt_tokens import COUNTED_TOKENS, chat_tokens, text_tokens, tokens_text
from ddtree.server.request_error import on_fault, on_http_error, on_user_error
from ddtree.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ddtree.server.service import Service
from ddtree.server.settings import ServerSettings
from ddtree.server.status import status

OnEnd = Callable[[BaseException | None], None]


def create_app(
    settings: ServerSettings,
    load: Callable[[Progress], Engine],
    requested: dict[str, Any],
    on_end: OnEnd = lambda error: None,
) -> FastAPI:
    """The server as an ASGI application; the engine is loaded when it starts up.

    Args:
        load: makes the engine.
        requested: the engine's options as they were given, for ``/server_info``.
        on_end: called when the engine's thread ends.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = Service(settings, load, on_end)
        yield
        await app.state.service.close()

    app = FastAPI(
        title="ddtree",
        version=ddtree.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's Host
    )

    def service() -> Service:
        found: Service = app.state.service
        return found

    paths: set[str] = set()
    app.add_middleware(Gate, service=service, paths=lambda: paths)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(UserError, on_user_error)
    app.add_exception_handler(Exception, on_fault)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_facts(app, service, requested)
    _describe_bodies(app)
    paths |= {str(getattr(route, "path", "")) for route in app.routes}
    return app


def _add_generation(app: FastAPI, service: Callable[[], Service]) -> None:
    def dress() -> tuple[str, Tokenizer]:
        return service().settings.model_name, service().open_engine().tokenizer

    @app.get("/v1/models", responses=says(Models) | errors(*OF_EVERY_ROUTE))
    async def models() -> JSONResponse:
        """The one model there is."""
        return JSONResponse({"object": "list", "data": [_model(service())]})

    @app.get("/v1/models/{name:path}", responses=says(ModelBody) | errors(*OF_EVERY_ROUTE, 404))
    async def model(name: str) -> JSONResponse:
        """The model, where ``name`` is its name."""
        check_model(service(), name)
        return JSONResponse(_model(service()))

    answers = errors(*OF_EVERY_ROUTE, *OF_ANSWERS)

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatRequest), responses=streams(ChatCompletion) | answers)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, ChatRequest)
        plan = await plan_chat(service(), body)
        dressed = ChatFormat(*dress(), tells_logprobs=bool(body.logprobs), may_call=plan.may_call)
        return AnswerResponse(service(), plan, dressed)

    @app.post("/v1/completions", openapi_extra=_takes(CompletionRequest), responses=streams(TextCompletion) | answers)
    async def completions(request: Request) -> Response:
        """Continue bare text or tokens."""
        body = await read_body(request, CompletionRequest)
        plan = await plan_completion(service(), body)
        return AnswerResponse(service(), plan, CompletionFormat(*dress(), tells_logprobs=body.logprobs is not None))


def _add_tokens(app: FastAPI, service: Callable[[], Service]) -> None:
    told = errors(*OF_EVERY_ROUTE, *OF_BODIES)

    @app.post("/tokenize", openapi_extra=_takes(TokenizeRequest), responses=says(Tokens) | told)
    async def tokenize(request: Request) -> JSONResponse:
        """Tokens of bare text, or of messages in the chat template."""
        body = await read_body(request, TokenizeRequest)
        engine = service().open_engine()
        check_model(service(), body.model)
        counted = max(engine.state.max_model_len, COUNTED_TOKENS)
        if (body.text is None) == (body.messages is None):
            raise ApiError(400, "text: give either text or messages", param="text", code="invalid_value")
        if body.text is not None:
            for name in ("chat_template_kwargs", "tools"):
                if getattr(body, name):
                    raise ApiError(400, f"{name}: only with messages", param=name, code="invalid_value")
            tokens = await text_tokens(service(), body.text, counted, param="text")
        else:
            tokens = await chat_tokens(service(), body.messages or [], body.chat_template_kwargs, body.tools, counted)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": engine.state.max_model_len})

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeRequest), responses=says(Text) | told)
    async def detokenize(request: Request) -> JSONResponse:
        """Text of tokens, special tokens by their names."""
        body = await read_body(request, DetokenizeRequest)
        engine = service().open_engine()
        check_model(service(), body.model)
        size = engine.target.config.vocab_size
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
            raise ApiError(400, f"tokens: give ids from 0 to {size - 1}", param="tokens", code="invalid_value")
        return JSONResponse({"text": await tokens_text(service(), body.tokens)})


def _add_facts(app: FastAPI, service: Callable[[], Service], requested: dict[str, Any]) -> None:
    closed = errors(*OF_EVERY_ROUTE)

    @app.get("/health", responses={200: {"model": Alive}})
    async def health() -> JSONResponse:
        """The process is alive and its event loop runs."""
        return JSONResponse({"status": "alive"})

    @app.get("/ready", responses={200: {"model": Ready}, 503: {"model": Ready, "description": "Not yet, or no more."}})
    async def ready() -> JSONResponse:
        """200 once a token was generated end to end; 503 with the stage before, while stalled and while ending."""
        now = service().readiness
        body = {"ready": now.is_ready, "stage": now.stage, "progress": round(now.progress, 3)}
        headers = {"Cache-Control": "no-store"} | ({} if now.is_ready else {"Retry-After": "5"})
        return JSONResponse(body, 200 if now.is_ready else 503, headers)

    @app.get("/server_info", responses=closed)
    async def info() -> JSONResponse:
        """What was asked for, and what really runs."""
        return JSONResponse(server_info(service(), requested))

    exposition: Told = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The exposition."}
    }

    @app.get("/metrics", responses=exposition | closed, response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        text = service().metrics.text(service().pulse.look(), service().readiness.is_ready)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/status", responses=closed)
    async def now() -> JSONResponse:
        """What the page at ``/`` shows."""
        return JSONResponse(status(service()), headers={"Cache-Control": "no-store"})

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """A page for people; it asks ``/status`` for all it shows."""
        html = files("ddtree.server").joinpath("page.html").read_text(encoding="utf-8")
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(
            html, headers={"Content-Security-Policy": policy + "; frame-ancestors 'none'; base-uri 'none'"}
        )


def _model(service: Service) -> dict[str, Any]:
    engine = service.thread.engine
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "ddtree",
        "max_model_len": engine.state.max_model_len if engine else None,
    }


_REFERENCE = "#/components/schemas/{model}"


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    """The body in the OpenAPI document; routes read it themselves, to refuse in OpenAI's words."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe_bodies(app: FastAPI) -> None:
    """Add what `_takes` refers to."""
    models: list[type[BaseModel]] = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        document = describe()
        document["components"]["schemas"] |= definitions["$defs"]
        document["components"]["securitySchemes"] = KEY_SCHEME
        for path, operations in document["paths"].items():
            for operation in operations.values():
                # Either of the two: with a key where the server has one, without where it has none.
                operation["security"] = [] if path in OPEN_PATHS else [{"key": []}, {}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
