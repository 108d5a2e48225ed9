"""How an answer is framed for its client: by its length, in chunks, or by the end of the connection."""

from __future__ import annotations

import asyncio

from gateway.proxy.relay import status_line
from gateway.proxy.upstream import JOIN_BELOW_BYTES, Header


class AnswerFraming:
    """`begin` each answer of a connection, then `write` its pieces. The head goes out with the first of them."""

    __slots__ = ("_chunked", "_head")

    def __init__(self) -> None:
        self._head = b""
        self._chunked = False

    def begin(self, status: int, headers: list[Header], *, http_1_0: bool, keep_alive: bool) -> bool:
        """Whether the connection can be kept after it: wanted, and the client sees where the answer ends."""
        lines = [status_line(status)]
        chunked = status not in (204, 304)
        for name, value in headers:
            if name == b"content-length":
                chunked = False
            lines += (name, b": ", value, b"\r\n")
        if chunked and http_1_0:
            chunked = keep_alive = False  # the end of the connection is the end of the body
        if chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)
        self._chunked = chunked
        return keep_alive

    def write(self, transport: asyncio.Transport, data: bytes, last: bool) -> None:
        out, self._head = self._head, b""
        if not self._chunked:
            if len(data) >= JOIN_BELOW_BYTES:
                transport.writelines((out, data))
            elif out or data:
                transport.write(out + data)
        elif data:
            end = b"\r\n0\r\n\r\n" if last else b"\r\n"
            if len(data) >= JOIN_BELOW_BYTES:
                transport.writelines((b"%b%x\r\n" % (out, len(data)), data, end))
            else:
                transport.write(b"%b%x\r\n%b%b" % (out, len(data), data, end))
        elif out or last:
            transport.write(out + b"0\r\n\r\n" if last else out)
