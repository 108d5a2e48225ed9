"""What one embedded replica is: engine, names, limits, switches."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.engine_model import EngineSettings


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    model: str = "embedded"
    """Served model name."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    max_model_len: int | None = None
    """Longest prompt and answer in tokens; `None`: the KV cache, at most 32,768."""
    max_num_queued_reqs: int | None = None
    """Requests that may wait in the engine; more get 503 at once. `None`: no limit, vLLM's default."""
    seed: int = 0
    """Answers depend on this, the prompt and the request's own `seed`, on nothing else."""
    api_key: str | None = None
    """Guards what vLLM guards with it: paths under /v1, /v2, /inference and /cohere."""
    pooling: bool = False
    """Serve embeddings, rerank and score as a pooling model does."""
    dev_mode: bool = False
    """Serve /sleep, /pause, /reset_prefix_cache and their kin, as vLLM does with VLLM_SERVER_DEV_MODE=1."""
    store_responses: bool = True
    """Keep `/v1/responses` in memory, as vLLM does with VLLM_ENABLE_RESPONSES_API_STORE=1."""

    def __post_init__(self) -> None:
        room = self.engine.cache_blocks * self.engine.block_size
        if self.context_tokens < 2:
            raise ValueError("max_model_len must be at least 2 tokens")
        if self.context_tokens > room:
            raise ValueError(f"max_model_len {self.context_tokens} does not fit into a KV cache of {room} tokens")

    @property
    def context_tokens(self) -> int:
        if self.max_model_len is not None:
            return self.max_model_len
        return min(32_768, self.engine.cache_blocks * self.engine.block_size)
