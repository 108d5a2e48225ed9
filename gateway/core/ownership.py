"""Which replica keeps a stored response: ids are known only in that replica's memory, so follow-ups must go there.

A replica that was removed keeps its ids: a follow-up then gets one clear error instead of another replica's "not
found". An id belongs to the tenant that made it, who may be the one without a name.
"""

from __future__ import annotations

from collections import OrderedDict

from gateway.core.model import ReplicaId

MAX_IDS = 100_000
"""Ids remembered, about 20 MB; the least recently used is forgotten (its follow-up then gets the replica's own 404)."""


class Ownership:
    """Bounded LRU map from id to replica and tenant."""

    def __init__(self, max_ids: int = MAX_IDS) -> None:
        self._max_ids = max_ids
        self._owners: OrderedDict[str, tuple[ReplicaId, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def __repr__(self) -> str:
        return f"<Ownership of {len(self._owners)}/{self._max_ids} ids>"

    def owner(self, id: str) -> ReplicaId | None:
        """Who keeps it, as far as known. A question: it does not count as use."""
        found = self._owners.get(id)
        return found[0] if found is not None else None

    def is_foreign(self, id: str, tenant: str) -> bool:
        """Whether another tenant made it. Of an id that is not known nobody can tell."""
        found = self._owners.get(id)
        return found is not None and found[1] != tenant

    def own(self, id: str, replica: ReplicaId, tenant: str = "") -> None:
        """What another tenant made stays that tenant's, whatever a replica answers to this one."""
        if self.is_foreign(id, tenant):
            return
        self._owners[id] = (replica, tenant)
        self._owners.move_to_end(id)
        if len(self._owners) > self._max_ids:
            self._owners.popitem(last=False)
