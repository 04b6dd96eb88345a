"""Short texts become tokens at once, longer ones beside the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from live import Live

from ddtree.server.messages import PlainMessage
from ddtree.server.prompt_tokens import SHORT_TEXT, chat_tokens, text_tokens


class Counted(ThreadPoolExecutor):
    """A pool that counts what it is given."""

    given = 0

    def submit(self, *args, **kwargs):
        self.given += 1
        return super().submit(*args, **kwargs)


def hops(work) -> tuple[int, list[int]]:
    """How often the coroutine asked a thread, and its tokens."""

    async def run():
        with Counted(1) as pool:
            asyncio.get_running_loop().set_default_executor(pool)
            return await work, pool.given

    tokens, given = asyncio.run(run())
    return given, tokens


@pytest.mark.parametrize(("length", "asked"), [(1, 0), (SHORT_TEXT, 0), (SHORT_TEXT + 1, 1)])
def test_texts(server: Live, length: int, asked: int):
    given, tokens = hops(text_tokens(server.service, "a" * length, 4096))
    assert (given, len(tokens)) == (asked, length)


def test_chats(server: Live):
    def turns(n: int, text: str):
        messages = [PlainMessage(role="user", content=text) for _ in range(n)]
        return hops(chat_tokens(server.service, messages, None, None, 1 << 16))[0]

    assert turns(1, "hello") == turns(3, "hello") == 0
    assert turns(1, "a" * 2 * SHORT_TEXT) == 2
    assert turns(200, "") >= 1, "many empty turns are work for the template as well"
