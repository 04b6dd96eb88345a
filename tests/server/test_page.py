"""The status page as a person sees it, in a real Chromium without a screen."""

from __future__ import annotations

import io
import os
import re
import shutil
import struct
import subprocess
import threading
import zlib
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from live import Live, live, tiny_loader

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NO CHROMIUM: the page is not looked at (apt-get install chromium)"
)


class Page(HTMLParser):
    """Text by id, and how many elements of each kind and class."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: dict[str, str] = {}
        self.kinds: list[tuple[str, str]] = []
        self._open: list[str | None] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.kinds.append((tag, told.get("class") or ""))
        if tag not in ("meta", "br", "input", "link"):
            self._open.append(told.get("id"))

    def handle_endtag(self, tag: str) -> None:
        if self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for name in filter(None, self._open):
            self.text[name] = self.text.get(name, "") + data


def chromium(folder: Path, *arguments: str) -> str:
    """Run Chromium on a page; its clock runs ahead, so that the page has asked the server a few times."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1100,900", "--virtual-time-budget=3500", *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=90, check=False,
        env=os.environ | {"HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def busy_server(tiny_folders):
    with live(tiny_loader(tiny_folders, prefix_cache=True), show_text=True) as server:
        httpx.get(f"{server.url}/status")  # somebody looks, so that trees are recorded
        body = {"prompt": "hello there", "max_tokens": 120, "temperature": 0}
        threads = [
            threading.Thread(
                target=httpx.post, args=(f"{server.url}/v1/completions",), kwargs={"json": body, "timeout": 60}
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield server


def test_the_page_shows_the_server(busy_server: Live, tmp_path: Path) -> None:
    page = Page(chromium(tmp_path, "--dump-dom", busy_server.url))
    status = httpx.get(f"{busy_server.url}/status").json()
    assert page.text["stage"] == "ready" and ("span", "ready") in page.kinds
    assert page.text["name"] == "tiny" and "cpu, float32, tree, budget 32" in page.text["facts"]
    assert float(page.text["tau"]) == pytest.approx(status["tau"], abs=0.01)
    assert page.text["running"] == "0 of 4" and page.text["waiting"] == "0 of 64"
    assert re.fullmatch(r"0 of [0-9,]+", page.text["cache"])
    tree = status["tree"]
    circles = [kind for tag, kind in page.kinds if tag == "circle"]
    assert circles.count("accepted") == tree["accepted"] + 1, "the root and the accepted nodes"
    assert circles.count("bonus") == 1 and len(circles) == len(tree["nodes"]) + 2
    assert f"{tree['accepted']} of 32 nodes accepted" in page.text["remark"]
    assert "--show-text" not in page.text["remark"]


def test_the_page_asks_for_a_key(tiny_folders, tmp_path: Path) -> None:
    from ddtree.server import api_key

    with live(tiny_loader(tiny_folders), api_keys=api_key("a-long-enough-key")) as server:
        page = Page(chromium(tmp_path, "--dump-dom", server.url))
        assert page.text["stage"] == "this server wants a key" and "name" not in page.text


def test_the_picture_is_not_blank(busy_server: Live, tmp_path: Path) -> None:
    file = tmp_path / "page.png"
    chromium(tmp_path, f"--screenshot={file}", busy_server.url)
    if kept := os.environ.get("DDTREE_KEEP_SCREENSHOT"):
        shutil.copy(file, kept)
    width, height, pixels = read_png(file.read_bytes())
    assert (width, height) == (1100, 900)
    colours = {pixels[i : i + 3] for i in range(0, len(pixels), 3)}
    assert len(colours) > 50, "a picture with text and lines has many shades"
    green = sum(1 for r, g, b in colours if g > r + 40 and g > b + 20)
    yellow = sum(1 for r, g, b in colours if r > b + 80 and g > b + 50)
    assert green and yellow, "the accepted path and the bonus token are there"
    lower = pixels[3 * width * 350 : 3 * width * 800]
    assert len({lower[i : i + 3] for i in range(0, len(lower), 3)}) > 5, "the tree is drawn"


def read_png(raw: bytes) -> tuple[int, int, bytes]:
    """Width, height and RGB bytes of an 8-bit RGB or RGBA picture."""
    stream = io.BytesIO(raw[8:])
    packed = b""
    while head := stream.read(8):
        length, kind = struct.unpack(">I4s", head)
        content = stream.read(length + 4)[:length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", content[:10])
            assert depth == 8 and colour in (2, 6)
            size = 3 if colour == 2 else 4
        elif kind == b"IDAT":
            packed += content
    flat, stride, rows = zlib.decompress(packed), width * size, []
    before = bytes(stride)
    for y in range(height):
        method, row = flat[y * (stride + 1)], bytearray(flat[y * (stride + 1) + 1 : (y + 1) * (stride + 1)])
        for x in range(stride):
            left = row[x - size] if x >= size else 0
            up, corner = before[x], before[x - size] if x >= size else 0
            row[x] = (row[x] + _predicted(method, left, up, corner)) & 255
        before = bytes(row)
        rows.append(before if size == 3 else b"".join(before[i : i + 3] for i in range(0, stride, 4)))
    return width, height, b"".join(rows)


def _predicted(method: int, left: int, up: int, corner: int) -> int:
    if method < 4:
        return (0, left, up, (left + up) // 2)[method]
    guess = left + up - corner
    return min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
