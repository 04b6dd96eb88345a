"""Points of a sweep: expanded, refused, found to be the same, and put together where one server serves them."""

from __future__ import annotations

import tomllib

import pytest

from ddtree.bench.sweep.points import make_plan
from ddtree.bench.sweep.sweep_file import SweepFile, read_sweep_file
from ddtree.bench.sweep.toml_text import toml_text
from ddtree.errors import UserError

NATIVE = {
    "engine": {"kind": "native"},
    "model": {"demo": True},
    "speculation": {"algorithm": "ddtree", "budget": 16},
    "runtime": {"device": "cpu"},
    "service": {"name": "s", "supervisor": "process", "port": 8123},
}
SGLANG = {
    "engine": {"kind": "sglang", "venv": "/opt/sglang"},
    "model": {"path": "/models/t"},
    "drafter": {"path": "/models/d"},
    "speculation": {"algorithm": "ddtree", "budget": 8},
    "runtime": {"attention_backend": "triton"},
    "service": {"name": "s", "port": 8123},
}


def plan(base, tmp_path, *sweeps, per_request=True):
    file = SweepFile.model_validate(
        {
            "deployment": "d.toml",
            "per_request": per_request,
            "bench": {"workloads": ["w.jsonl"]},
            "sweep": [{"name": f"s{number}", **sweep} for number, sweep in enumerate(sweeps)],
        }
    )
    return make_plan(file, base, tmp_path)


def told(points):
    """What becomes of each point, by name."""
    found = {}
    for point in points:
        found[point.name] = "refused" if point.refused else f"as {point.same_as}" if point.same_as else "runs"
    return found


def test_keys_without_effect_make_no_second_point(tmp_path):
    found = plan(
        NATIVE, tmp_path, {"grid": {"speculation.budget": [0, 2, 8], "speculation.topk_cap": ["unset", 1, 4, 8, 64]}}
    )
    assert told(found.points) == {
        "s0: budget=0, topk_cap=unset": "runs",
        "s0: budget=0, topk_cap=1": "as s0: budget=0, topk_cap=unset",
        "s0: budget=0, topk_cap=4": "as s0: budget=0, topk_cap=unset",
        "s0: budget=0, topk_cap=8": "as s0: budget=0, topk_cap=unset",
        "s0: budget=0, topk_cap=64": "as s0: budget=0, topk_cap=unset",
        "s0: budget=2, topk_cap=unset": "runs",
        "s0: budget=2, topk_cap=1": "runs",
        "s0: budget=2, topk_cap=4": "as s0: budget=2, topk_cap=unset",
        "s0: budget=2, topk_cap=8": "as s0: budget=2, topk_cap=unset",
        "s0: budget=2, topk_cap=64": "as s0: budget=2, topk_cap=unset",
        "s0: budget=8, topk_cap=unset": "runs",
        "s0: budget=8, topk_cap=1": "runs",
        "s0: budget=8, topk_cap=4": "runs",
        "s0: budget=8, topk_cap=8": "as s0: budget=8, topk_cap=unset",
        "s0: budget=8, topk_cap=64": "as s0: budget=8, topk_cap=unset",
    }


def test_a_chain_has_no_cap_and_plain_decoding_no_window(tmp_path):
    found = plan(
        NATIVE,
        tmp_path,
        {
            "grid": {
                "speculation.algorithm": ["none", "dflash"],
                "speculation.budget": ["unset"],
                "speculation.topk_cap": [1, 4],
            }
        },
        {"grid": {"speculation.budget": [0], "speculation.draft_window": ["unset", 512]}},
    )
    assert [value for value in told(found.points).values() if value == "runs"] == ["runs"] * 2
    assert told(found.points)["s1: budget=0, draft_window=unset"].startswith("as s0: algorithm=none")


def test_a_draft_temperature_is_of_trees_alone(tmp_path):
    """Each needs a start of its own; a chain and plain decoding have none, and run once."""
    algorithms = {"speculation.algorithm": ["ddtree", "dflash", "none"], "speculation.budget": ["unset"]}
    found = plan(NATIVE, tmp_path, {"grid": algorithms | {"speculation.draft_temperature": [0.8, 1]}})
    assert told(found.points) == {
        "s0: algorithm=ddtree, budget=unset, draft_temperature=0.8": "runs",
        "s0: algorithm=ddtree, budget=unset, draft_temperature=1": "runs",
        "s0: algorithm=dflash, budget=unset, draft_temperature=0.8": "runs",
        "s0: algorithm=dflash, budget=unset, draft_temperature=1": (
            "as s0: algorithm=dflash, budget=unset, draft_temperature=0.8"
        ),
        "s0: algorithm=none, budget=unset, draft_temperature=0.8": "runs",
        "s0: algorithm=none, budget=unset, draft_temperature=1": (
            "as s0: algorithm=none, budget=unset, draft_temperature=0.8"
        ),
    }
    served = [
        (group.deployment.speculation.draft_temperature, [variant.mode for variant in group.variants])
        for group in found.groups
    ]
    assert served == [(0.8, ["ar", "tree"]), (1.0, ["server"]), (None, ["server"])]
    assert found.groups[1].shared_settings()["speculation.draft_temperature"] == 1


def test_a_tree_of_one_candidate_a_depth_has_no_draft_temperature(tmp_path):
    found = plan(
        SGLANG, tmp_path, {"grid": {"speculation.topk_cap": [1, 4], "speculation.draft_temperature": ["unset", 0.8]}}
    )
    assert told(found.points) == {
        "s0: topk_cap=1, draft_temperature=unset": "runs",
        "s0: topk_cap=1, draft_temperature=0.8": "as s0: topk_cap=1, draft_temperature=unset",
        "s0: topk_cap=4, draft_temperature=unset": "runs",
        "s0: topk_cap=4, draft_temperature=0.8": "runs",
    }


def test_a_tree_of_one_node_has_no_draft_temperature(tmp_path):
    temperatures = ["unset", 0.8]
    found = plan(
        SGLANG, tmp_path, {"grid": {"speculation.budget": [1, 8], "speculation.draft_temperature": temperatures}}
    )
    assert [group.deployment.speculation.draft_temperature for group in found.groups] == [None, None, 0.8]


def test_a_draft_temperature_of_1_is_one_point_however_it_is_written(tmp_path):
    plans = [{"grid": {"speculation.draft_temperature": [value]}} for value in (1, 1.0)]
    found = plan(SGLANG, tmp_path, *plans)
    assert list(told(found.points).values()) == ["runs", "as s0: draft_temperature=1"]
    assert found.groups[0].deployment.speculation.draft_temperature == 1.0
    refused = plan(NATIVE, tmp_path, {"grid": {"speculation.draft_temperature": [0.05, 20, "cold", True]}})
    assert set(told(refused.points).values()) == {"refused"}


def test_what_a_native_server_does_per_request_needs_one_start(tmp_path):
    found = plan(NATIVE, tmp_path, {"grid": {"speculation.budget": [0, 8, 32], "speculation.topk_cap": [1, 4]}})
    (group,) = found.groups
    assert [variant.name for variant in group.variants] == ["ar", "tree:8:1", "tree:8:4", "tree:32:1", "tree:32:4"]
    assert group.data["speculation"]["budget"] == 8 and group.shared_settings() == {}
    apart = plan(
        NATIVE,
        tmp_path,
        {"grid": {"speculation.budget": [0, 8, 32], "speculation.topk_cap": [1, 4]}},
        per_request=False,
    )
    assert len(apart.groups) == 5 and {group.variants[0].name for group in apart.groups} == {"server"}
    assert apart.groups[0].shared_settings() == {"speculation.algorithm": "none"}


def test_what_is_deployed_needs_a_start_each(tmp_path):
    found = plan(NATIVE, tmp_path, {"grid": {"speculation.draft_window": ["unset", 512], "speculation.budget": [0, 8]}})
    assert [[variant.name for variant in group.variants] for group in found.groups] == [["ar", "tree:8"], ["server"]]
    assert found.groups[1].shared_settings() == {
        "speculation.draft_window": 512,
        "speculation.algorithm": "ddtree",
        "speculation.budget": 8,
    }


def test_another_engine_is_deployed_for_every_point(tmp_path):
    found = plan(SGLANG, tmp_path, {"grid": {"speculation.budget": [0, 8, 16]}})
    assert [group.shared_settings().get("speculation.budget") for group in found.groups] == [None, 8, 16]
    assert "drafter" not in found.groups[0].data


def test_combinations_that_do_not_exist_are_points_that_are_refused(tmp_path):
    found = plan(SGLANG, tmp_path, {"grid": {"parallelism.pp": [1, 8], "speculation.budget": [0, 8]}})
    assert told(found.points)["s0: parallelism.pp=8, budget=8"] == "refused"
    refused = next(point for point in found.points if point.refused)
    assert "pp" in refused.refused and len(found.groups) == 3


@pytest.mark.parametrize(
    ("key", "complaint"),
    [("speculation.budgets", "unknown key"), ("budget", "is no key"), ("engine.kind.x", "is no key")],
)
def test_a_key_that_is_none(tmp_path, key, complaint):
    with pytest.raises(UserError, match=complaint):
        plan(NATIVE, tmp_path, {"grid": {key: [1]}})


def test_points_one_by_one(tmp_path):
    found = plan(NATIVE, tmp_path, {"points": [{"speculation.budget": 4}, {"speculation.draft_window": 256}]})
    assert list(told(found.points)) == ["s0: budget=4", "s0: draft_window=256"]
    with pytest.raises(UserError, match="twice"):
        plan(NATIVE, tmp_path, {"points": [{"speculation.budget": 4}, {"speculation.budget": 4}]})


def test_groups_keep_their_folders(tmp_path):
    grid = {"grid": {"speculation.budget": [8, 32], "speculation.draft_window": [128, 256]}}
    first, second = plan(NATIVE, tmp_path, grid), plan(NATIVE, tmp_path, grid)
    assert [g.folder for g in first.groups] == [g.folder for g in second.groups]
    assert len({g.folder for g in first.groups} | {a.folder for g in first.groups for a in g.alone()}) == 6


@pytest.mark.parametrize("data", [NATIVE, SGLANG, {"a": {"b c": {"d": ['x"\n\\', 1.5, True]}}, "runtime": {"env": {}}}])
def test_toml_is_read_back_as_it_was(data):
    assert tomllib.loads(toml_text(data)) == data


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x", "is not TOML"),
        ("deployment = 'd.toml'\nbench = {}\nsweep = []", "at least one"),
        ("deployment = 'd'\nbench = {}\n[[sweep]]\nname = 'a'\ngrid = {x = [1]}", "workloads is missing"),
        ("deployment = 'd'\nbench = {workloads = ['w']}\n[[sweep]]\nname = 'a'", "one of grid, points and search"),
        ("deployment = 'd'\nbench = {workload = ['w']}\n[[sweep]]\nname = 'a'\ngrid = {x = [1]}", "bench.workload"),
        (
            "deployment = 'd'\nbench = {workloads = ['w'], repeats = '3'}\n[[sweep]]\nname = 'a'\ngrid = {x = [1]}",
            "repeats",
        ),
        (
            "deployment = 'd'\nbench = {workloads = ['w']}\n[[sweep]]\nname = 'a'\n"
            f"grid = {{x = {list(range(200))}, y = {list(range(200))}}}",
            "40,000 points are more than 10,000",
        ),
        (
            "deployment = 'd'\nsearch = 'x'\nbench = {workloads = ['w']}\n[[sweep]]\nname = 'a'\ngrid = {x = [1]}",
            "search",
        ),
    ],
)
def test_bad_sweep_files(tmp_path, text, complaint):
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(UserError, match=complaint):
        read_sweep_file(tmp_path / "s.toml")
