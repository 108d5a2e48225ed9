"""`/v1/embeddings`, rerank and score: deterministic vectors, and scores from shared words, at the cost of a prefill."""

from __future__ import annotations

import base64
import math
import struct
from array import array
from random import Random
from time import time
from typing import Any

import xxhash

from workers.sim import fields, tokenizer
from workers.sim.answers import Wish
from workers.sim.completions import raw_prompts, token_ids
from workers.sim.errors import ApiError, Fault, InvalidBody, parameter_error
from workers.sim.exchange import Exchange
from workers.sim.generation import Generator, request_id
from workers.sim.sampling import Sampling

DIMENSIONS = 64
"""Small, so that answers stay small; `dimensions` may ask for fewer."""
EMBEDDING_KINDS: dict[str, fields.Kind] = {
    "model": fields.STRING,
    "dimensions": fields.INTEGER,
    "encoding_format": fields.STRING,
}
RERANK_KINDS: dict[str, fields.Kind] = {
    "model": fields.STRING,
    "query": fields.STRING,
    "documents": fields.ANYTHING,
    "top_n": fields.INTEGER,
}
SCORE_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names under which the two sides of a score may come."""


async def embed(generator: Generator, exchange: Exchange) -> None:
    body = await exchange.read_json()
    values = fields.check(body, EMBEDDING_KINDS)
    if body.get("input") is None:
        raise InvalidBody(Fault("missing", "body.input", "Field required", body))
    generator.require_model(values.get("model"))
    dimensions = values.get("dimensions", DIMENSIONS)
    if not 1 <= dimensions <= DIMENSIONS:
        raise parameter_error(f"dimensions must be in [1, {DIMENSIONS}], got {dimensions}.", "dimensions", dimensions)
    prompts = [
        tokenizer.encode(item) if isinstance(item, str) else token_ids(item) for item in raw_prompts(body["input"])
    ]
    await _prefill(generator, exchange, prompts)
    vectors = [_vector(tokens, dimensions, generator.settings.seed) for tokens in prompts]
    if values.get("encoding_format") == "base64":
        shown: list[Any] = [base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() for vector in vectors]
    else:
        shown = vectors
    data = [{"index": index, "object": "embedding", "embedding": vector} for index, vector in enumerate(shown)]
    await exchange.answer_json(_listing(generator, exchange, data, prompts))


async def score(generator: Generator, exchange: Exchange) -> None:
    body = await exchange.read_json()
    values = fields.check(body, {"model": fields.STRING})
    generator.require_model(values.get("model"))
    for left, right in SCORE_PAIRS:
        if body.get(left) is not None and body.get(right) is not None:
            break
    else:
        raise InvalidBody(Fault("missing", "body.text_1", "Field required", body))
    queries, documents = _texts(body[left]), _texts(body[right])
    if len(queries) == 1:
        queries *= len(documents)
    prompts = [tokenizer.encode(f"{query}\n{document}") for query, document in zip(queries, documents, strict=False)]
    await _prefill(generator, exchange, prompts)
    scores = [_likeness(query, document) for query, document in zip(queries, documents, strict=False)]
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    await exchange.answer_json(_listing(generator, exchange, data, prompts))


async def rerank(generator: Generator, exchange: Exchange) -> None:
    values = fields.check(await exchange.read_json(), RERANK_KINDS, ("query", "documents"))
    generator.require_model(values.get("model"))
    documents = _texts(values["documents"])
    prompts = [tokenizer.encode(f"{values['query']}\n{document}") for document in documents]
    await _prefill(generator, exchange, prompts)
    results = [
        {
            "index": index,
            "document": {"text": document, "multi_modal": None},
            "relevance_score": _likeness(values["query"], document),
        }
        for index, document in enumerate(documents)
    ]
    results.sort(key=lambda result: -float(str(result["relevance_score"])))
    total = sum(map(len, prompts))
    answer = {
        "id": request_id(exchange, "score-"),
        "model": generator.settings.model,
        "usage": {"prompt_tokens": total, "total_tokens": total},
        "results": results[: values.get("top_n") or len(results)],
    }
    await exchange.answer_json(answer)


async def _prefill(generator: Generator, exchange: Exchange, prompts: list[array[int]]) -> None:
    if not prompts:
        raise ApiError(400, "You must pass at least one prompt")
    wanted = Sampling(max_tokens=1)
    checked = [generator.prompt(tokens, wanted) for tokens in prompts]
    async with generator.run(exchange, checked, wanted, Wish(max_tokens=1)) as run:
        await run.wait_end()


def _listing(
    generator: Generator, exchange: Exchange, data: list[dict[str, Any]], prompts: list[array[int]]
) -> dict[str, Any]:
    total = sum(map(len, prompts))
    return {
        "id": request_id(exchange, "embd-"),
        "object": "list",
        "created": int(time()),
        "model": generator.settings.model,
        "data": data,
        "usage": {
            "prompt_tokens": total,
            "total_tokens": total,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }


def _vector(tokens: array[int], dimensions: int, seed: int) -> list[float]:
    """A unit vector that depends on the tokens alone."""
    random = Random(xxhash.xxh3_64_intdigest(tokens.tobytes(), seed=seed))
    vector = [random.gauss(0.0, 1.0) for _ in range(dimensions)]
    length = math.hypot(*vector)
    return [value / length for value in vector]


def _likeness(query: str, document: str) -> float:
    """Share of the words of both that both have, 0..1."""
    left, right = set(query.lower().split()), set(document.lower().split())
    return len(left & right) / max(1, len(left | right))


def _texts(value: Any) -> list[str]:
    texts = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, str | dict):
            raise InvalidBody(Fault("string_type", "body.documents", "Input should be a valid string", item))
        texts.append(item if isinstance(item, str) else str(item.get("text", "")))
    return texts
