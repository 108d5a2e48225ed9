"""A cheap, reversible tokenizer: a word with its leading space, split after five letters, is one token.

About four bytes a token in English prose, as real ones. A token id *is* its bytes (bijective base 256), so every
replica agrees on every id without a vocabulary file, and any list of ids can be turned back into text. Text that is
continued keeps the tokens of what came before, except the last: prefixes of a text have a common run of blocks.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

import xxhash

MAX_TOKEN_BYTES = 6
_PIECES = re.compile(
    rb" ?[A-Za-z_]{1,5}| ?[0-9]{1,3}|[\xc2-\xf4][\x80-\xbf]{1,3}|\s{1,4}|[!-/:-@\[-^`{-~]{1,3}|.",
    re.DOTALL,
)
_FIRST_IDS = list(accumulate((1 << 8 * length for length in range(1, MAX_TOKEN_BYTES)), initial=0))
"""First id of the tokens of 1, 2, .. bytes."""
VOCABULARY_SIZE = sum(1 << 8 * length for length in range(1, MAX_TOKEN_BYTES + 1))
_ID_BYTES = 8
_MEMORY_TOKENS = 200_000  # distinct pieces remembered, about 25 MB; a look-up costs a third of computing the id


class _Ids(dict[bytes, int]):
    def __missing__(self, piece: bytes) -> int:
        if len(self) >= _MEMORY_TOKENS:
            self.clear()
        self[piece] = token = _FIRST_IDS[len(piece) - 1] + int.from_bytes(piece)
        return token


_ids = _Ids()


def split(text: str) -> list[bytes]:
    """The bytes of each token."""
    return _PIECES.findall(text.encode("utf-8", "surrogatepass"))


def token_ids(pieces: Iterable[bytes]) -> array[int]:
    return array("q", map(_ids.__getitem__, pieces))


def encode(text: str) -> array[int]:
    return token_ids(split(text))


def token_bytes(token: int) -> bytes:
    """Bytes of one id; the caller keeps ids below VOCABULARY_SIZE."""
    length = bisect_right(_FIRST_IDS, token)
    return (token - _FIRST_IDS[length - 1]).to_bytes(length)


def decode(tokens: array[int] | list[int]) -> str:
    return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")


def chain(tokens: array[int], block_size: int, origin: int) -> list[int]:
    """Chained ids of the full blocks of `tokens`; `origin` is the id of what comes before them."""
    data, step, block = memoryview(tokens).cast("B"), _ID_BYTES * block_size, origin
    ids = []
    for end in range(step, len(data) + 1, step):
        block = xxhash.xxh3_64_intdigest(data[end - step : end], seed=block)
        ids.append(block)
    return ids
