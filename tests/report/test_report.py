"""Reports: the numbers of the rows, in text that stays text, in one file that loads nothing, and judged fairly."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from bench.made_rows import write_run
from ddtree.bench.sweep.store import PointRow, append_point
from ddtree.cli.main import run
from ddtree.errors import UserError
from ddtree.report import budget_figures
from ddtree.report.compare import compare, is_regression
from ddtree.report.drawing import finished
from ddtree.report.recommend import recommend
from ddtree.report.results import read_results
from ddtree.report.roofline import Machine, known_bandwidth, shares
from ddtree.report.write import ReportOptions, write_report


def matrix(ar=50.0, tree=100.0, large=101.0, **more):
    """Three configurations in two places each."""
    cells = {}
    for concurrency, load in ((1, 1.0), (4, 2.0)):
        cells["w", None, concurrency, "ar"] = {"tok_s": ar, "total_tok_s": ar * load, **more}
        cells["w", None, concurrency, "tree:8"] = {"tok_s": tree, "total_tok_s": tree * load, "tau": 4.0, **more}
        cells["w", None, concurrency, "tree:32"] = {"tok_s": large, "total_tok_s": large * load, "tau": 5.0, **more}
    return cells


def report(tmp_path, *folders, with_plots=False, **options):
    return write_report(ReportOptions(folders=folders, out=tmp_path / "report", with_plots=with_plots, **options))


class Page(HTMLParser):
    """What a page loads, its tags and its text."""

    def __init__(self):
        super().__init__()
        self.loads, self.tags, self.text, self.ids = [], [], "", []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.loads += [found[name] for name in ("src", "data", "xlink:href", "href") if name in found]

    def handle_data(self, data):
        self.text += data


def read_page(path):
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def test_two_engines_are_told_apart(tmp_path):
    """A tree of 8 of one engine is not that of another, and neither replaces the other."""
    ours = write_run(tmp_path / "ours", matrix(tree=200.0))
    theirs = write_run(tmp_path / "theirs", matrix(tree=100.0), engine="sglang")
    results = read_results([ours, theirs])
    speeds = {
        (each.configuration.name, each.numbers.key.concurrency): round(each.numbers.user_tok_s.value)
        for each in results.measurements
    }
    assert speeds["tree 8, engine native", 1] == 200 and speeds["tree 8, engine sglang", 1] == 100
    assert len(speeds) == 12 and not results.twice
    assert {each.name for each in read_results([ours]).configurations} == {"ar", "tree 8", "tree 32"}


def test_numbers_of_the_rows_are_in_the_report(tmp_path):
    folder = write_run(tmp_path / "run", matrix())
    text = report(tmp_path, folder).markdown.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| tree 32 | 101")]
    assert len(rows) == 2 and "| 5.00 [5.00, 5.00] | 0/20 |" in rows[0]
    assert re.search(r"\| 202 \[20\d, 20\d\] \|", rows[1])
    assert "$ ddtree bench --workload 'w w.jsonl'\n" in text, "the command is not as it must be typed"


def test_the_page_is_one_file_that_loads_nothing(tmp_path):
    cells = matrix() | {("w", 512, c, v): {} for c in (1, 4) for v in ("ar", "tree:8", "tree:32")}
    written = report(tmp_path, write_run(tmp_path / "run", cells), with_plots=True)
    page = read_page(written.html)
    assert (
        page.tags.count("svg") >= 6 and "img" not in page.tags and "script" not in page.tags and "link" not in page.tags
    )
    assert [load for load in page.loads if not load.startswith("#")] == []
    assert len(page.ids) == len(set(page.ids)), "two drawings share an id"
    used = {load[1:] for load in page.loads} | set(re.findall(r"url\(#([^)]+)\)", written.html.read_text()))
    assert used <= set(page.ids)


def test_every_plot_is_sound_and_linked(tmp_path):
    cells = matrix() | {("w", 512, c, v): {"tau": 3.0} for c in (1, 4) for v in ("ar", "tree:8", "tree:32")}
    written = report(tmp_path, write_run(tmp_path / "run", cells), with_plots=True)
    linked = set(re.findall(r"\(figures/([^)]+)\)", written.markdown.read_text()))
    files = {path.name for path in (tmp_path / "report" / "figures").iterdir()}
    assert linked == files
    names = " ".join(sorted(files))
    for kind in ("speed-w", "user-speed-by-budget", "tau-by-budget", "tau-by-context", "pareto", "accepted", "matrix"):
        assert kind in names
    for path in (tmp_path / "report" / "figures").iterdir():
        ElementTree.fromstring(path.read_text())


def test_no_whisker_is_cut_off(tmp_path, monkeypatch):
    """Panels share a scale, which must hold the last one's values too."""
    seen = []
    monkeypatch.setattr(
        budget_figures, "finished", lambda canvas, *words: seen.append(canvas) or finished(canvas, *words)
    )
    cells = {("w", None, c, f"tree:{b}"): {"tok_s": c * b, "tau": float(c)} for c in (1, 4) for b in (8, 32)}
    report(tmp_path, write_run(tmp_path / "run", cells), with_plots=True)
    assert len(seen) == 2
    for canvas, most in zip(seen, (128, 4), strict=True):
        for axes in canvas.axes:
            assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > most


def test_words_of_others_stay_text(tmp_path):
    name = "w|<b>x</b>![](http://example.org/tracker.png)"
    folder = write_run(tmp_path / "run", {(name, None, 1, "ar"): {}}, label="<script>alert(1)</script>")
    written = report(tmp_path, folder, title="<script>alert(1)</script>")
    page = read_page(written.html)
    assert "script" not in page.tags and "b" not in page.tags and "img" not in page.tags
    assert "<script>" in page.text


def test_the_same_results_give_the_same_report(tmp_path):
    folder = write_run(tmp_path / "run", matrix())
    first = report(tmp_path, folder, with_plots=True).html.read_bytes()
    assert report(tmp_path, folder, with_plots=True).html.read_bytes() == first


def test_the_smallest_of_those_that_are_as_good_is_recommended(tmp_path):
    found = recommend(read_results([write_run(tmp_path / "run", matrix())]))[0]
    assert found.configuration.name == "tree 8"
    assert "within 2% of the best are tree 32 too" in found.reason and "2.00 to 2.00 times" in found.reason


def test_the_best_is_recommended_where_it_is_clearly_better(tmp_path):
    found = recommend(read_results([write_run(tmp_path / "run", matrix(large=120.0))]))[0]
    assert found.configuration.name == "tree 32"
    assert [standing.configuration.name for standing in found.standings] == ["tree 32", "tree 8", "ar"]
    assert found.standings[-1].score == pytest.approx(50 / 120)


def test_errors_keep_a_configuration_from_being_recommended(tmp_path):
    cells = matrix(large=150.0)
    cells["w", None, 4, "tree:32"]["errors"] = 1
    found = recommend(read_results([write_run(tmp_path / "run", cells)]))[0]
    assert found.configuration.name == "tree 8"
    assert found.left_out[0][0] == "tree 32" and "20.0% errors" in found.left_out[0][1]


def test_places_that_not_all_were_measured_in_are_judged_apart(tmp_path):
    cells = matrix() | {
        ("w", 2048, 1, "tree:16"): {"total_tok_s": 500.0},
        ("w", 2048, 1, "tree:64"): {"total_tok_s": 9.0},
    }
    first, second = recommend(read_results([write_run(tmp_path / "run", cells)]))
    assert first.configuration.name == "tree 8" and second.configuration.name == "tree 16"


@pytest.mark.parametrize(
    ("factor", "judgement", "fails"),
    [
        (1.0, {"same"}, False),
        (0.98, {"same"}, False),
        (0.8, {"same", "regression"}, True),
        (1.3, {"same", "better"}, False),
    ],
)
def test_a_loss_beyond_the_threshold_is_a_regression(tmp_path, factor, judgement, fails):
    old = read_results([write_run(tmp_path / "old", matrix())])
    new = read_results([write_run(tmp_path / "new", matrix(tree=100.0 * factor))])
    changes = compare(old, new, 0.05)
    assert {change.judgement for change in changes} == judgement and is_regression(changes) is fails
    worse = [change for change in changes if change.judgement == "regression"]
    assert all(change.configuration == "tree 8" for change in worse)


def test_more_time_to_the_first_token_is_worse(tmp_path):
    old = read_results([write_run(tmp_path / "old", matrix())])
    new = read_results([write_run(tmp_path / "new", matrix(ttft_ms=130.0))])
    assert {c.quantity for c in compare(old, new, 0.05) if c.judgement == "regression"} == {"ttft_ms"}


def test_what_is_lost_or_fails_is_a_regression(tmp_path):
    old = read_results([write_run(tmp_path / "old", matrix())])
    fewer = {cell: given for cell, given in matrix().items() if cell[3] != "tree:8"}
    lost = compare(old, read_results([write_run(tmp_path / "fewer", fewer)]), 0.05)
    assert [c.judgement for c in lost if c.configuration == "tree 8"] == ["lost", "lost"]
    failing = compare(old, read_results([write_run(tmp_path / "failing", matrix(errors=2))]), 0.05)
    assert {c.quantity for c in failing if c.judgement == "regression"} == {"errors"}


def test_the_check_on_the_command_line(tmp_path, capsys):
    old, new = write_run(tmp_path / "old", matrix()), write_run(tmp_path / "new", matrix(ar=30.0))

    def told(*arguments):
        code = run(["report", *map(str, arguments), "--no-plots"])
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    code, out, _ = told(new, "--baseline", old)
    assert code == 1 and "regression: user_tok_s of ar" in out
    assert "**4 regressions** beyond 5%" in (new / "report" / "findings.md").read_text()
    code, out, _ = told(old, "--baseline", old)
    assert code == 0 and "no regression beyond 5%" in out
    for bad in ((tmp_path / "none",), (old, "--threshold", "2"), (old, "--drafter-gb", "1")):
        code, _, complaint = told(*bad)
        assert code == 2 and complaint.count("\n") == 1


def add_point(sweep, folder, variant, *, status, reason=""):
    row = PointRow(
        sweep_id="s",
        point=f"budget: {variant}",
        settings={},
        status=status,
        reason=reason,
        folder=folder,
        variant=variant,
        finished_at=1.0,
        duration_s=1.0,
    )
    append_point(sweep, row)


def test_points_that_do_not_count(tmp_path):
    """Of a sweep, only points that were measured are among the numbers; the others are told with their reason."""
    sweep = tmp_path / "sweep"
    folder = write_run(sweep / "points" / "a", matrix())
    write_run(sweep / "points" / "given-up", matrix(ar=9999.0))
    (sweep / "sweep.json").write_text("{}")
    for variant, status, reason in (
        ("ar", "measured", ""),
        ("tree:8", "measured", ""),
        ("tree:32", "invalid", "tau is 1.0"),
    ):
        add_point(sweep, str(folder.relative_to(sweep)), variant, status=status, reason=reason)
    results = read_results([sweep])
    assert {each.configuration.name for each in results.measurements} == {"ar", "tree 8"}
    text = report(tmp_path, sweep).markdown.read_text()
    assert "| budget: tree:32 | invalid | tau is 1.0 |" in text and "tree 32" not in text and "9999" not in text


def test_a_point_given_by_its_own_folder_still_does_not_count(tmp_path):
    sweep = tmp_path / "sweep"
    folder = write_run(sweep / "points" / "a", matrix())
    (sweep / "sweep.json").write_text("{}")
    add_point(sweep, "points/a", "ar", status="measured")
    add_point(sweep, "points/a", "tree:32", status="invalid", reason="tau is 1.0")
    assert {each.configuration.name for each in read_results([folder]).measurements} == {"ar"}


def test_what_blocks_of_a_sweep_measured_twice_counts_once(tmp_path):
    """The one with more repetitions; the report can be written, and says so."""
    sweep = tmp_path / "sweep"
    cell = ("w", None, 1, "ar")
    few = write_run(sweep / "points" / "a", {cell: {"tok_s": 10.0}}, repetitions=2, label="few")
    many = write_run(sweep / "points" / "b", {cell: {"tok_s": 20.0}}, repetitions=6, label="many")
    (sweep / "sweep.json").write_text("{}")
    for folder in (few, many):
        add_point(sweep, str(folder.relative_to(sweep)), "ar", status="measured")
    (only,) = read_results([sweep]).measurements
    assert only.numbers.user_tok_s.value == pytest.approx(20)
    assert "| ar | twice | measured twice; many counts, few does not |" in report(tmp_path, sweep).markdown.read_text()


@pytest.mark.parametrize("change", [{"max_tokens": 64}, {"unique_prefix": True}])
def test_what_was_measured_in_another_way_is_no_rival(tmp_path, change):
    """Longer answers are faster per token: a configuration must not be recommended for them."""
    one = write_run(tmp_path / "one", {("w", None, 1, "ar"): {"total_tok_s": 50.0}})
    other = write_run(tmp_path / "other", {("w", None, 1, "tree:8"): {"total_tok_s": 90.0}}, plan=change)
    results = read_results([one, other])
    assert len({each.place for each in results.measurements}) == 2
    assert all(len(each.standings) == 1 for each in recommend(results))
    ((name, value),) = change.items()
    assert f"w ({name} {value})" in results.workloads
    with pytest.raises(UserError, match=f"the baseline measured w.* with {name}"):
        other_ar = write_run(tmp_path / "again", {("w", None, 1, "ar"): {}}, plan=change)
        compare(read_results([one]), read_results([other_ar]), 0.05)


def test_steady_totals_are_not_held_against_whole_ones(tmp_path):
    """One has no steady window: whole units are compared, in which the other is no faster."""
    cells = {
        ("w", None, 4, "tree:8"): {"total_tok_s": 100.0, "is_steady": True},
        ("w", None, 4, "tree:32"): {"total_tok_s": 102.0, "is_steady": False},
    }
    folder = write_run(tmp_path / "run", cells)
    results = read_results([folder])
    totals = {each.configuration.budget: each.numbers.total_tok_s.value for each in results.measurements}
    assert totals == {8: pytest.approx(90), 32: pytest.approx(102 * 0.9)}
    assert "* |" in report(tmp_path, folder).markdown.read_text()
    before = write_run(tmp_path / "before", {("w", None, 4, "ar"): {"total_tok_s": 100.0}})
    now = write_run(tmp_path / "now", {("w", None, 4, "ar"): {"total_tok_s": 100.0, "is_steady": False}})
    changes = {c.quantity: c for c in compare(read_results([before]), read_results([now]), 0.05)}
    assert changes["total_tok_s"].judgement == "same" and changes["total_tok_s"].ratio.value == pytest.approx(1)


def test_chance_machines_and_faults_are_told_beside_the_recommendation(tmp_path):
    near = write_run(tmp_path / "near", matrix(tree=97.5, large=100.0), session={"host": {"cpu": "another CPU"}})
    text = report(tmp_path, near).markdown.read_text()
    assert "intervals overlap" not in text and "several machines" not in text
    wide = {("w", None, 1, f"tree:{b}"): {"total_tok_s": s, "swing": 0.2} for b, s in ((8, 100.0), (32, 104.0))}
    assert (
        "intervals overlap everywhere with those of tree 8:"
        in recommend(read_results([write_run(tmp_path / "wide", wide)]))[0].reason
    )
    other = write_run(tmp_path / "other", {("w", 512, 1, "ar"): {}})
    assert "of several machines" in report(tmp_path, near, other).markdown.read_text()


def test_how_much_stands_behind_the_recommendation(tmp_path):
    """An engineer must see whether a few per cent mean anything."""
    text = report(tmp_path, write_run(tmp_path / "run", matrix())).markdown.read_text()
    assert "How sure: 5 repetitions of 4.0 s (median)" in text and "reaches 1% to either side" in text
    assert "tell more" not in text
    wide = report(tmp_path, write_run(tmp_path / "wide", matrix(swing=0.4), repetitions=3)).markdown.read_text()
    assert "How sure: 3 repetitions" in wide and re.search(r"reaches 1\d% to either side", wide) and "tell more" in wide


def test_places_are_told_by_what_sets_them_apart(tmp_path):
    """Not the same workload and context in every line of a table."""
    text = report(tmp_path, write_run(tmp_path / "run", matrix(large=120.0))).markdown.read_text()
    assert "| 4 at a time | tree 32 | 240 |" in text and "### w, prompts as they are, 4 at a time" in text
    cells = matrix() | {("w", 512, c, v): {} for c in (1, 4) for v in ("ar", "tree:8", "tree:32")}
    text = report(tmp_path, write_run(tmp_path / "two", cells)).markdown.read_text()
    assert "| 512 tokens of context, 4 at a time |" in text


def test_a_run_that_was_resumed_is_told(tmp_path):
    folder = write_run(tmp_path / "run", matrix(), settings={"speculation.algorithm": "none"})
    assert "resumed" not in report(tmp_path, folder).markdown.read_text()
    sessions = (folder / "sessions.jsonl").read_text()
    (folder / "sessions.jsonl").write_text(sessions * 2)
    assert "| ar | resumed | measured in 2 goes;" in report(tmp_path, folder).markdown.read_text()


def test_the_servers_account_is_short_and_names_no_machine(tmp_path):
    told = {"version": "0.5.16", "tp_size": 2, "log_level": "info", "speculative_draft_model_path": "/srv/x/models/d"}
    told |= {
        "max_total_by_batch": {"16": 2.5, "2": 1.0},
        "disable_radix_cache": False,
        "cuda_graph_bs_decode": list(range(200)),
        "api_key": None,
    }
    session = {"server_facts": {"/server_info": told}, "engine": "sglang"}
    text = report(tmp_path, write_run(tmp_path / "run", matrix(), session=session)).markdown.read_text()
    block = text.partition("```text\n")[2].partition("\n```")[0]
    assert block.splitlines() == [
        "cuda_graph_bs_decode = (200 entries)",
        "max_total_by_batch = 2: 1.0, 16: 2.5",
        "speculative_draft_model_path = .../models/d",
        "tp_size = 2",
        "version = 0.5.16",
    ]


def test_two_runs_of_the_same_are_refused(tmp_path):
    folders = [write_run(tmp_path / name, matrix(), label=name) for name in ("one", "two")]
    with pytest.raises(UserError, match="one and two both measured ar"):
        read_results(folders)


def test_an_unfinished_run_is_told(tmp_path):
    folder = write_run(tmp_path / "run", matrix(), missing=3)
    assert "| made | unfinished | 3 of 33 units were not measured |" in report(tmp_path, folder).markdown.read_text()


def test_the_share_of_the_bound(tmp_path):
    folder = write_run(tmp_path / "run", matrix(), gpus=[{"name": "NVIDIA H200", "driver_version": "1"}])
    results = read_results([folder])
    bandwidth, source = known_bandwidth(results)
    assert bandwidth == 4800.0 and "H200" in source
    found = {each.measurement.configuration.name: each for each in shares(results, Machine(4800.0, "", 16.0, 4.0))}
    assert found["ar"].bound_tok_s == 300.0 and found["ar"].share == pytest.approx(50 / 300)
    assert found["tree 32"].bound_tok_s == pytest.approx(5 * 240.0)
    text = report(tmp_path, folder, target_gb=16.0, drafter_gb=4.0).markdown.read_text()
    assert "All at w, prompts as they are, 1 at a time." in text and "| ar | 50.0 | 300 | 16.7% |" in text
    assert "Not told" in report(tmp_path, write_run(tmp_path / "cpu", matrix()), target_gb=16.0).markdown.read_text()


@pytest.mark.parametrize(
    ("plan", "session"),
    [
        ({"base_url": "http://gpu-host:8000"}, {}),
        ({}, {"deployment_text": '[host]\nkind = "ssh"\naddress = "gpu-host"\n'}),
        ({}, {"server_facts": {"/server_info": {"effective": {"engine": {"device": "cpu"}}}}}),
    ],
)
def test_a_gpu_that_did_not_serve_bounds_nothing(tmp_path, plan, session):
    """Measured from a laptop with a GPU of its own, or on its CPU."""
    laptop = {"gpus": [{"name": "NVIDIA GeForce RTX 4090", "driver_version": "1"}]}
    assert known_bandwidth(read_results([write_run(tmp_path / "run", matrix(), session=laptop)]))
    folder = write_run(tmp_path / "other", matrix(), session=laptop | session, plan=plan)
    assert known_bandwidth(read_results([folder])) is None


def test_settings_that_were_deployed_have_their_names(tmp_path):
    cells = {("w", None, 1, "server"): {}}
    first = {"speculation.algorithm": "ddtree", "speculation.budget": 8, "speculation.draft_window": 512}
    folders = [
        write_run(tmp_path / "a", cells, settings=first),
        write_run(tmp_path / "b", cells, settings={"speculation.algorithm": "none"}),
        write_run(tmp_path / "c", cells, settings={"speculation.algorithm": "dflash", "runtime.cuda_graphs": False}),
    ]
    names = [each.name for each in read_results(folders).configurations]
    assert names == ["ar", "chain, cuda_graphs false", "tree 8, draft_window 512"]


def test_draft_temperatures_are_told_apart_and_held_against_the_same_plain_decoding(tmp_path):
    folders = []
    for temperature, tree in ((0.8, 120.0), (1, 100.0)):
        cells = {("w", None, 1, "tree:8"): {"total_tok_s": tree}}
        cells |= {("w", None, 1, "ar"): {"total_tok_s": 50.0}} if temperature == 1 else {}
        settings = {"speculation.draft_temperature": temperature}
        folders.append(write_run(tmp_path / str(temperature), cells, settings=settings))
    results = read_results(folders)
    assert [each.name for each in results.configurations] == [
        "ar", "tree 8, draft_temperature 0.8", "tree 8, draft_temperature 1",
    ]  # fmt: skip
    (found,) = recommend(results)
    assert found.configuration.name == "tree 8, draft_temperature 0.8"
    assert "against plain decoding it is 2.40 to 2.40 times as fast" in found.reason


def test_a_run_of_another_version_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", matrix())
    content = json.loads((folder / "run.json").read_text()) | {"new_field": 1}
    (folder / "run.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="new_field"):
        read_results([folder])
