"""Adapters of SGLang and vLLM on pages in the shape that these engines document; recordings of real ones are in
`test_recorded_pages.py`."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager

import pytest
from between import serving

from ddtree.verify import Expectation, Options, Verification
from ddtree.verify.answer import Order
from ddtree.verify.effective import Counters
from ddtree.verify.engines import NotOffered, detect
from ddtree.verify.exposition import Exposition
from ddtree.verify.http_client import CheckFailed, Garbled, HttpClient, KeyRefused
from ddtree.verify.probes.settings import same
from ddtree.verify.session import lines_since

MODELS = {"object": "list", "data": [{"id": "m", "root": "/models/m", "max_model_len": 4096, "parent": None}]}
SGLANG_ARGS = {
    "model_path": "/models/kimi",
    "served_model_name": "kimi",
    "speculative_algorithm": "DDTREE",
    "speculative_num_draft_tokens": 9,
    "speculative_dflash_block_size": 8,
    "speculative_draft_window_size": 2048,
    "speculative_draft_model_path": "/models/drafter",
    "attention_backend": "triton",
    "disable_cuda_graph": False,
    "enable_nccl_nvls": True,
    "mem_fraction_static": 0.85,
    "tp_size": 8,
    "ep_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "context_length": None,
    "random_seed": 4711,
    "device": "cuda",
    "dtype": "auto",
}
SGLANG_METRICS = """\
# HELP sglang:spec_verify_calls_total Number of speculative decoding verification calls.
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{model_name="kimi",tp_rank="0"} 120.0
sglang:generation_tokens_total{model_name="kimi"} 500.0
sglang:prompt_tokens_total{model_name="kimi"} 900.0
sglang:cuda_graph_passes_total{mode="decode_cuda_graph",model_name="kimi"} 118.0
sglang:cuda_graph_passes_total{mode="decode_none",model_name="kimi"} 2.0
sglang:cuda_graph_passes_total{mode="prefill_none",model_name="kimi"} 7.0
"""
VLLM_METRICS = """\
process_start_time_seconds 1.79598e+09
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 120.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 60.0
vllm:generation_tokens_total{engine="0",model_name="m"} 101.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 7.0
"""


@contextmanager
def engine(pages, answers=None):
    """A server of fixed pages, and the adapter that finds itself in front of it."""

    def answer(method, path, body, headers):
        if method == "POST":
            return (answers or {}).get(path, lambda asked: (404, {"error": "no such path"}))(json.loads(body))
        return (200, pages[path]) if path in pages else (404, {"error": "no such page"})

    def as_bytes(*given):
        status, content = answer(*given)
        return status, content.encode() if isinstance(content, str) else json.dumps(content).encode()

    with serving(as_bytes) as url:
        http = HttpClient(url)
        yield detect(http, None, None, 5, 5)
        http.close()


def sglang_pages(metrics=SGLANG_METRICS, state=None, **args):
    state = {"effective_max_running_requests_per_dp": 48, "avg_spec_accept_length": 3.1} | (state or {})
    info = SGLANG_ARGS | args | {"version": "0.5.16", "internal_states": [SGLANG_ARGS | args | state]}
    pages = {"/v1/models": {"data": [{"id": "kimi"}]}, "/server_info": info}
    return pages | ({"/metrics": metrics} if metrics else {})


def test_sglang_settings():
    with engine(sglang_pages()) as adapter:
        found = adapter.effective()
    assert adapter.engine == "sglang" and adapter.model_name == "kimi"
    assert found.settings == {
        "algorithm": "ddtree", "budget": 8, "block_size": 8, "draft_window": 2048, "model": "/models/kimi",
        "drafter": "/models/drafter", "attention_backend": "triton", "nvls": True, "memory_fraction": 0.85, "tp": 8,
        "ep": 1, "pp": 1, "dp": 1, "dtype": "auto", "max_running_requests": 48, "cuda_graphs": True,
        "device": "cuda",
    }  # fmt: skip
    assert found.identity == {"random_seed": "4711"} and found.version == "0.5.16"


def test_sglang_tells_what_the_scheduler_resolved():
    with engine(
        sglang_pages(
            state={
                "speculative_draft_window_size": None,
                "speculative_ddtree_topk_cap": 4,
                "speculative_ddtree_draft_temperature": 0.8,
            }
        )
    ) as adapter:
        found = adapter.effective().settings
    assert found["draft_window"] is None and found["top_k_cap"] == 4 and found["draft_temperature"] == 0.8


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"disable_cuda_graph": True}, False),
        ({"cuda_graph_config": {"decode": {"backend": "disabled"}, "prefill": {"backend": "breakable"}}}, False),
        ({"cuda_graph_config": {"decode": {"backend": "full"}, "prefill": {"backend": "disabled"}}}, True),
        ({"cuda_graph_config": {"decode": {"backend": "full"}}, "disable_cuda_graph": True}, False),
        ({"cuda_graph_config": None}, True),
    ],
)
def test_sglang_tells_by_two_keys_whether_decoding_replays_graphs(told, expected):
    """`--cuda-graph-backend-decode disabled` leaves `disable_cuda_graph` at false in 0.5.16."""
    with engine(sglang_pages(**told)) as adapter:
        assert adapter.effective().settings["cuda_graphs"] is expected


def test_sglang_without_speculation():
    of_drafts = {"speculative_num_draft_tokens": None, "speculative_ddtree_draft_temperature": 0.8}
    with engine(sglang_pages(speculative_algorithm=None, **of_drafts)) as adapter:
        found = adapter.effective().settings
    absent = {"budget", "block_size", "draft_window", "draft_temperature"}
    assert found["algorithm"] == "none" and not absent & found.keys()


def test_sglang_counters_and_their_absence():
    with engine(sglang_pages()) as adapter:
        assert adapter.counters() == Counters(
            verify_calls=120, completion_tokens=500, prompt_tokens=900, graph_replays=118, eager_passes=2
        )
    with engine(sglang_pages(metrics="sglang:generation_tokens_total 5.0\n")) as adapter:
        assert adapter.counters().verify_calls == 0, "the counter has no sample before the first call"
    with engine(sglang_pages(metrics=None)) as adapter:
        assert adapter.counters() == Counters()


@pytest.mark.parametrize(
    "names", [("spec_num_correct_drafts", "spec_num_proposed_drafts"), ("spec_accepted_drafts", "spec_proposed_drafts")]
)
def test_sglang_rounds_of_a_response(names):
    meta = {"prompt_tokens": 5, "completion_tokens": 12, "spec_verify_ct": 4, names[0]: 8, names[1]: 32}
    answers = {
        "/generate": lambda asked: (200, {"text": "x", "output_ids": [1] * 12, "meta_info": meta}),
        "/v1/chat/completions": lambda asked: (
            200,
            {
                "choices": [{"message": {"content": "x"}, "meta_info": meta if asked["return_meta_info"] else None}],
                "usage": {"prompt_tokens": 5, "completion_tokens": 12},
            },
        ),
    }
    with engine(sglang_pages(), answers) as adapter:
        for order in (Order("hello", 12), Order("hello", 12, is_chat=True)):
            rounds = adapter.answer(order).rounds
            assert (rounds.count, rounds.committed, rounds.budgets) == (4, 12, (8.0,))


def test_sglang_near_tie_gate():
    def generate(asked):
        assert asked["input_ids"] == [7, 8, 1, 2, 3] and asked["logprob_start_len"] == 1
        meta = {
            "input_token_logprobs": [[None, 8, None], [-0.1, 1, None], [-2.0, 2, None], [-0.7, 3, None]],
            "input_top_logprobs": [None, [[-0.1, 1, None]], [[-0.2, 9, None]], [[-0.7, 3, None]]],
        }
        return 200, {"text": "", "output_ids": [0], "meta_info": meta}

    from ddtree.verify.answer import Answer

    with engine(sglang_pages(), {"/generate": generate}) as adapter:
        forced = adapter.force((7, 8), Answer("", 2, 3, 0.1, token_ids=(1, 2, 3)))
    assert forced.tokens == 3 and [each.index for each in forced.divergences] == [1]
    assert forced.divergences[0].gap == pytest.approx(1.8) and forced.divergences[0].is_fault(0.5)
    refusal = {"error": {"message": "DFLASH speculative decoding does not support return_logprob yet."}}
    with (
        engine(sglang_pages(), {"/generate": lambda asked: (400, refusal)}) as adapter,
        pytest.raises(NotOffered, match="does not support return_logprob"),
    ):
        adapter.force((7, 8), Answer("", 2, 3, 0.1, token_ids=(1, 2, 3)))


def vllm_pages(metrics=VLLM_METRICS):
    return {"/v1/models": MODELS, "/version": {"version": "0.32.0"}, "/metrics": metrics}


def test_vllm():
    with engine(vllm_pages()) as adapter:
        found = adapter.effective()
        counters = adapter.counters()
    assert adapter.engine == "vllm" and found.version == "0.32.0"
    assert found.settings == {"context_length": 4096, "model": "/models/m"}
    assert found.identity == {"process_start_time_seconds": "1795980000.00"}
    assert (counters.verify_calls, counters.proposed, counters.accepted) == (40, 120, 60)


def test_vllm_without_speculation():
    with engine(vllm_pages("vllm:generation_tokens_total 1.0\n")) as adapter:
        assert adapter.effective().settings["algorithm"] == "none" and adapter.counters().verify_calls == 0


def test_vllm_near_tie_gate():
    from ddtree.verify.answer import Answer

    def completions(asked):
        assert asked["prompt"] == [7, 8, 1, 2] and asked["prompt_logprobs"] == 1
        entries = [
            None,
            {"8": {"logprob": -1.0, "rank": 1}},
            {"1": {"logprob": -0.3, "rank": 1}},
            {"2": {"logprob": -0.9, "rank": 2}, "5": {"logprob": -0.7, "rank": 1}},
        ]
        return 200, {"choices": [{"text": "", "prompt_logprobs": entries}]}

    with engine(vllm_pages(), {"/v1/completions": completions}) as adapter:
        forced = adapter.force((7, 8), Answer("", 2, 2, 0.1, token_ids=(1, 2)))
    assert forced.tokens == 2 and forced.divergences[0].gap == pytest.approx(0.2)
    assert not forced.divergences[0].is_fault(0.5) and forced.histogram() == "0.1-0.25: 1"


@pytest.mark.parametrize(
    ("pages", "kind"),
    [
        ({"/v1/models": {"data": []}}, Garbled),
        ({"/v1/models": MODELS}, Garbled),
        ({"/v1/models": MODELS, "/server_info": "no json"}, Garbled),
        ({"/v1/models": "[]"}, Garbled),
    ],
)
def test_pages_that_are_none(pages, kind):
    with pytest.raises(kind), engine(pages):
        pass


def test_a_key_that_is_refused():
    def answer(method, path, body, headers):
        return (200, b"{}") if headers.get("Authorization") == "Bearer right" else (403, b"")

    with serving(answer) as url:
        with pytest.raises(KeyRefused):
            HttpClient(url, "wrong").get_json("/x", 5)
        assert HttpClient(url, "right").get_json("/x", 5) == {}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"text": "x"}], "usage": {}},
        {"choices": [{"text": "x"}], "usage": {"prompt_tokens": "x", "completion_tokens": 1}},
        {"choices": "x", "usage": {}},
        {"choices": [{"text": "x"}], "usage": {"prompt_tokens": float("inf"), "completion_tokens": 1}},
        {"choices": ["x"], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        [],
    ],
)
def test_answers_that_are_none(answer):
    answers = {"/v1/completions": lambda asked: (200, answer)}
    with engine(vllm_pages(), answers) as adapter, pytest.raises(CheckFailed):
        adapter.answer(Order("x", 3))


def test_pages_too_deep_to_read():
    with serving(lambda method, path, body, headers: (200, b"[" * 100_000)) as url:
        http = HttpClient(url)
        with pytest.raises(CheckFailed, match="did not answer with JSON"):
            http.get_json("/x", 5)
        http.close()


def test_an_error_that_drips():
    began = time.monotonic()
    with (
        serving(lambda method, path, body, headers: (500, b"x" * 1000), drip_s=0.05) as url,
        pytest.raises(CheckFailed, match="answered 500"),
    ):
        HttpClient(url).get_json("/x", 0.5)
    assert time.monotonic() - began < 5


def test_a_hub_name_stands_for_its_snapshot_alone():
    assert same("model", "a/b", "/hub/models--a--b/snapshots/0")
    assert not same("model", "a/b", "/hub/models--a--b-other/snapshots/0")


def test_only_what_a_log_grew_by_is_evidence():
    assert lines_since("", "a\n") == "a\n" and lines_since("a\n", "a\nb\n") == "b\n"
    assert lines_since("a\n", "a\n") == "" and lines_since("of another file\n", "b\n") == ""


@pytest.mark.parametrize("width", ["x", float("inf"), [1]])
def test_a_page_of_another_shape_is_no_crash(width):
    info = SGLANG_ARGS | {"speculative_num_draft_tokens": width}
    pages = {"/v1/models": MODELS, "/server_info": info}
    with serving(lambda method, path, body, headers: (200, json.dumps(pages.get(path, {})).encode())) as url:
        verdict = Verification(url, Expectation(), Options(baseline=False)).run()
    assert verdict.exit_code == 3 and "not the shape" in verdict.findings[0].evidence[0]


def test_expositions():
    told = Exposition('a{x="1",y="q\\"}"} 2\na{x="2"} 3 1700000000\na_total 1e3\nb NaN\n# TYPE a gauge\nrubbish\n')
    assert told.total("a") == 5 and told.total("a", x="2") == 3 and told.total("a_total") == 1000
    assert told.total("b") is None and told.total("c") is None and told.by_label("a", "x") == {"1": 2, "2": 3}
    assert not Exposition("") and told.has("a_")
