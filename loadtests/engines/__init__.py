"""Routers side by side in front of real vLLM replicas on this machine's CPU."""
