"""Benchmark of the data path: gateways side by side in front of the same mock replicas, one core each."""
