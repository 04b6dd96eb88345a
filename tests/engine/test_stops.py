"""Where an answer ends: the first stop in the order of the tokens, also in the middle of an accepted run."""

import pytest

from ddtree import SamplingParams, Speculation
from ddtree.engine.sequence import Sequence, StopStrings
from ddtree.engine.speculation import DraftShape


class Words:
    """A tokenizer of whole words: token 12 says `w12`, tokens 900 and above nothing."""

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join(f"w{i} " for i in ids if i < 900)


def sequence(*, max_new_tokens=50, stop=(), ends=(), prompt=(1, 2, 3)):
    params = SamplingParams(max_new_tokens=max_new_tokens, stop=stop)
    return Sequence(
        list(prompt), params, 0, frozenset(ends), len(prompt) + max_new_tokens, DraftShape("tree", 8, 8), Words()
    )


@pytest.mark.parametrize(
    ("run", "options", "tokens", "text", "reason"),
    [
        # An end token in mid-block: nothing behind it is kept (transformers issue 47912).
        ([10, 999, 20, 21], {"ends": {999}}, [10, 999], "w10 ", "stop"),
        # The stop comes before the cap, though the cap lies inside the same run (sglang issue 31599).
        ([10, 11, 12, 20, 21, 22], {"stop": ("w12",), "max_new_tokens": 5}, [10, 11, 12], "w10 w11 ", "stop"),
        ([10, 11, 999, 20, 21, 22], {"ends": {999}, "max_new_tokens": 5}, [10, 11, 999], "w10 w11 ", "stop"),
        # The cap comes first.
        ([10, 11, 12, 13], {"stop": ("w13",), "max_new_tokens": 3}, [10, 11, 12], "w10 w11 w12 ", "length"),
        # A stop at the cap itself is a stop.
        ([10, 11, 12], {"stop": ("w12",), "max_new_tokens": 3}, [10, 11, 12], "w10 w11 ", "stop"),
        # A stop string across tokens; text that only looked like its beginning comes back.
        ([10, 11, 12], {"stop": ("0 w11 w1",)}, [10, 11, 12], "w1", "stop"),
        ([10, 11], {"stop": ("w11 x",), "max_new_tokens": 2}, [10, 11], "w10 w11 ", "length"),
        # The earlier of two stop strings wins.
        ([10, 11], {"stop": ("11", "w1")}, [10], "", "stop"),
    ],
)
@pytest.mark.parametrize("piece", [1, 2, 10], ids=lambda n: f"runs of {n}")
def test_first_stop_wins(run, options, tokens, text, reason, piece):
    request = sequence(**options)
    for begin in range(0, len(run), piece):
        if request.finish_reason is None:
            request.extend(run[begin : begin + piece])
    assert request.output == tokens
    assert request.text == text
    assert request.finish_reason == reason


def test_extend_tells_how_many_tokens_counted():
    request = sequence(ends={999})
    assert request.extend([10, 11]) == 2
    assert request.extend([12, 999, 13, 14]) == 2


def test_checking_the_cap_first_would_be_seen():
    """The fault of sglang issue 31599, put back: cut the run at the cap, then look for the stop."""
    request = sequence(stop=("w12",), max_new_tokens=5)
    run = [10, 11, 12, 20, 21, 22]
    request.extend(run)
    cap_first = run[: request.params.max_new_tokens]
    assert request.output != cap_first


def test_held_text_is_never_lost():
    stops = StopStrings(["<end>"])
    assert [stops.push(piece) for piece in ["a<", "en", "d x"]] == ["a", "", "<end x"]
    assert not stops.found and stops.held == ""


@pytest.mark.parametrize("speculation", [Speculation("ar"), Speculation("chain"), Speculation("tree", 32)], ids=str)
def test_stops_of_the_real_pair_are_the_same_in_every_mode(real_engine, speculation):
    prompt = [{"role": "user", "content": "Count from one to ten in words."}]
    free = real_engine.generate([prompt], SamplingParams(max_new_tokens=40), speculation=Speculation("ar"))[0]
    middle = free.token_ids[17]
    first = free.token_ids.index(middle)

    by_id = SamplingParams(max_new_tokens=40, stop_token_ids=[middle])
    done = real_engine.generate([prompt], by_id, speculation=speculation)[0]
    assert done.token_ids == free.token_ids[: first + 1]
    assert done.finish_reason == "stop"

    word = free.text[30:36]
    by_text = SamplingParams(max_new_tokens=40, stop=[word])
    done = real_engine.generate([prompt], by_text, speculation=speculation)[0]
    assert done.text == free.text[: free.text.index(word)]
    assert done.finish_reason == "stop"

    short = real_engine.generate([prompt], SamplingParams(max_new_tokens=7), speculation=speculation)[0]
    assert short.token_ids == free.token_ids[:7]
    assert short.finish_reason == "length"
    assert sum(short.stats.accepted_lengths) == 6, "the first token comes from prefill"
