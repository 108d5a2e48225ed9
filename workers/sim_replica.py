"""An embedded replica: one process that a gateway cannot tell from vLLM on the routes that it uses, without a GPU.

`python -m workers.sim_replica --port 0` prints `ready http://127.0.0.1:PORT` once it listens, and ends with code 0 on
SIGTERM or SIGINT. Tests may also mount `build_app` on a server of their own.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import uvicorn

from workers.engine_model import EngineSettings
from workers.sim import chat, completions, messages, pooling
from workers.sim.control import Control
from workers.sim.errors import ApiError
from workers.sim.exchange import ClientLeft, Exchange, Receive, Scope, Send
from workers.sim.generation import Generator
from workers.sim.metrics import Metrics
from workers.sim.responses import Responses
from workers.sim.service import EngineService, RunAborted
from workers.sim.settings import ReplicaSettings

GUARDED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere")
"""What vLLM's `--api-key` guards; everything else stays open."""
SHUTDOWN_SECONDS = 1
"""How long requests in flight may go on after SIGTERM. vLLM's default is 0, but leaves their clients hanging."""

RESPONSE_PREFIX = "/v1/responses/"
"""The one family of paths with a variable part."""

Handler = Callable[[Exchange], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class SimReplica:
    """The ASGI app of one replica."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self.settings = settings
        self.service = EngineService(settings)
        self._routes = _routes(settings, self.service)
        self._expected_key = f"Bearer {settings.api_key}".encode()

    def __repr__(self) -> str:
        return f"<SimReplica {self.settings.model} {self.service.engine!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a replica speaks http, not {scope['type']}")
        exchange = Exchange(scope, receive, send)
        try:
            await self._dispatch(exchange, scope["method"])
        except ApiError as error:
            anthropic = exchange.path.startswith("/v1/messages")
            await exchange.answer(error.status, error.anthropic_body() if anthropic else error.openai_body())
        except (ClientLeft, RunAborted):
            pass  # nobody is there to be answered

    async def _dispatch(self, exchange: Exchange, method: str) -> None:
        path = exchange.path
        guarded = self.settings.api_key is not None and path.startswith(GUARDED_PREFIXES) and method != "OPTIONS"
        if guarded and exchange.headers.get(b"authorization") != self._expected_key:
            await exchange.answer_json({"error": "Unauthorized"}, 401)
            return
        methods = self._find(path)
        if methods is None:
            await self._answer_unknown(exchange)
        elif (handler := methods.get(method)) is not None:
            await handler(exchange)
        else:
            allow = ", ".join(methods).encode()
            await exchange.answer(405, b'{"detail":"Method Not Allowed"}', extra=((b"allow", allow),))

    def _find(self, path: str) -> Mapping[str, Handler] | None:
        methods = self._routes.get(path)
        if methods is None and path.startswith(RESPONSE_PREFIX):
            rest = path[len(RESPONSE_PREFIX) :]
            methods = self._routes.get(RESPONSE_PREFIX + "{id}" + rest[rest.find("/") :] * ("/" in rest))
        return methods

    async def _answer_unknown(self, exchange: Exchange) -> None:
        path = exchange.path
        if len(path) > 1 and path.endswith("/") and self._find(path.rstrip("/")) is not None:
            host = exchange.headers.get(b"host", b"127.0.0.1")
            location = b"http://" + host + path.rstrip("/").encode()
            await exchange.answer(307, content_type=None, extra=((b"location", location),))
        else:
            await exchange.answer_json({"detail": "Not Found"}, 404)


def _routes(settings: ReplicaSettings, service: EngineService) -> dict[str, Mapping[str, Handler]]:
    generator = Generator(settings, service)
    control = Control(generator)
    metrics = Metrics(service)
    responses = Responses(generator)
    chat_serve, completions_serve = partial(chat.serve, generator), partial(completions.serve, generator)
    routes: dict[str, Mapping[str, Handler]] = {
        "/health": {"GET": control.health},
        "/ping": {"GET": control.health, "POST": control.health},
        "/version": {"GET": control.version},
        "/load": {"GET": control.load},
        "/kv_event_sources": {"GET": control.event_sources},
        "/metrics": {"GET": metrics.serve},
        "/v1/models": {"GET": control.models},
        "/tokenize": {"POST": control.tokenize},
        "/detokenize": {"POST": control.detokenize},
        "/v1/chat/completions": {"POST": chat_serve},
        "/invocations": {"POST": chat_serve},
        "/v1/completions": {"POST": completions_serve},
        "/v1/messages": {"POST": partial(messages.serve, generator)},
        "/v1/messages/count_tokens": {"POST": partial(messages.count_tokens, generator)},
        "/v1/responses": {"POST": responses.create},
        "/v1/responses/{id}": {"GET": responses.retrieve},
        "/v1/responses/{id}/cancel": {"POST": responses.cancel},
    }
    if settings.pooling:
        routes["/v1/embeddings"] = {"POST": partial(pooling.embed, generator)}
        for prefix in ("", "/v1", "/v2"):
            routes[f"{prefix}/rerank"] = {"POST": partial(pooling.rerank, generator)}
        for prefix in ("", "/v1"):
            routes[f"{prefix}/score"] = {"POST": partial(pooling.score, generator)}
    if settings.dev_mode:
        routes |= {
            "/sleep": {"POST": control.sleep},
            "/wake_up": {"POST": control.wake_up},
            "/is_sleeping": {"GET": control.is_sleeping},
            "/pause": {"POST": control.pause},
            "/resume": {"POST": control.resume},
            "/is_paused": {"GET": control.is_paused},
            "/reset_prefix_cache": {"POST": control.reset_prefix_cache},
        }
    return routes


def build_app(settings: ReplicaSettings | None = None) -> SimReplica:
    return SimReplica(settings or ReplicaSettings())


# ---- the process -----------------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """Says where it listens as soon as it does. What it cuts off while it ends is no error."""

    def __init__(self, config: uvicorn.Config, url: str) -> None:
        super().__init__(config)
        self._url = url
        logging.getLogger("uvicorn.error").addFilter(lambda _: not self.should_exit)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"ready {self._url}", flush=True)


def serve(settings: ReplicaSettings, host: str, port: int) -> None:
    """Run one replica until SIGTERM or SIGINT."""
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
    )
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        build_app(settings),
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    server = _Server(config, f"http://{shown}:{listener.getsockname()[1]}")
    # uvicorn raises the signal that stopped it once more, for whoever handled it before: that ends us cleanly.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    server.run(sockets=[listener])


def _exit(*_: object) -> None:
    """At once: raising would print a traceback where the signal meets a callback that may not raise."""
    sys.stdout.flush()
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    engine, replica = EngineSettings(), ReplicaSettings()
    parser = argparse.ArgumentParser(prog="python -m workers.sim_replica", description="An embedded replica.")
    add = parser.add_argument
    add("--port", type=int, required=True, help="0 takes any free port; the ready line says which")
    add("--host", default="127.0.0.1")
    add("--model", default=replica.model, help="served model name")
    add("--cache-tokens", type=int, default=engine.cache_tokens, help="size of the KV cache")
    add("--block-size", type=int, default=engine.block_size)
    add("--prefill-rate", type=float, default=engine.prefill_rate, help="uncached prompt tokens per second")
    add("--decode-rate", type=float, default=engine.decode_rate, help="tokens per second of one request alone")
    add("--decode-slowdown", type=float, default=engine.decode_slowdown, help="by each further decoding request")
    add("--step-tokens", type=int, default=engine.step_tokens, help="steps shared by prefill and decode")
    add("--first-token-floor", type=float, default=engine.first_token_floor_seconds, help="seconds, whatever is cached")
    add("--max-num-seqs", type=int, default=engine.max_num_seqs)
    add("--max-num-queued-reqs", type=int, default=None, help="more waiting requests get 503")
    add("--max-model-len", type=int, default=None)
    add("--seed", type=int, default=replica.seed)
    add("--api-key", default=None)
    add("--no-response-store", action="store_true", help="forget /v1/responses, as vLLM does unless told otherwise")
    add("--pooling", action="store_true", help="serve embeddings, rerank and score")
    add("--dev-mode", action="store_true", help="serve /sleep, /reset_prefix_cache and their kin")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        settings = ReplicaSettings(
            model=options.model,
            engine=EngineSettings(
                cache_tokens=options.cache_tokens,
                block_size=options.block_size,
                prefill_rate=options.prefill_rate,
                decode_rate=options.decode_rate,
                decode_slowdown=options.decode_slowdown,
                step_tokens=options.step_tokens,
                first_token_floor_seconds=options.first_token_floor,
                max_num_seqs=options.max_num_seqs,
            ),
            max_model_len=options.max_model_len,
            max_num_queued_reqs=options.max_num_queued_reqs,
            seed=options.seed,
            api_key=options.api_key,
            pooling=options.pooling,
            dev_mode=options.dev_mode,
            store_responses=not options.no_response_store,
        )
        serve(settings, options.host, options.port)
    except (ValueError, OSError) as error:
        print(f"sim_replica: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
