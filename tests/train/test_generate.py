"""Training data: the same conversations however often the work is interrupted, and nothing in it that was excluded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddtree.errors import UserError
from ddtree.models.tokenizer import Tokenizer
from ddtree.train.data_request import DataRequest
from ddtree.train.generate import DataReport, generate_data
from ddtree.train.shards import open_shards, read_facts
from tiny_models import load_weights, save_weights
from train.pieces import Row, conversations, letters, small_request, tiny_target, write_prompts

KILLER = Path(__file__).with_name("killed_generation.py")


def generate(request: DataRequest) -> DataReport:
    return generate_data(request, lambda stage, fraction: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[Row]:
    """What an uninterrupted run of the small request makes."""
    generate(small_request(folder))
    return conversations(folder / "data")


def test_what_was_asked_for_is_there(folder: Path, wanted: list[Row]) -> None:
    facts = read_facts(folder / "data")
    assert facts.is_finished and facts.n_answer_tokens >= 900
    last = facts.shards[-1]
    assert facts.n_answer_tokens - last.n_answer_tokens < 900  # and no shard more
    numbers = [row[0] for row in wanted]
    assert numbers == sorted(set(numbers)) and numbers[-1] < 16 * len(facts.shards)
    assert facts.n_conversations == len(wanted) == 16 * len(facts.shards) - sum(facts.n_left_out.values())
    assert facts.n_greedy == sum(row[4] for row in wanted)
    assert facts.n_answer_tokens == sum(len(row[2]) - row[3] for row in wanted)
    assert {source: sum(row[1] == source for row in wanted) for source in facts.n_by_source} == facts.n_by_source
    assert len(facts.n_by_source) == 4  # both files, as they are and completed by the target


def test_prompts_are_those_of_the_files_or_begin_like_them(folder: Path, wanted: list[Row]) -> None:
    tokenizer = Tokenizer(folder / "target", 61)
    form_end = tokenizer.encode_rendered(["</s><s>"])[0]
    turns = {
        name: [json.loads(line)["turns"][0] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    }
    openings = 0
    for _, source, tokens, start, _ in wanted:
        name, _, completed = source.partition(", ")
        prompt = list(tokens[:start])
        whole = [tokenizer.encode_chat([{"role": "user", "content": turn}]) for turn in turns[name]]
        if not completed:
            assert prompt in whole
            continue
        assert prompt[0] == form_end[-1] and prompt[-2:] == form_end
        first = {tuple(ids[:3]) for ids in whole}
        openings += tuple(prompt[:3]) in first
    assert openings > 3


def test_a_given_prompt_gets_one_greedy_answer(wanted: list[Row]) -> None:
    given = [row[2][: row[3]] for row in wanted if row[4] and "completed" not in row[1]]
    assert len(given) == len(set(given)) > 5


def test_weights_are_shares(tmp_path: Path) -> None:
    request = small_request(tmp_path, prompts=((tmp_path / "first.jsonl", 9.0), (tmp_path / "second.jsonl", 1.0)))
    generate(request)
    counts = read_facts(tmp_path / "data").n_by_source
    first = sum(n for name, n in counts.items() if name.startswith("first"))
    assert 0.75 < first / sum(counts.values()) < 0.98


def test_shares_are_kept(tmp_path: Path) -> None:
    greedy = small_request(tmp_path, greedy_share=1.0, self_prompt_share=1.0)
    generate(greedy)
    assert all(row[4] and "completed" in row[1] for row in conversations(tmp_path / "data"))
    sampled = small_request(tmp_path, greedy_share=0.0, self_prompt_share=0.0, out=tmp_path / "sampled")
    generate(sampled)
    assert not any(row[4] or "completed" in row[1] for row in conversations(tmp_path / "sampled"))
    # Without turns of its own the target cannot answer 17 prompts greedily more than once each.
    given = small_request(tmp_path, greedy_share=1.0, self_prompt_share=0.0, out=tmp_path / "given")
    generate(given)
    assert sum(row[4] for row in conversations(tmp_path / "given")) <= 17


def test_another_seed_gives_other_conversations(folder: Path, wanted: list[Row], tmp_path: Path) -> None:
    generate(small_request(folder, seed=1, out=tmp_path / "other"))
    sampled = {row[2] for row in wanted if not row[4]}
    assert len(sampled & {row[2] for row in conversations(tmp_path / "other")}) < len(sampled) / 10


def test_seats_change_nothing(folder: Path, wanted: list[Row], tmp_path: Path) -> None:
    generate(small_request(folder, seats=19, out=tmp_path / "other"))
    assert conversations(tmp_path / "other") == wanted


@pytest.mark.parametrize("kind", ["durable", "random"])
def test_killed_at_any_instant_nothing_is_lost_or_doubled(wanted: list[Row], tmp_path: Path, kind: str) -> None:
    small_request(tmp_path)  # makes the target
    done = subprocess.run(
        [sys.executable, str(KILLER), str(tmp_path), kind], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= (15 if kind == "durable" else 3)
    assert conversations(tmp_path / "data") == wanted
    assert not list((tmp_path / "data").glob("*.unfinished"))


def test_stopped_by_the_clock_it_goes_on(folder: Path, wanted: list[Row], tmp_path: Path) -> None:
    seconds, runs, finished = 0.1, 0, False
    while not finished:  # longer and longer, since nobody knows how fast this machine is
        finished = generate(small_request(folder, stop_after_s=seconds, out=tmp_path / "data")).facts.is_finished
        seconds, runs = 1.6 * seconds, runs + 1
    assert conversations(tmp_path / "data") == wanted
    assert runs > 1
    again = generate(small_request(folder, out=tmp_path / "data"))
    assert again.new_answer_tokens == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("file", ["shard-00001.tokens", "shard-00001.index", "data.json"])
def test_a_full_disk_stops_it_cleanly(folder: Path, wanted: list[Row], tmp_path: Path, file: str) -> None:
    out = tmp_path / "data"
    generate(small_request(folder, stop_after_s=1e-6, out=out))  # makes the folder
    (out / f"{file}.unfinished").symlink_to("/dev/full")
    with pytest.raises(UserError, match=rf"no space left for .*{file}: free some and run the same command again"):
        generate(small_request(folder, out=out))
    assert len(open_shards(out).facts.shards) == (0 if file == "data.json" else 1)
    generate(small_request(folder, out=out))
    assert conversations(out) == wanted


def test_nothing_shares_thirteen_words_with_an_evaluation_prompt(tmp_path: Path) -> None:
    """Given prompts and what the target writes; words by their plain meaning, not by the filter's own."""
    target = tiny_target(tmp_path / "target")
    shared = " ".join("abcdefghijklmn")  # fourteen words
    write_prompts(tmp_path / "first.jsonl", [letters(i) for i in range(20)] + [f"X Y {shared} Z"])
    evaluation = write_prompts(tmp_path / "evaluation.jsonl", [f"Q {shared.upper()}, Q"])
    request = small_request(
        tmp_path, model=target, prompts=((tmp_path / "first.jsonl", 1.0),), exclude=(evaluation,), greedy_share=0.3
    )
    generate(request)
    facts = read_facts(tmp_path / "data")
    assert facts.n_evaluation_prompts == 1
    assert [file.n_rows for file in facts.asked.excluded] == [1]
    assert not any(common_runs(text, f"Q {shared} Q") for text in texts(tmp_path / "data", target))


def test_answers_that_share_thirteen_words_are_left_out(tmp_path: Path) -> None:
    """The evaluation prompts are words that the target once wrote; with them excluded, nobody writes them."""
    tiny_target(tmp_path / "target", vocab_size=99)  # with digits and punctuation
    changes = {"max_answer_tokens": 60, "temperature_low": 1.0, "greedy_share": 0.0}
    request = small_request(tmp_path, **changes)
    change_weights(request.model, lambda head: head.mul_(0.2))  # anything may follow, so that there are many words
    generate(request)
    before = [re.findall(r"[a-z0-9]+", text.lower()) for text in texts(request.out, request.model)]
    victims = [" ".join(words[6:19]) for words in before if len(words) >= 19]  # behind the given prompt
    assert len(victims) > 3
    evaluation = write_prompts(tmp_path / "evaluation.jsonl", victims)
    generate(small_request(tmp_path, exclude=(evaluation,), out=tmp_path / "clean", **changes))
    after = texts(tmp_path / "clean", request.model)
    assert not any(common_runs(text, victim) for text in after for victim in victims)
    left_out = read_facts(tmp_path / "clean").n_left_out
    assert left_out["shares 13 words with an evaluation prompt"] >= len(victims)


def texts(folder: Path, target: Path) -> list[str]:
    tokenizer = Tokenizer(target, 99)
    return [tokenizer.decode(list(row[2])) for row in conversations(folder)]


def common_runs(first: str, second: str) -> set[str]:
    def runs(text: str) -> set[str]:
        words = re.findall(r"[a-z0-9]+", text.lower())
        return {" ".join(words[i : i + 13]) for i in range(len(words) - 12)}

    return runs(first) & runs(second)


def test_loops_are_cut_dropped_or_kept_as_asked(tmp_path: Path) -> None:
    """A target that can only say one thing, over and over."""
    request = small_request(tmp_path)
    change_weights(request.model, torch.Tensor.zero_)  # all logits alike: the lower token id wins
    long = {"max_answer_tokens": 60, "greedy_share": 1.0, "shard_draws": 8, "seats": 8}
    kept = generate(small_request(tmp_path, loops="keep", out=tmp_path / "keep", **long)).facts
    assert kept.n_answer_tokens / kept.n_conversations == 60 and kept.n_cut == 0
    cut = generate(small_request(tmp_path, loops="cut", out=tmp_path / "cut", **long)).facts
    assert cut.n_answer_tokens / cut.n_conversations == 49 and cut.n_cut == cut.n_conversations
    with pytest.raises(UserError, match=r"nothing that the target wrote could be kept \(loop: 64\)"):
        generate(small_request(tmp_path, loops="drop", out=tmp_path / "drop", **long))


def change_weights(target: Path, change: Callable[[torch.Tensor], object]) -> None:
    """Change the head of a target in place."""
    weights = load_weights(target)
    change(weights["lm_head.weight"])
    save_weights(target, weights)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompts": ()}, "no prompts: give --prompts FILE.jsonl"),
        ({"answer_tokens": 0}, "--tokens is 0"),
        ({"greedy_share": 1.5}, "--greedy-share is 1.5"),
        ({"self_prompt_share": -0.1}, "--self-prompt-share is -0.1"),
        ({"temperature_low": 1.2}, "--temperature runs from 1.2 to 1.0"),
        ({"temperature_low": float("nan")}, "--temperature runs from nan"),
        ({"seats": 0}, "--batch is 0"),
        ({"shard_draws": 0}, "--shard is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"stop_after_s": 0.0}, "--stop-after is 0.0"),
        ({"max_prompt_tokens": 250}, "beyond the target's context of 256: lower --max-prompt"),
        ({"max_prompt_tokens": 3}, "tokens stand around a turn|no usable prompt"),
        ({"seats": 10**9}, "conversations at a time need .* GiB"),
    ],
)
def test_what_is_out_of_range_is_refused(folder: Path, changes: dict, complaint: str) -> None:
    changes = {"out": folder / "refused", "on_bad_row": "skip", **changes}
    with pytest.raises(UserError, match=complaint):
        generate(small_request(folder, **changes))
    assert not (folder / "refused" / "data.json").exists() or "seats" in changes


def test_weights_without_meaning_are_refused(folder: Path) -> None:
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match=r"the weight of .*first.jsonl is"):
            generate(small_request(folder, prompts=((folder / "first.jsonl", weight),), out=folder / "refused"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda folder: {"greedy_share": 0.1}, "greedy_share"),
        (lambda folder: {"answer_tokens": 901}, "answer_tokens"),
        (lambda folder: {"prompts": ((folder / "first.jsonl", 1.0),)}, "prompts"),
    ],
)
def test_a_folder_of_another_request_is_not_gone_on_with(
    folder: Path, wanted: list[Row], change: Callable[[Path], dict], field: str
) -> None:
    with pytest.raises(UserError, match=rf"holds data of another request \({field} differ\)"):
        generate(small_request(folder, **change(folder)))
    assert conversations(folder / "data") == wanted


def test_without_a_chat_template_text_is_continued(tmp_path: Path) -> None:
    request = small_request(tmp_path, chat=False)
    generate(request)
    tokenizer = Tokenizer(request.model, 61)
    turns = [json.loads(line)["turns"][0] for line in (tmp_path / "first.jsonl").read_text().splitlines()]
    turns += [json.loads(line)["turns"][0] for line in (tmp_path / "second.jsonl").read_text().splitlines()]
    whole = [tokenizer.encode(turn) for turn in turns]
    rows = conversations(tmp_path / "data")
    given = [list(row[2][: row[3]]) for row in rows if "completed" not in row[1]]
    begun = [list(row[2][: row[3]]) for row in rows if "completed" in row[1]]
    assert given and all(prompt in whole for prompt in given)
    assert begun and all(any(ids[: len(prompt)] == prompt for ids in whole) for prompt in begun)
