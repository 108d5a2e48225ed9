"""Pages as replicas write them, and pages as they must not break the gateway."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.model import LoadSnapshot
from gateway.feeds.metrics_text import Absurd, read_load

RECORDED = b"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 10271.0
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79603750977e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
# HELP vllm:num_requests_waiting_by_reason Number of requests waiting to be processed, by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 1.0
# TYPE vllm:engine_sleep_state gauge
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_offloaded"} 0.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="discard_all"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 8192.0
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7960375319721053e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 4096.0
# TYPE vllm:prefix_cache_hits_created gauge
vllm:prefix_cache_hits_created{engine="0",model_name="tiny"} 1.796037531972119e+09
vllm:external_prefix_cache_queries_total{engine="0",model_name="tiny"} 77.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",engine="0",\
hash_block_size="None",kv_cache_dtype_skip_layers="[]",kv_cache_max_concurrency="1.171875",\
kv_cache_size_tokens="9600",num_cpu_blocks="None",num_gpu_blocks="300",num_gpu_blocks_override="300"} 1.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 4.0
"""
"""From vLLM 0.32.0, other families left out."""


def replaced(old: bytes, new: bytes) -> bytes:
    assert old in RECORDED
    return RECORDED.replace(old, new)


def test_reads_a_page_of_vllm():
    assert read_load(RECORDED, taken_at=7.0) == LoadSnapshot(
        taken_at=7.0,
        running=3,
        waiting=2,
        kv_usage=0.25,
        prefix_queries=8192,
        prefix_hits=4096,
        cache_tokens=9600,
        started_at=1796037509.77,
        asleep=False,
    )


def test_reads_the_names_of_older_versions():
    """O-12."""
    page = b"""\
vllm:num_requests_running{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="m"} 10.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 5.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0
"""
    load = read_load(page, 0.0)
    assert (load.running, load.kv_usage, load.prefix_queries, load.prefix_hits) == (1, 0.5, 10, 5)
    assert load.cache_tokens == 16_000
    assert (load.waiting, load.asleep, load.started_at) == (None, None, None)


def test_the_newer_name_wins_where_a_version_has_both():
    page = b"vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.1\n"
    assert read_load(page, 0.0).kv_usage == 0.1


def test_missing_is_not_zero():
    """O-12 (c)."""
    assert read_load(b"", 1.0) == LoadSnapshot(taken_at=1.0)
    assert read_load(b"# only comments\nsomething_else 4\n", 1.0) == LoadSnapshot(taken_at=1.0)


@pytest.mark.parametrize("value", [b"NaN", b"1e999", b"+Inf", b"-1.0", b"many", b"", b'"3"'])
def test_a_value_that_is_no_amount_is_missing(value):
    """O-12 (d)."""
    page = replaced(b'running{engine="0",model_name="tiny"} 3.0', b'running{engine="0",model_name="tiny"} ' + value)
    load = read_load(page, 0.0)
    assert load.running is None
    assert load.waiting == 2


def test_a_usage_above_one_is_missing():
    assert read_load(b"vllm:kv_cache_usage_perc 25.0\n", 0.0).kv_usage is None


def test_a_capacity_that_the_engine_does_not_know_yet_is_missing():
    page = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert read_load(page, 0.0).cache_tokens is None


ENGINES = b"""\
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 4
vllm:kv_cache_usage_perc{engine="0"} 0.8
vllm:kv_cache_usage_perc{engine="1"} 0.2
vllm:prefix_cache_hits_total{engine="0"} 100
vllm:prefix_cache_hits_total{engine="1"} 50
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1
vllm:engine_sleep_state{engine="1",sleep_state="awake"} 1
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="300"} 1
vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="100"} 1
"""


def test_engines_are_summed_and_their_usage_weighted_by_capacity():
    """O-12 (f)."""
    load = read_load(ENGINES, 0.0)
    assert (load.running, load.prefix_hits, load.cache_tokens, load.asleep) == (7, 150, 6400, False)
    assert load.kv_usage == pytest.approx(0.75 * 0.8 + 0.25 * 0.2)


def test_without_every_capacity_the_fullest_engine_speaks_for_all():
    page = ENGINES.replace(b'num_gpu_blocks="100"', b'num_gpu_blocks="None"')
    load = read_load(page, 0.0)
    assert load.kv_usage == 0.8
    assert load.cache_tokens is None


def test_one_unusable_engine_makes_the_sum_unknown():
    load = read_load(ENGINES.replace(b'running{engine="1"} 4', b'running{engine="1"} NaN'), 0.0)
    assert load.running is None
    assert load.prefix_hits == 150


def test_one_sleeping_engine_makes_the_replica_asleep():
    asleep = ENGINES.replace(b'state{engine="1",sleep_state="awake"} 1', b'state{engine="1",sleep_state="awake"} 0')
    assert read_load(asleep, 0.0).asleep is True


def test_labels_may_hold_braces_commas_quotes_and_spaces():
    page = b'vllm:num_requests_running{model_name="a } 9 \\"b\\", c=\\"d",engine="0"} 5 1700000000\n'
    assert read_load(page, 0.0).running == 5


def test_a_line_that_is_cut_or_broken_makes_its_family_unknown():
    assert read_load(b'vllm:num_requests_running{engine="0', 0.0).running is None
    assert read_load(b'vllm:num_requests_running{engine="0" 5\n', 0.0).running is None


def test_a_longer_name_is_another_family():
    page = b"vllm:num_requests_waiting_by_reason 9\nvllm:num_requests_waiting 1\n"
    assert read_load(page, 0.0).waiting == 1


def test_windows_line_ends_and_bytes_that_are_not_text_do_no_harm():
    page = b'\xff\xfe\nvllm:num_requests_running{model_name="\xff"} 2.0\r\n\x00'
    assert read_load(page, 0.0).running == 2


@given(st.binary(max_size=300), st.integers(0, len(RECORDED)))
def test_no_page_raises_and_no_amount_is_negative(noise, at):
    load = read_load(RECORDED[:at] + noise + RECORDED[at:], 0.0)
    for value in (load.running, load.waiting, load.kv_usage, load.prefix_hits, load.cache_tokens):
        assert value is None or value >= 0


@pytest.mark.parametrize("number", [b"1e308", b"9" * 400, b"9" * 3000])
def test_numbers_too_large_to_count_are_unknown(number):
    page = (
        b'vllm:num_requests_running{engine="0"} %b\nvllm:num_requests_running{engine="1"} %b\n'
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="%b"} 1\nvllm:kv_cache_usage_perc 0.5\n'
    ) % (number, number, number)
    load = read_load(page, taken_at=0.0)
    assert load.running is None
    assert load.cache_tokens is None
    assert load.kv_usage == 0.5


def test_a_page_with_absurdly_many_samples_says_nothing():
    line = b'vllm:num_requests_running{engine="%d"} 1\n'
    few, many = (b"".join(line % number for number in range(count)) for count in (1_000, 100_000))
    assert read_load(few, taken_at=0.0).running == 1_000
    with pytest.raises(Absurd, match="more than 65536 lines"):
        read_load(many, taken_at=0.0)
    with pytest.raises(Absurd, match="more than 4096 lines of load"):
        read_load(many[: len(many) // 10], taken_at=0.0)


@pytest.mark.parametrize("ending", [b"\n" * 4_000_000, b"vllm:num_requests_running{%b} 1\n" % (b'a="",' * 800_000)])
def test_a_page_that_no_engine_writes_says_nothing(ending):
    """Reading it would hold up all requests, each time."""
    with pytest.raises(Absurd):
        read_load(RECORDED + ending, taken_at=0.0)


def test_an_unwanted_line_may_be_long():
    assert read_load(RECORDED + b"# HELP other " + b"x" * 100_000 + b"\n", taken_at=0.0) == read_load(RECORDED, 0.0)
