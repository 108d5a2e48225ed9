"""Planner: which layout of a model on which GPUs, how much KV cache that leaves, and what will go wrong.

A plan is arithmetic, nothing is started. `models` reads a config.json, `hardware` knows the cards, `memory` counts
bytes, `kv_cache` counts blocks as vLLM does, `layouts` compares ways to use the GPUs, `rules` finds what is wrong,
`planning` puts them together and `report` shows it. What was measured beats what was computed.
"""
