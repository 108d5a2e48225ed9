"""Routes that are not inference: health, models, tokens, and the switches of vLLM's developer mode."""

from __future__ import annotations

from secrets import token_hex
from time import time

from workers.sim import bodies, fields, templates, tokenizer
from workers.sim.errors import Fault, InvalidBody
from workers.sim.exchange import Exchange
from workers.sim.generation import Generator

VERSION = "0.32.0"
"""The vLLM release whose surface this is."""

TOKENIZE_KINDS: dict[str, fields.Kind] = {
    "model": fields.STRING,
    "messages": fields.LIST,
    "prompt": fields.STRING,
    "tools": fields.LIST,
    "return_token_strs": fields.BOOLEAN,
}


class Control:
    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._settings = generator.settings
        self._service = generator.service
        self._created = int(time())
        self._permission = f"modelperm-{token_hex(8)}"

    async def health(self, exchange: Exchange) -> None:
        await exchange.answer(200, content_type=None)

    async def version(self, exchange: Exchange) -> None:
        await exchange.answer_json({"version": VERSION})

    async def load(self, exchange: Exchange) -> None:
        """Counts only with a flag that a real replica has off by default."""
        await exchange.answer_json({"server_load": 0})

    async def event_sources(self, exchange: Exchange) -> None:
        await exchange.answer_json({})

    async def models(self, exchange: Exchange) -> None:
        now = int(time())
        permission = {
            "id": self._permission,
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self._settings.model,
            "object": "model",
            "created": now,
            "owned_by": "vllm",
            "root": self._settings.model,
            "parent": None,
            "max_model_len": self._settings.context_tokens,
            "permission": [permission],
        }
        await exchange.answer_json({"object": "list", "data": [card]})

    async def tokenize(self, exchange: Exchange) -> None:
        body = await exchange.read_json()
        if body.get("prompt") is None and body.get("messages") is None:
            names = ("prompt", "messages")
            raise InvalidBody(*(Fault("missing", f"body.{name}", "Field required", body) for name in names))
        values = fields.check(body, TOKENIZE_KINDS)
        bodies.check(body, bodies.Chat)
        self._generator.require_model(values.get("model"))
        if "messages" in values:
            text = templates.render(values["messages"], values.get("tools"), self._settings.model)
        else:
            text = values["prompt"]
        pieces = tokenizer.split(text)
        strings = [piece.decode("utf-8", "replace") for piece in pieces] if values.get("return_token_strs") else None
        answer = {
            "count": len(pieces),
            "max_model_len": self._settings.context_tokens,
            "tokens": list(tokenizer.token_ids(pieces)),
            "token_strs": strings,
        }
        await exchange.answer_json(answer)

    async def detokenize(self, exchange: Exchange) -> None:
        values = fields.check(
            await exchange.read_json(), {"model": fields.STRING, "tokens": fields.INTEGERS}, ("tokens",)
        )
        self._generator.require_model(values.get("model"))
        known = [token for token in values["tokens"] if 0 <= token < tokenizer.VOCABULARY_SIZE]
        await exchange.answer_json({"prompt": tokenizer.decode(known)})

    # ---- developer mode ----------------------------------------------------------------------------------------------

    async def sleep(self, exchange: Exchange) -> None:
        self._service.hold(asleep=True)
        await exchange.answer_json({"status": "sleeping", "level": 1})

    async def wake_up(self, exchange: Exchange) -> None:
        self._service.hold(asleep=False)
        await exchange.answer_json({"status": "awake", "tags": None})

    async def is_sleeping(self, exchange: Exchange) -> None:
        await exchange.answer_json({"is_sleeping": self._service.asleep})

    async def pause(self, exchange: Exchange) -> None:
        self._service.hold(paused=True)
        await exchange.answer_json({"status": "paused"})

    async def resume(self, exchange: Exchange) -> None:
        self._service.hold(paused=False)
        await exchange.answer_json({"status": "resumed"})

    async def is_paused(self, exchange: Exchange) -> None:
        await exchange.answer_json({"is_paused": self._service.paused})

    async def reset_prefix_cache(self, exchange: Exchange) -> None:
        self._service.clear_cache()
        await exchange.answer(200, content_type=None)
