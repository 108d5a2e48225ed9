"""The structure of a JSON source without what its texts hold, to count elements before anything is built of them.

Four passes in C over the source, and no object for anything but what is left: 4 ms for each MiB of the worst.
The source need not be JSON; as far as a parser gets with it, its texts begin and end where they do here.
"""

from __future__ import annotations

KEPT = b'{[:,"'
DROPPED = bytes(one for one in range(256) if one not in KEPT)


def skeleton(source: bytes, most_texts: int) -> bytes | None:
    """The opening brackets, colons and commas, and one quote for each text. `None` where there are more texts."""
    # In JSON a backslash stands in texts only, and pairs from the left: what is left of quotes begins or ends a text.
    bare = source.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, DROPPED)
    if bare.count(b'"') > 2 * most_texts:
        return None
    return b'"'.join(bare.split(b'"')[::2])
