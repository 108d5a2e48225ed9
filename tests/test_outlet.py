"""Whoever reads standard error may stop reading: nobody waits for that, and what is lost is counted."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.outlet import FINISH_SECONDS, MAX_WAITING_BYTES, Outlet, outlet

ROOT = Path(__file__).parents[1]
DEADLINE_SECONDS = 60.0
MISSING = re.compile(rb"warmlane: (\d+) lines are missing here: nobody read them in time\n")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    os.close(read_end)
    os.close(write_end)


def read_until(descriptor: int, found: Callable[[bytes], object]) -> bytes:
    read = b""
    while not found(read):
        read += os.read(descriptor, 65_536)
    return read


def test_what_is_written_comes_out_in_order_and_whole(pipe: tuple[int, int]) -> None:
    one = Outlet(pipe[1])
    for number in range(1_000):
        print("line", number, "é", file=one)
    one.write("no end")
    one.finish()
    expected = "".join(f"line {number} é\n" for number in range(1_000)) + "no end"
    assert read_until(pipe[0], lambda read: read.endswith(b"no end")).decode() == expected


def test_who_writes_does_not_wait_and_what_was_dropped_is_counted(pipe: tuple[int, int]) -> None:
    one = Outlet(pipe[1])
    line = "x" * 1_023
    total = 2 * MAX_WAITING_BYTES // 1_024
    for _ in range(total):
        print(line, file=one)  # with nobody to read it, this would never end
    whole = f"{line}\n".encode()

    def dropped(read: bytes) -> int:
        return sum(int(count) for count in MISSING.findall(read))

    read = read_until(pipe[0], lambda read: read.count(whole) + dropped(read) == total)
    assert dropped(read) > 0
    assert MISSING.sub(b"", read) == whole * (total - dropped(read))
    print("and on", file=one)
    one.finish()
    assert read_until(pipe[0], lambda more: b"\n" in more) == b"and on\n"


def test_the_end_comes_with_nobody_reading(pipe: tuple[int, int]) -> None:
    one = Outlet(pipe[1])
    one.write("x" * MAX_WAITING_BYTES)
    finishing = threading.Thread(target=one.finish)
    finishing.start()
    finishing.join(FINISH_SECONDS + DEADLINE_SECONDS)
    assert not finishing.is_alive()
    os.read(pipe[0], MAX_WAITING_BYTES)


def test_a_reader_that_left_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    one = Outlet(write_end)
    print("to nobody", file=one)
    one.finish()
    os.close(write_end)


def test_a_stream_without_a_descriptor_is_left_alone() -> None:
    stream = io.StringIO()
    with outlet(stream) as same:
        assert same is stream


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`warmlane up` of one replica, both its streams into one pipe, as in `up 2>&1 | less`."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from gateway.cli import main; main()", "up", "--replicas", "1", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    yield process
    assert process.stdout is not None
    process.kill()  # its replica ends with it
    process.wait()
    process.stdout.close()


def child_of(process: subprocess.Popen[bytes], word: bytes) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (child,) = (int(pid) for pid in children if word in Path(f"/proc/{pid}/cmdline").read_bytes())
    return child


def wait_for(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_up_serves_and_stops_while_nobody_reads_its_output(unread: subprocess.Popen[bytes]) -> None:
    assert unread.stdout is not None
    output = b""
    while b"print(" not in output:
        line = unread.stdout.readline()
        assert line, output
        output += line
    found = re.search(rb"serves (\S+) in front of", output)
    assert found is not None
    url = found.group(1).decode()

    with open(f"/proc/{child_of(unread, b'sim_replica')}/fd/1", "wb", buffering=0) as replica:
        written = threading.Thread(target=lambda: [replica.write(b"x" * 1_023 + b"\n") for _ in range(3_000)])
        written.start()  # three times what the queue holds
        written.join(DEADLINE_SECONDS)
        assert not written.is_alive()
    assert httpx.get(f"{url}/health", trust_env=False, timeout=DEADLINE_SECONDS).is_success
    body = {"model": "embedded", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    for _ in range(8):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=DEADLINE_SECONDS)
        assert answer.is_success  # its record waits for the same reader
    unread.send_signal(signal.SIGTERM)
    assert unread.wait(DEADLINE_SECONDS) == 0
