"""Random walks here are the same in every run, and slow machines do not fail them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("core", deadline=None, derandomize=True)
settings.load_profile("core")
