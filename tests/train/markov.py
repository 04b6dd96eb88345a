"""A tiny target whose text follows a rule, made in an instant: each token has its one likely successor."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ddtree import Engine, SamplingParams
from ddtree.train.data_facts import DataAsked, DataFacts, ShardFacts, identify_target
from ddtree.train.shards import Conversation, ShardWriter
from tiny_models import load_weights, make_target, save_weights

VOCAB, FIRST, HIDDEN = 61, 4, 32
SHARPNESS = 3.0
PROMPT_CHARACTERS = "abcdefghijklmnopqrstuvwxyz"


def successors(seed: int = 0) -> list[int]:
    """The token after each: a rule without repetition over all tokens but the special ones."""
    order = (torch.randperm(VOCAB - FIRST, generator=torch.Generator().manual_seed(seed)) + FIRST).tolist()
    after = list(range(VOCAB))
    for token, following in zip(order, [*order[1:], order[0]], strict=True):
        after[token] = following
    return after


def make_markov_target(folder: Path) -> Path:
    """A Llama whose layers add nothing, so that the head sees the last token alone, and prefers its successor."""
    make_target(folder, "llama", hidden_size=HIDDEN, num_hidden_layers=4)
    weights = load_weights(folder)
    draw = torch.Generator().manual_seed(1)
    table = torch.randn(VOCAB, HIDDEN, generator=draw)
    head = torch.zeros_like(table)
    for token, following in enumerate(successors()):
        head[following] = SHARPNESS * table[token] / table[token].norm()
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1.0)
    save_weights(folder, {**weights, "model.embed_tokens.weight": table, "lm_head.weight": head})
    # The bare text, so that its last letter decides where in the rule an answer begins.
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return folder


def write_prompts(path: Path, count: int, seed: int) -> Path:
    """JSON Lines of short random words."""
    draw = torch.Generator().manual_seed(seed)
    lines = []
    for _ in range(count):
        letters = torch.randint(0, len(PROMPT_CHARACTERS), (5,), generator=draw).tolist()
        lines.append(json.dumps({"turns": ["".join(PROMPT_CHARACTERS[letter] for letter in letters)]}))
    path.write_text("\n".join(lines) + "\n")
    return path


def make_data(folder: Path, target: Path, *, count: int = 96, answer_tokens: int = 40, seed: int = 0) -> Path:
    """Conversations whose answers the real engine wrote."""
    prompts = [
        [{"role": "user", "content": json.loads(line)["turns"][0]}]
        for line in write_prompts(folder.with_suffix(".jsonl"), count, seed).read_text().splitlines()
    ]
    engine = Engine.load(target, dtype="float32", max_batch=32)
    encoded = [engine.tokenizer.encode_chat(prompt) for prompt in prompts]
    answers = engine.generate(encoded, SamplingParams(max_new_tokens=answer_tokens))
    conversations = [
        Conversation(draw=i, source=0, tokens=[*prompt, *answer.token_ids], answer_start=len(prompt), is_greedy=True)
        for i, (prompt, answer) in enumerate(zip(encoded, answers, strict=True))
    ]
    asked = DataAsked(
        prompts=[], excluded=[], answer_tokens=count * answer_tokens, greedy_share=1.0, self_prompt_share=0.0,
        temperature_low=1.0, temperature_high=1.0, max_prompt_tokens=20, max_answer_tokens=answer_tokens,
        shard_draws=count, seed=seed, dtype="float32",
    )  # fmt: skip
    writer = ShardWriter(folder, DataFacts(target=identify_target(target), asked=asked, sources=["words"]))
    writer.add(
        conversations,
        ShardFacts(
            n_draws=count, n_conversations=count, n_greedy=count,
            n_tokens=sum(len(c.tokens) for c in conversations),
            n_answer_tokens=sum(len(c.tokens) - c.answer_start for c in conversations),
            n_by_source={"words": count}, n_left_out={},
        ),
    )  # fmt: skip
    writer.finish()
    return folder
