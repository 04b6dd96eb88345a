"""The hooks touch our algorithm's target passes and nothing else."""

from types import SimpleNamespace

import pytest

from ddtree.sglang.hooks import is_ours, mask_in_capture, mask_in_dummy, tell_shape
from ddtree.sglang.refusals import GRAMMAR_NODES, why_request_refused
from ddtree.sglang.settings import RESOLVED_VARIABLE, TreeSettings

OURS, OTHER = SimpleNamespace(is_ddtree_plugin=True), SimpleNamespace()


def runner(algorithm, draft: bool) -> SimpleNamespace:
    model_runner = SimpleNamespace(spec_algorithm=algorithm, is_draft_worker=draft)
    return SimpleNamespace(model_runner=model_runner, buffers=SimpleNamespace(custom_mask="mask"))


@pytest.fixture
def resolved(monkeypatch):
    """Leaves the shape of a server where its ranks find it."""

    def leave(topk_cap: int, budget: int = 16) -> None:
        monkeypatch.setenv(RESOLVED_VARIABLE, "")
        TreeSettings(budget, topk_cap, 16, 0.7).to_environment()

    return leave


@pytest.mark.parametrize("server_args", [[], ["server arguments"]])  # given up to 0.5.17
@pytest.mark.parametrize(
    ("algorithm", "draft", "topk_cap", "mask"),
    [(OURS, False, 8, "mask"), (OURS, False, 1, None), (OURS, True, 8, None), (OTHER, False, 8, None)],
)
def test_only_our_targets_tree_capture_has_the_mask(resolved, algorithm, draft, topk_cap, mask, server_args) -> None:
    resolved(topk_cap)
    made = SimpleNamespace(custom_mask=None)
    assert mask_in_capture(made, runner(algorithm, draft), 17) is made
    assert made.custom_mask == mask
    made = SimpleNamespace(custom_mask=None)
    assert mask_in_dummy(made, algorithm, *server_args, "mask", 17, draft) is made
    assert made.custom_mask == mask
    named = {"custom_mask": "mask", "num_tokens_per_req": 17, "is_draft_worker": draft}
    made = SimpleNamespace(custom_mask=None)
    assert mask_in_dummy(made, algorithm, **named) is made
    assert made.custom_mask == mask


def test_nothing_made_stays_nothing(resolved) -> None:
    resolved(8)
    assert mask_in_capture(None, runner(OURS, False), 17) is None
    assert mask_in_dummy(None, OURS, "mask", 17, False) is None


SHAPE = {"budget": 16, "topk_cap": 8, "draft_temperature": 0.7}


@pytest.mark.parametrize(("algorithm", "told"), [(OURS, SHAPE), (OTHER, {})])
def test_only_our_server_tells_of_trees(resolved, algorithm, told) -> None:
    resolved(8)
    state: dict = {}
    tell_shape(None, SimpleNamespace(scheduler=SimpleNamespace(spec_algorithm=algorithm)), state)
    assert state == {f"speculative_ddtree_{name}": value for name, value in told.items()}


def test_enum_members_are_not_ours() -> None:
    assert not is_ours("DFLASH") and not is_ours(None)


def request(logprob: bool = False, **changed) -> SimpleNamespace:
    plain = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    return SimpleNamespace(sampling_params=SimpleNamespace(**plain | changed), return_logprob=logprob)


@pytest.mark.parametrize(
    ("name", "value"),
    [("frequency_penalty", 0.5), ("presence_penalty", -1.0), ("repetition_penalty", 1.1), ("min_new_tokens", 3)],
)
def test_what_cannot_be_exact_is_refused_by_name(name, value) -> None:
    assert name in (why_request_refused(request(**{name: value}), 32) or "")
    assert why_request_refused(request(), 32) is None


def test_logprobs_are_refused_where_sglang_itself_would_give_them_for_chains() -> None:
    assert "return_logprob" in (why_request_refused(request(logprob=True), 32) or "")


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_grammars_are_refused_only_over_trees_too_wide_for_their_walk(name) -> None:
    assert why_request_refused(request(**{name: "x"}), GRAMMAR_NODES) is None
    told = why_request_refused(request(**{name: "x"}), GRAMMAR_NODES + 1) or ""
    assert name in told and f"--speculative-ddtree-budget {GRAMMAR_NODES}" in told
