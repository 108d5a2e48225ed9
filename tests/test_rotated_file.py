"""The decision log's file: its size and number stay bounded, whoever writes to it and whatever the disk does."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from gateway.request_log import RequestLog, RequestRecord
from gateway.rotated_file import RotatedFile


def lines(folder: Path) -> list[bytes]:
    return [line for file in folder.iterdir() for line in file.read_bytes().splitlines()]


def test_it_is_rotated_at_its_size_and_the_oldest_go(tmp_path: Path):
    path = tmp_path / "log"
    file = RotatedFile(str(path), max_bytes=100, files=3)
    for number in range(20):
        file.write(b"%034d\n" % number)  # two fit
    file.close()
    kept = {name.name: name.read_bytes().split() for name in tmp_path.iterdir()}
    assert {name: [int(one) for one in texts] for name, texts in kept.items()} == {
        "log": [18, 19],
        "log.1": [16, 17],
        "log.2": [14, 15],
    }
    assert path.stat().st_mode & 0o007 == 0, "nobody else may read it"


def test_one_file_alone_begins_anew(tmp_path: Path):
    file = RotatedFile(str(tmp_path / "log"), max_bytes=10, files=1)
    for number in range(5):
        file.write(b"%07d\n" % number)
    file.close()
    assert lines(tmp_path) == [b"0000004"]


def test_a_batch_that_is_too_large_by_itself_is_written_whole(tmp_path: Path):
    file = RotatedFile(str(tmp_path / "log"), max_bytes=10, files=2)
    file.write(b"x" * 100 + b"\n")
    file.write(b"y\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"y\n"
    assert len((tmp_path / "log.1").read_bytes()) == 101


def test_what_was_there_at_the_start_stays(tmp_path: Path):
    (tmp_path / "log").write_bytes(b"before\n")
    file = RotatedFile(str(tmp_path / "log"), max_bytes=10, files=2)
    file.write(b"after\n")
    file.close()
    assert (tmp_path / "log.1").read_bytes() == b"before\n"


@pytest.mark.parametrize("taken_away", [lambda path: path.unlink(), lambda path: path.rename(f"{path}.old")])
def test_a_file_that_somebody_took_away_is_made_anew(tmp_path: Path, taken_away):
    path = tmp_path / "log"
    file = RotatedFile(str(path), max_bytes=1000, files=2)
    file.write(b"one\n")
    taken_away(path)
    file.write(b"two\n")
    file.close()
    assert path.read_bytes() == b"two\n"


def test_several_writers_lose_and_tear_nothing(tmp_path: Path):
    """Each has the file open by itself, as several processes have."""

    def write(writer: int) -> None:
        file = RotatedFile(str(tmp_path / "log"), max_bytes=2_000, files=100)
        for number in range(200):
            file.write(b"%d-%06d\n" % (writer, number))
        file.close()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(lines(tmp_path)) == sorted(b"%d-%06d" % (w, n) for w in range(4) for n in range(200))
    assert len(list(tmp_path.iterdir())) <= 10
    assert max(file.stat().st_size for file in tmp_path.iterdir()) <= 2_000 + 4 * 9


def test_a_full_disk_costs_records_which_are_counted():
    log = RequestLog(RotatedFile("/dev/full", max_bytes=1000, files=2))
    for _ in range(3):
        log.add(RequestRecord("id", "/v1/chat/completions"))
    log.close()
    assert log.lost == 3


def test_what_was_torn_does_not_spoil_the_next_line(tmp_path: Path):
    path = tmp_path / "log"
    file = RotatedFile(str(path), max_bytes=1000, files=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))  # of each file: as if the disk had no more room
    try:
        with pytest.raises(OSError, match="File too large"):
            file.write(b'{"one": 1}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.write(b'{"two": 2}\n')
    file.close()
    assert path.read_bytes().splitlines() == [b'{"one": ', b'{"two": 2}']


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        RotatedFile(str(tmp_path / "missing" / "log"), max_bytes=1, files=1)


def test_a_pipe_that_nobody_reads_is_an_error_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match="No such device"):
        RotatedFile(str(tmp_path / "log"), max_bytes=1, files=1)


def test_a_reader_of_a_pipe_may_be_slow(tmp_path: Path):
    path = tmp_path / "log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = RotatedFile(str(path), max_bytes=1_000, files=2)
    os.set_blocking(reader, True)
    line = b"x" * 300_000 + b"\n"  # more than a pipe holds
    writing = threading.Thread(target=file.write, args=(line,), daemon=True)
    writing.start()
    with open(reader, "rb") as opened:
        assert opened.readline() == line
    writing.join(10)
    file.close()
