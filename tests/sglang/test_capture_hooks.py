"""The hooks touch our algorithm's target passes and nothing else."""

from types import SimpleNamespace

import pytest

from ddtree.sglang.capture_hooks import is_ours, mask_in_capture, mask_in_dummy
from ddtree.sglang.refusals import why_request_refused

OURS, OTHER = SimpleNamespace(is_ddtree_plugin=True), SimpleNamespace()


TREE, CHAIN = SimpleNamespace(speculative_eagle_topk=2), SimpleNamespace(speculative_eagle_topk=1)


def runner(algorithm, draft: bool, arguments: SimpleNamespace) -> SimpleNamespace:
    model_runner = SimpleNamespace(spec_algorithm=algorithm, is_draft_worker=draft, server_args=arguments)
    return SimpleNamespace(model_runner=model_runner, buffers=SimpleNamespace(custom_mask="mask"))


@pytest.mark.parametrize(
    ("algorithm", "draft", "arguments", "mask"),
    [(OURS, False, TREE, "mask"), (OURS, False, CHAIN, None), (OURS, True, TREE, None), (OTHER, False, TREE, None)],
)
def test_only_our_targets_tree_capture_has_the_mask(algorithm, draft, arguments, mask) -> None:
    made = SimpleNamespace(custom_mask=None)
    assert mask_in_capture(made, runner(algorithm, draft, arguments), 17) is made
    assert made.custom_mask == mask
    made = SimpleNamespace(custom_mask=None)
    assert mask_in_dummy(made, algorithm, arguments, "mask", 17, draft) is made
    assert made.custom_mask == mask


def test_nothing_made_stays_nothing() -> None:
    assert mask_in_capture(None, runner(OURS, False, TREE), 17) is None
    assert mask_in_dummy(None, OURS, custom_mask="mask") is None


def test_enum_members_are_not_ours() -> None:
    assert not is_ours("DFLASH") and not is_ours(None)


def sampling(**changed) -> SimpleNamespace:
    plain = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    return SimpleNamespace(**plain | changed)


@pytest.mark.parametrize(
    ("name", "value"),
    [("frequency_penalty", 0.5), ("presence_penalty", -1.0), ("repetition_penalty", 1.1), ("min_new_tokens", 3),
     ("json_schema", "{}"), ("regex", "a+"), ("ebnf", "root ::= x"), ("structural_tag", "{}")],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused_by_name(name, value) -> None:
    assert name in (why_request_refused(sampling(**{name: value})) or "")
    assert why_request_refused(sampling()) is None
