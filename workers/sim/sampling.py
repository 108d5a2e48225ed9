"""What a body asks of the engine: one value for all APIs, and the checks that vLLM makes on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workers.sim import fields
from workers.sim.errors import ApiError, parameter_error

KINDS: dict[str, fields.Kind] = {
    "model": fields.STRING,
    "max_tokens": fields.INTEGER,
    "max_completion_tokens": fields.INTEGER,
    "min_tokens": fields.INTEGER,
    "n": fields.INTEGER,
    "seed": fields.INTEGER,
    "temperature": fields.NUMBER,
    "top_p": fields.NUMBER,
    "stop": fields.STRINGS,
    "include_stop_str_in_output": fields.BOOLEAN,
    "ignore_eos": fields.BOOLEAN,
    "stream": fields.BOOLEAN,
    "stream_options": fields.OBJECT,
    "return_token_ids": fields.BOOLEAN,
    "cache_salt": fields.STRING,
}
"""Fields that chat and completions share."""
MAX_SAMPLES, MAX_LOGPROBS = 16_384, 20
"""vLLM's defaults."""


@dataclass(frozen=True, slots=True)
class Sampling:
    max_tokens: int | None = None
    """`None`: to the end of the context."""
    min_tokens: int = 0
    samples: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    logprobs: int | None = None
    """Alternatives to each token, 0 for the token alone; `None`: no log probabilities."""
    cache_salt: str | None = None


def read(values: dict[str, Any], context_tokens: int, default_max_tokens: int | None = None) -> Sampling:
    """Sampling of checked fields (`KINDS`). Raises ApiError for values that vLLM refuses."""
    limit_name = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    max_tokens = values.get(limit_name, default_max_tokens)
    stream, options = values.get("stream", False), values.get("stream_options")
    if options is not None and not stream:
        raise parameter_error("Stream options can only be defined when `stream=True`.", "stream_options")
    if values.get("cache_salt") == "":
        raise parameter_error("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if max_tokens is not None and max_tokens > context_tokens:
        message = f"{limit_name}={max_tokens} cannot be greater than max_model_len={context_tokens}. "
        raise parameter_error(message + "Please request fewer output tokens.", limit_name, max_tokens)
    _check_ranges(values, max_tokens)
    options = options or {}
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=values.get("min_tokens", 0),
        samples=values.get("n", 1),
        seed=values.get("seed", 0),
        stop=values.get("stop", ()),
        keep_stop=values.get("include_stop_str_in_output", False),
        ignore_eos=values.get("ignore_eos", False),
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        return_token_ids=values.get("return_token_ids", False),
        cache_salt=values.get("cache_salt"),
    )


def _check_ranges(values: dict[str, Any], max_tokens: int | None) -> None:
    samples, minimum = values.get("n", 1), values.get("min_tokens", 0)
    if samples < 1:
        raise ApiError(400, f"n must be at least 1, got {samples}.")
    if samples > MAX_SAMPLES:
        hint = "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        raise ApiError(400, f"n must be at most {MAX_SAMPLES}, got {samples}. {hint}")
    temperature, top_p = values.get("temperature", 1.0), values.get("top_p", 1.0)
    if temperature < 0:
        raise parameter_error(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if temperature > 2:
        raise parameter_error(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    if not 0 < top_p <= 1:
        raise parameter_error(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    require_tokens(max_tokens)
    if minimum < 0:
        raise ApiError(400, f"min_tokens must be greater than or equal to 0, got {minimum}.")
    if max_tokens is not None and minimum > max_tokens:
        raise ApiError(400, f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {minimum}.")


def require_tokens(max_tokens: int | None) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise parameter_error(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)


def require_logprobs(alternatives: int) -> int:
    if alternatives > MAX_LOGPROBS:
        message = f"Requested sample logprobs of {alternatives}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise parameter_error(message, "logprobs", alternatives)
    return max(0, alternatives)
