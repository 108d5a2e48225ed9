"""Raw requests whose framing two servers could read differently, as data: what a client sends, what may come of it.

Classes after the differences between HTTP servers that are known in public (sizes of chunks read as numbers of a
programming language, two lengths, bare CR and LF, NUL, folding, spaces around names, forms of the request line,
trailers, upgrades). Behind most payloads stands a whole second request, which a lax reader of the first would serve.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"host: g\r\n"
CLOSE = b"connection: close\r\n"
BODY = b'{"model":"m","messages":[]}'
SIZE = b"%x" % len(BODY)
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n"
SMUGGLED_BODY = b'{"model":"m","messages":[],"smuggled":1}'
SMUGGLED = LINE + HOST + CLOSE + b"content-length: %d\r\n\r\n" % len(SMUGGLED_BODY) + SMUGGLED_BODY

REFUSED = frozenset((400,))


@dataclass(frozen=True)
class Payload:
    name: str
    raw: bytes
    requests: int = 0
    """That a replica sees."""
    statuses: frozenset[int] = REFUSED
    """Any of these is right for the first answer; none of them: closed without a word."""
    bodies: tuple[bytes, ...] = ()
    """Of the requests that the replica sees."""


def refused(name: str, raw: bytes, *statuses: int) -> Payload:
    """Ambiguous: nothing reaches a replica, the client is told and the connection closes. A second request follows."""
    return Payload(name, raw + SMUGGLED, statuses=frozenset(statuses) or REFUSED)


def served(name: str, raw: bytes, body: bytes = BODY) -> Payload:
    """By the letters of HTTP this is one request."""
    return Payload(name, raw, 1, frozenset((200,)), (body,))


def chunked(name: str, chunks: bytes) -> Payload:
    return refused(f"chunk: {name}", LINE + HOST + CHUNKED + b"\r\n" + chunks)


def fields(name: str, lines: bytes, body: bytes = BODY) -> Payload:
    return refused(f"field: {name}", LINE + HOST + lines + b"\r\n" + body)


def request_line(name: str, line: bytes, *statuses: int) -> Payload:
    return refused(f"request line: {name}", line + HOST + LENGTH + b"\r\n" + BODY, *statuses)


def after_size(text: bytes) -> bytes:
    """A body in chunks with this behind the first size."""
    return SIZE + text + BODY + b"\r\n0\r\n\r\n"


def with_size(text: bytes) -> bytes:
    return text + b"\r\n" + BODY + b"\r\n0\r\n\r\n"


CHUNK_SIZES = [
    chunked("0x before the size", with_size(b"0x" + SIZE)),
    chunked("0X before the size", with_size(b"0X" + SIZE)),
    chunked("underscore in the size", with_size(SIZE[:1] + b"_" + SIZE[1:])),
    chunked("plus before the size", with_size(b"+" + SIZE)),
    chunked("minus before the size", with_size(b"-" + SIZE)),
    chunked("space before the size", with_size(b" " + SIZE)),
    chunked("tab before the size", with_size(b"\t" + SIZE)),
    chunked("space behind the size", with_size(SIZE + b" ")),
    chunked("tab behind the size", with_size(SIZE + b"\t")),
    chunked("vertical tab behind the size", with_size(SIZE + b"\x0b")),
    chunked("no size", with_size(b"")),
    chunked("a size that is no number", with_size(b"1g")),
    chunked("a point in the size", with_size(b"1.b")),
    chunked("a digit of another alphabet", with_size("１b".encode())),
    chunked("the size plus two to the 64", with_size(b"1" + SIZE.rjust(16, b"0"))),
    chunked("a size of twenty digits", with_size(b"f" * 20)),
    chunked("the size twice", with_size(SIZE + b"\r\n" + SIZE)),
    chunked("LF behind the size", after_size(b"\n")),
    chunked("CR behind the size", after_size(b"\r")),
    chunked("CR CR LF behind the size", after_size(b"\r\r\n")),
    chunked("LF behind an extension", after_size(b";a=b\n")),
    chunked("CR in an extension", after_size(b";a\rb\r\n")),
    chunked("NUL in an extension", after_size(b";a\0b\r\n")),
    chunked("CRLF in a quoted extension", after_size(b';a="\r\n"\r\n')),
    chunked("LF behind the data", SIZE + b"\r\n" + BODY + b"\n0\r\n\r\n"),
    chunked("nothing behind the data", SIZE + b"\r\n" + BODY + b"0\r\n\r\n"),
    chunked("two letters instead of CRLF behind the data", SIZE + b"\r\n" + BODY + b"XX0\r\n\r\n"),
    chunked("more data than the size", b"5\r\n" + BODY + b"\r\n0\r\n\r\n"),
    chunked("LF behind the last chunk", SIZE + b"\r\n" + BODY + b"\r\n0\n\r\n"),
    chunked("LF at the end", SIZE + b"\r\n" + BODY + b"\r\n0\r\n\n"),
    chunked("a last chunk with letters", SIZE + b"\r\n" + BODY + b"\r\n0X\r\n\r\n"),
    chunked("a trailer without colon", SIZE + b"\r\n" + BODY + b"\r\n0\r\nno colon\r\n\r\n"),
    chunked("a trailer with NUL", SIZE + b"\r\n" + BODY + b"\r\n0\r\nx: a\0b\r\n\r\n"),
    chunked("a trailer with LF", SIZE + b"\r\n" + BODY + b"\r\n0\r\nx: a\ny: b\r\n\r\n"),
    chunked("a length as trailer", CHUNKS[:-2] + b"content-length: 5\r\n\r\n"),
    chunked("a coding as trailer", CHUNKS[:-2] + CHUNKED + b"\r\n"),
]

LENGTHS = [
    fields("length and chunks", LENGTH + CHUNKED, CHUNKS),
    fields("chunks and length", CHUNKED + LENGTH, CHUNKS),
    fields("length 0 and chunks", b"content-length: 0\r\n" + CHUNKED, CHUNKS),
    fields("two lengths", LENGTH + b"content-length: 5\r\n"),
    fields("two equal lengths", LENGTH + LENGTH),
    fields("a list of lengths", b"content-length: 27, 27\r\n"),
    fields("plus before the length", b"content-length: +27\r\n"),
    fields("minus before the length", b"content-length: -27\r\n"),
    fields("0x before the length", b"content-length: 0x1b\r\n"),
    fields("underscore in the length", b"content-length: 2_7\r\n"),
    fields("space in the length", b"content-length: 2 7\r\n"),
    fields("point in the length", b"content-length: 27.0\r\n"),
    fields("exponent in the length", b"content-length: 27e0\r\n"),
    fields("an empty length", b"content-length: \r\n"),
    fields("the length plus two to the 64", b"content-length: 18446744073709551643\r\n"),
    fields("a length with a comma", b"content-length: 27,\r\n"),
    fields("a length folded", b"content-length:\r\n 27\r\n"),
    fields("space before the colon of the length", b"content-length : 27\r\n"),
    fields("tab before the colon of the length", b"content-length\t: 27\r\n"),
    fields("NUL behind the length", b"content-length: 27\0\r\n"),
]

CODINGS = [
    fields(f"coding {value!r}", b"transfer-encoding: " + value + b"\r\n", CHUNKS)
    for value in (
        b"xchunked",
        b"chunkedx",
        b"identity",
        b"gzip",
        b"chunked, identity",
        b"identity, chunked",
        b"chunked, chunked",
        b"gzip, chunked",
        b"chunked,",
        b",chunked",
        b"chunked;q=1",
        b'"chunked"',
        b"chunked\0",
        b"\x0bchunked",
        b"\x0cchunked",
        b"chunked\x85",
        b"",
    )
] + [
    fields("coding twice", CHUNKED + CHUNKED, CHUNKS),
    fields("coding, and none", CHUNKED + b"transfer-encoding: identity\r\n", CHUNKS),
    fields("another coding, and chunks", b"transfer-encoding: gzip\r\n" + CHUNKED, CHUNKS),
    fields("coding folded", b"transfer-encoding:\r\n chunked\r\n", CHUNKS),
    fields("space before the colon of the coding", b"transfer-encoding : chunked\r\n", CHUNKS),
    fields("coding in a name with underscore", b"transfer_encoding: chunked\r\n", CHUNKS),
    refused("field: chunks from HTTP/1.0", LINE.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS),
]

LETTERS = [
    refused("LF everywhere", (LINE + HOST + LENGTH + b"\r\n").replace(b"\r", b"") + BODY),
    refused("LF behind the request line", LINE.replace(b"\r", b"") + HOST + LENGTH + b"\r\n" + BODY),
    fields("LF between two", b"x: a\n" + LENGTH),
    refused("field: LF at the end of the head", LINE + HOST + LENGTH + b"\n" + BODY),
    fields("CR in a value", b"x: a\rb\r\n" + LENGTH),
    fields("CR between two", b"x: a\r" + LENGTH),
    fields("CR CR LF", b"x: a\r\r\n" + LENGTH),
    fields("NUL in a value", b"x: a\0b\r\n" + LENGTH),
    fields("NUL in a name", b"x\0y: a\r\n" + LENGTH),
    fields("a control character in a value", b"x: a\x01b\r\n" + LENGTH),
    fields("DEL in a value", b"x: a\x7fb\r\n" + LENGTH),
    fields("a folded value", b"x: a\r\n b\r\n" + LENGTH),
    fields("a value folded with a tab", b"x: a\r\n\tb\r\n" + LENGTH),
    refused("field: space before the first", LINE + b" x: a\r\n" + HOST + LENGTH + b"\r\n" + BODY),
    fields("a fold that hides a length", b"x: a\r\n content-length: 5\r\n" + LENGTH),
    fields("space before a colon", b"x : a\r\n" + LENGTH),
    fields("space in a name", b"x y: a\r\n" + LENGTH),
    fields("no colon", b"x\r\n" + LENGTH),
    fields("no name", b": x\r\n" + LENGTH),
    fields("a byte beyond ASCII in a name", b"x\xe9: a\r\n" + LENGTH),
    fields("brackets in a name", b"x[]: a\r\n" + LENGTH),
    refused("field: no host", LINE + LENGTH + b"\r\n" + BODY),
    fields("two hosts", HOST + LENGTH),
    fields("another host", b"host: other\r\n" + LENGTH),
]

REQUEST_LINES = [
    request_line("a tab before the target", LINE.replace(b"POST ", b"POST\t")),
    request_line("a tab before the version", LINE.replace(b" HTTP", b"\tHTTP")),
    request_line("space before the method", b" " + LINE),
    request_line("space behind the version", LINE.replace(b"\r", b" \r")),
    request_line("no version", LINE.replace(b" HTTP/1.1", b""), 400, 505),
    request_line("HTTP/1.2", LINE.replace(b"1.1", b"1.2"), 400, 505),
    request_line("HTTP/2.0", LINE.replace(b"1.1", b"2.0"), 400, 505),
    request_line("HTTP/0.9", LINE.replace(b"1.1", b"0.9"), 400, 505),
    request_line("HTTP/3.1", LINE.replace(b"1.1", b"3.1"), 400, 505),
    request_line("HTTP/1.10", LINE.replace(b"1.1", b"1.10"), 400, 505),
    request_line("HTTP/01.1", LINE.replace(b"1.1", b"01.1"), 400, 505),
    request_line("HTTP/1,1", LINE.replace(b"1.1", b"1,1")),
    request_line("the name of the protocol in small letters", LINE.replace(b"HTTP", b"http")),
    request_line("another protocol", LINE.replace(b"HTTP", b"ICY")),
    request_line("the method in small letters", LINE.replace(b"POST", b"post")),
    request_line("an unknown method", LINE.replace(b"POST", b"FOO")),
    request_line("a fragment", LINE.replace(b" HTTP", b"#a HTTP")),
    request_line("a fragment behind a query", LINE.replace(b" HTTP", b"?a#b HTTP")),
    request_line("a byte beyond ASCII in the target", LINE.replace(b" HTTP", b"?\xe9 HTTP")),
    request_line("NUL in the target", LINE.replace(b" HTTP", b"\0 HTTP")),
    request_line("CR in the target", LINE.replace(b" HTTP", b"\r HTTP")),
    request_line("space in the target", LINE.replace(b" HTTP", b" x HTTP")),
    request_line("no slash before the target", LINE.replace(b"/v1", b"v1")),
    Payload("request line: CONNECT", b"CONNECT g:80 HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED),
    Payload("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED),
    Payload("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)),
]

HEAD = LINE + HOST + CLOSE
LONG_BODY = b'{"model":"m","messages":[],"x":"' + SMUGGLED.replace(b'"', b"'").replace(b"\r\n", b"  ") * 600 + b'"}'
H2C = b"connection: close, upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"

WHOLE = [
    served("a length", HEAD + LENGTH + b"\r\n" + BODY),
    served("chunks", HEAD + CHUNKED + b"\r\n" + CHUNKS),
    served(
        "chunks of one byte", HEAD + CHUNKED + b"\r\n" + b"".join(b"1\r\n%c\r\n" % one for one in BODY) + b"0\r\n\r\n"
    ),
    served("zeros before the size", HEAD + CHUNKED + b"\r\n" + with_size(b"000" + SIZE)),
    served("an extension", HEAD + CHUNKED + b"\r\n" + after_size(b';a=b;c="d"\r\n')),
    served("zeros before the length", HEAD + b"content-length: 0027\r\n\r\n" + BODY),
    served("tab before and spaces behind the length", HEAD + b"content-length:\t27  \r\n\r\n" + BODY),
    served("a coding in capitals behind a tab", HEAD + b"Transfer-Encoding:\tCHUNKED\r\n\r\n" + CHUNKS),
    served("empty lines before the request", b"\r\n\r\n" + HEAD + LENGTH + b"\r\n" + BODY),
    served("bytes beyond ASCII in a value", HEAD + b"x: caf\xe9\r\n" + LENGTH + b"\r\n" + BODY),
    served("an empty host", LINE + b"host:\r\n" + CLOSE + LENGTH + b"\r\n" + BODY),
    served("spaces before the target", HEAD.replace(b"POST ", b"POST   ") + LENGTH + b"\r\n" + BODY),
    served("spaces before the version", HEAD.replace(b" HTTP", b"   HTTP") + LENGTH + b"\r\n" + BODY),
    served("absolute form", HEAD.replace(b"/v1", b"http://g/v1") + LENGTH + b"\r\n" + BODY),
    served("absolute form of another host", HEAD.replace(b"/v1", b"http://other:1/v1") + LENGTH + b"\r\n" + BODY),
    served("a trailer", HEAD + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"x: a\r\n\r\n"),
    served("a host as trailer", HEAD + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"host: other\r\n\r\n"),
    served("Expect", HEAD + b"expect: 100-continue\r\n" + LENGTH + b"\r\n" + BODY),
    served(
        "Connection names the length", LINE + HOST + b"connection: close, content-length\r\n" + LENGTH + b"\r\n" + BODY
    ),
    served("Connection names the host", LINE + HOST + b"connection: close, host\r\n" + LENGTH + b"\r\n" + BODY),
    served("an offer of h2c", LINE + HOST + H2C + LENGTH + b"\r\n" + BODY),
    served("an offer of h2c, in chunks", LINE + HOST + H2C + CHUNKED + b"\r\n" + CHUNKS),
    served("closes, and another behind", HEAD + LENGTH + b"\r\n" + BODY + SMUGGLED),
    served("a request in a long body", HEAD + b"content-length: %d\r\n\r\n" % len(LONG_BODY) + LONG_BODY, LONG_BODY),
    Payload(
        "a pipelined pair, which is two",
        LINE + HOST + LENGTH + b"\r\n" + BODY + SMUGGLED,
        2,
        frozenset((200,)),
        (BODY, SMUGGLED_BODY),
    ),
    Payload(
        "an empty body, and a request behind",
        LINE + HOST + b"content-length: 0\r\n\r\n" + SMUGGLED,
        1,
        REFUSED,
        (SMUGGLED_BODY,),
    ),
    Payload(
        "a request as the body of a GET",
        b"GET /health HTTP/1.1\r\n" + HOST + CLOSE + b"content-length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
        0,
        frozenset((200,)),
    ),
    Payload(
        "a request as the body of what is not served",
        HEAD.replace(b"/chat/", b"/x/") + b"content-length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
        0,
        frozenset((404,)),
    ),
    Payload(
        "a length shorter than the body",
        LINE + HOST + b"content-length: 5\r\n\r\n" + BODY,
        0,
    ),
    Payload("a length longer than the body", HEAD + b"content-length: 99\r\n\r\n" + BODY, 0, frozenset()),
    Payload("a head without end", HEAD + b"x: ", 0, frozenset()),
    Payload("a size without end", HEAD + CHUNKED + b"\r\n" + SIZE, 0, frozenset()),
    Payload("a trailer without end", HEAD + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"x: a\r\n", 0, frozenset()),
]

CORPUS = CHUNK_SIZES + LENGTHS + CODINGS + LETTERS + REQUEST_LINES + WHOLE


async def exchange(port: int, payload: Payload, seconds: float) -> bytes | None:
    """What the server at this port says until it closes; `None` when it does not close in time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(payload.raw)
        async with asyncio.timeout(seconds):
            return await reader.read()
    except ConnectionError:
        return b""
    except TimeoutError:
        return None
    finally:
        writer.transport.abort()


def status_of(answer: bytes) -> int | None:
    """Of the first answer that is not interim."""
    for found in re.finditer(rb"(?:^|\r\n\r\n)HTTP/1\.[01] (\d{3}) ", answer):
        if not found[1].startswith(b"1"):
            return int(found[1])
    return None


def problem(payload: Payload, answer: bytes | None, bodies: Sequence[bytes]) -> str:
    """What is wrong about an answer, and about the requests that reached the replica; empty when nothing is."""
    if len(bodies) != payload.requests:
        return f"{payload.name}: {len(bodies)} requests reached the replica, not {payload.requests}"
    if tuple(bodies) != payload.bodies[: len(bodies)]:
        return f"{payload.name}: another body reached the replica: {bodies!r}"
    if answer is None:
        return f"{payload.name}: the connection stays open"
    status = status_of(answer)
    if status is None and not payload.statuses and not answer:
        return ""
    if status not in payload.statuses:
        return f"{payload.name}: answered {status}: {answer[:80]!r}"
    if status >= 400 and b'{"error":{' not in answer:
        return f"{payload.name}: refused without an error object: {answer!r}"
    return ""
