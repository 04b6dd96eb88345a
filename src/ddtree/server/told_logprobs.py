"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence
from typing import Any

from ddtree.engine import TokenLogprob
from ddtree.models.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, told: Sequence[TokenLogprob]) -> dict[str, Any]:
    """As in chat completions. ``bytes`` is null where a token holds only a part of a character."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        is_whole = "\ufffd" not in text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8")) if is_whole else None}

    content = [
        entry(token.token_id, token.logprob) | {"top_logprobs": [entry(*other) for other in token.top]}
        for token in told
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, told: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """As in text completions.

    Args:
        offset: where the first token's text stands in the answer.
    """
    tokens = [tokenizer.token_text(token.token_id) for token in told]
    offsets = [offset]
    for text in tokens:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": tokens,
        "token_logprobs": [token.logprob for token in told],
        "top_logprobs": [{tokenizer.token_text(other): value for other, value in token.top} for token in told],
        "text_offset": offsets[:-1],
    }
