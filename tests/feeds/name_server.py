"""A real DNS server on loopback, over UDP and TCP: it answers from a table, and can fail as servers do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

NAME = "_vllm._tcp.example"


class NameServer:
    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        """(name, type) -> records as text."""
        self.ttl = 0
        self.failing: dict[str, str] = {}
        """Name -> `silent`, `truncated` (over UDP), `garbage`, or the name of an rcode."""
        self.asked: list[tuple[str, str, str]] = []
        """(name, type, transport)"""
        self.address = ("127.0.0.1", 0)

    def serve(self, *hosts: str) -> None:
        """The service's records, `PRIORITY PORT ADDRESS` each; weights go against the priorities."""
        self.records = {(NAME, "SRV"): []}
        for number, (priority, port, address) in enumerate(host.split() for host in hosts):
            name = f"host-{address.replace('.', '-').replace(':', '-')}.example"
            self.records[NAME, "SRV"].append(f"{priority} {100 * number} {port} {name}.")
            self.records[name, "AAAA" if ":" in address else "A"] = [address]

    def answer(self, query: bytes, transport: str) -> bytes | None:
        message = dns.message.from_wire(query)
        question = message.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), question.rdtype.name
        self.asked.append((name, kind, transport))
        failure = self.failing.get(name, "")
        if failure == "silent":
            return None
        if failure == "garbage":
            return query[:2] + b"\x81\x80 nonsense"
        response = dns.message.make_response(message)
        if failure == "truncated" and transport == "udp":
            response.flags |= dns.flags.TC
        elif failure and failure != "truncated":
            response.set_rcode(dns.rcode.from_text(failure))
        elif found := self.records.get((name, kind)):
            response.answer.append(dns.rrset.from_text(question.name, self.ttl, "IN", kind, *found))
        elif not any(known == name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        return response.to_wire()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            query = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
            if (answer := self.answer(query, "tcp")) is not None:
                writer.write(len(answer).to_bytes(2, "big") + answer)
                await writer.drain()
        writer.close()


class Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        if (answer := self._server.answer(data, "udp")) is not None:
            self._transport.sendto(answer, address)


@contextlib.asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    server = NameServer()
    tcp = await asyncio.start_server(server.talk, "127.0.0.1", 0)
    server.address = tcp.sockets[0].getsockname()[:2]
    udp, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Datagrams(server), local_addr=server.address
    )
    try:
        yield server
    finally:
        udp.close()
        tcp.close()
        await tcp.wait_closed()
