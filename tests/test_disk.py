"""Files replaced as a whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ddtree.disk import write_whole


def test_readers_see_the_old_content_or_the_new(tmp_path: Path) -> None:
    path, contents = tmp_path / "file.json", ["a" * 200_000, "b" * 300_000]
    write_whole(path, contents[0])
    done = threading.Event()

    def write() -> None:
        for turn in range(30):
            write_whole(path, contents[turn % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert path.read_text() in contents
    writer.join()
    assert [found.name for found in tmp_path.iterdir()] == ["file.json"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("keep")
    (tmp_path / "link").symlink_to(other)
    write_whole(tmp_path / "link", b"\xffnew")
    assert (tmp_path / "link").read_bytes() == b"\xffnew" and not (tmp_path / "link").is_symlink()
    assert other.read_text() == "keep"


def test_what_cannot_be_written_leaves_all_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.mkdir()
    with pytest.raises(OSError):
        write_whole(place, "text")
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_two_threads_and_long_names_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    contents = ["a" * 50_000, "b" * 50_000]
    failed: list[Exception] = []

    def write(content: str) -> None:
        try:
            for _ in range(50):
                write_whole(path, content)
        except Exception as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not failed and path.read_text() in contents
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "told")
    reader.join(10)
    assert read == ["told"] and pipe.is_fifo()
