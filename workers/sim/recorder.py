"""What vLLM remembers of ended requests for its histograms and counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from workers.engine_model import EngineRequest, Phase
from workers.sim.answers import Answer

_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

FAMILIES: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", _COUNTS),
    "request_generation_tokens": ("Number of generation tokens processed.", _COUNTS),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _TOKEN),
    "request_time_per_output_token_seconds": ("Histogram of time_per_output_token_seconds per request.", _TOKEN),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _REQUEST),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _REQUEST),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", _REQUEST),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", _REQUEST),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _REQUEST),
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        _COUNTS,
    ),
}
"""vLLM's histograms with their help texts and upper bounds."""


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Recorder:
    """Histograms by family name, and finished requests by reason."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in FAMILIES.items()}
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}

    def record(self, request: EngineRequest, answer: Answer) -> None:
        """An engine request ended. An aborted one leaves no trace in vLLM's metrics."""
        arrived, started, first, ended = (
            request.arrived_at,
            request.started_at,
            request.first_token_at,
            request.ended_at,
        )
        if request.phase is not Phase.FINISHED or arrived is None or started is None or first is None or ended is None:
            return
        self.finished[answer.finish_reason] += 1
        later_tokens = request.generated_tokens - 1
        values = {
            "request_prompt_tokens": request.prompt_tokens,
            "request_generation_tokens": request.generated_tokens,
            "time_to_first_token_seconds": first - arrived,
            "request_time_per_output_token_seconds": (ended - first) / max(1, later_tokens),
            "e2e_request_latency_seconds": ended - arrived,
            "request_queue_time_seconds": started - arrived,
            "request_inference_time_seconds": ended - started,
            "request_prefill_time_seconds": first - started,
            "request_decode_time_seconds": ended - first,
            "request_prefill_kv_computed_tokens": request.prompt_tokens - request.cached_tokens,
        }
        for name, value in values.items():
            self.histograms[name].observe(value)
        if later_tokens:
            self.histograms["inter_token_latency_seconds"].observe((ended - first) / later_tokens, later_tokens)
