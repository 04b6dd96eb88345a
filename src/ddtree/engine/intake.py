"""How a request becomes a sequence, or is refused."""

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ddtree.engine.prompt import Prompt, checked_ids, encode_prompt
from ddtree.engine.runner import Runner
from ddtree.engine.sampling_params import MAX_SEED, SamplingParams
from ddtree.engine.sequence import Sequence
from ddtree.engine.speculation import DraftShape, Speculation
from ddtree.errors import UserError
from ddtree.kernels.exact_set import cost_of
from ddtree.models.target import Target
from ddtree.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Intake:
    """Takes requests in: holds them against what the model and the engine can do.

    Attributes:
        block_size: of the drafter; None where there is none.
        max_model_len: a sequence has at most so many tokens, prompt and answer together.
    """

    target: Target
    tokenizer: Tokenizer
    block_size: int | None
    max_model_len: int

    def shape(self, speculation: Speculation, runner: Runner) -> tuple[DraftShape, str]:
        """How rounds will draft, and why otherwise than asked, if so.

        Raises:
            UserError: the drafter cannot draft so, or there is none.
        """
        return runner.fit(speculation.resolve(self.block_size))

    def sequence(
        self, prompt: Prompt, params: SamplingParams, speculation: Speculation, runner: Runner, record_trees: bool
    ) -> Sequence:
        """A sequence that answers ``prompt``, not queued yet.

        Raises:
            UserError: the prompt is empty or too long, or the request cannot be served.
        """
        config = self.target.config
        ids = encode_prompt(prompt, self.tokenizer, config.vocab_size)
        if len(ids) >= self.max_model_len:
            raise UserError(
                f"the prompt has {len(ids)} tokens, the context {self.max_model_len}",
                "shorten it, or raise max_model_len",
            )
        if unknown := [token for token in params.logit_bias if token >= config.vocab_size]:
            raise UserError(f"logit_bias names token {unknown[0]}", f"give ids from 0 to {config.vocab_size - 1}")
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= set(config.eos_token_ids)
        shape, note = self.shape(speculation, runner)
        cost = cost_of(self.target.kernels)
        return Sequence(
            prompt=ids,
            params=params,
            seed=secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed,
            end_token_ids=frozenset(ends),
            token_limit=min(len(ids) + params.max_new_tokens, self.max_model_len),
            shape=shape,
            notes=[text for text in (note, cost and f"exact mode: {cost}") if text],
            tokenizer=self.tokenizer,
            vocab_size=config.vocab_size,
            record_trees=record_trees,
        )

    def answered(self, prompt: Prompt, token_ids: Seq[int]) -> tuple[list[int], list[int]]:
        """Token ids of a prompt and of an answer that was given to it.

        Raises:
            UserError: one of them is empty or holds what is no token, or they do not fit the context.
        """
        vocab_size = self.target.config.vocab_size
        ids = encode_prompt(prompt, self.tokenizer, vocab_size)
        answer = checked_ids(token_ids, vocab_size, "answer")
        if len(ids) + len(answer) > self.max_model_len:
            raise UserError(
                f"prompt and answer have {len(ids) + len(answer)} tokens, the context {self.max_model_len}",
                "raise max_model_len",
            )
        return ids, answer
