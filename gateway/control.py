"""The control endpoints: `/health`, `/ready`, `/metrics`, `/v1/models`, the dry run, views, API docs.

FastAPI carries them; everything else falls through to the inference paths.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from gateway.admin import AdminListener
from gateway.assembly import Gateway
from gateway.core.model import (
    RoutingError,
    UnknownModel,
)
from gateway.dashboard.site import add_dashboard
from gateway.isolation import CannotSalt
from gateway.keys import Denied
from gateway.model_list import caller_of, model_object, models_for
from gateway.proxy import asgi_client
from gateway.proxy.call import Call
from gateway.proxy.endpoints import ENDPOINTS
from gateway.proxy.errors import BadBody, EncodedBody, NotFound, answer
from gateway.proxy.forwarding import read_headers
from gateway.proxy.front_door import FrontDoor
from gateway.proxy.upstream import Header
from gateway.responses import refuse_as_openai_does, response_of, with_body
from gateway.views import explained


def build_api(gateway: Gateway, admin: AdminListener | None = None) -> FastAPI:
    """The control endpoints. What they do not match goes to the inference paths. `admin`: where its listener is."""

    api = FastAPI(title="Warmlane", version=version("warmlane"), redirect_slashes=False)
    refuse_as_openai_does(api)

    @api.head("/health", include_in_schema=False)  # load balancers ask so; the server sends no body then
    @api.get("/health", response_class=PlainTextResponse)
    async def health() -> str:
        """Liveness: the process answers."""
        return "ok"

    @api.head("/ready", include_in_schema=False)
    @api.get("/ready")
    async def ready() -> Response:
        """Readiness: 200 when at least one replica can serve, else 503."""
        ready = gateway.ready()
        return JSONResponse({"ready": ready, "draining": gateway.draining}, status_code=200 if ready else 503)

    @api.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        page = gateway.telemetry.render() if gateway.member is None else await gateway.member.metrics()
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/v1/models")
    async def models(request: Request) -> Response:
        """The models of all available replicas, merged; with keys, those that the key may use."""
        return JSONResponse(
            {"object": "list", "data": [model_object(card) for card in models_for(gateway.router, request)]}
        )

    @api.get("/v1/models/{model:path}")
    async def model(model: str, request: Request) -> Response:
        """One model; ids may contain slashes."""
        for card in models_for(gateway.router, request):
            if card.id == model:
                return JSONResponse(model_object(card))
        return response_of(answer(UnknownModel(model)))

    @api.post("/warmlane/route")
    async def route(request: Request, path: str = "/v1/chat/completions") -> Response:
        """Dry run: where would this request body go, and why? Books nothing. Beyond loopback it wants the admin key."""
        gateway.viewers.check(request.headers.raw)

        async def explain(body: bytes) -> Response:
            return dry_run(gateway, body, path, request)

        return await with_body(request, gateway.config.server.max_body_mib * 2**20, gateway.door.bodies, explain)

    @api.get("/warmlane/replicas")
    async def replicas(request: Request) -> Response:
        """All replicas: health, load and its age, drain, models. Beyond loopback it wants the admin key."""
        gateway.viewers.check(request.headers.raw)
        return JSONResponse(gateway.view.show(gateway.clock()))

    if gateway.config.server.dashboard:
        add_dashboard(api, gateway.viewers, gateway.live, admin)
    api.router.default = inference_paths(gateway.door)
    return api


def inference_paths(door: FrontDoor) -> Any:
    """The ASGI application behind the control endpoints."""

    async def inference(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await asgi_client.serve(door, scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})

    return inference


def dry_run(gateway: Gateway, body: bytes, path: str, asked: Request) -> Response:
    """Read as the front door reads it, decided as the router decides now; nothing is booked."""
    endpoint = ENDPOINTS.get(path.encode())
    if endpoint is None:
        return response_of(answer(NotFound(f"Not an inference path: {path}")))
    headers: list[Header] = asked.headers.raw
    call = Call(b"POST", path.encode(), endpoint, headers, body, gateway.clock(), caller=caller_of(asked))
    try:
        request = gateway.door.read(call, read_headers(headers))
        return JSONResponse(explained(gateway.router.decide(request, gateway.clock())))
    except (BadBody, CannotSalt, Denied, EncodedBody, NotFound, RoutingError) as error:
        return response_of(answer(error))
