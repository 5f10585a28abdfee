# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Records, reports and comparisons, from figures that are made up."""

from __future__ import annotations

import copy
import html.parser
import re
import typing as t

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import bench, bench_report


def figures(speed: float = 1.0) -> dict[str, float]:
    made = dict.fromkeys(bench.needed(), 1.0)
    made |= {"completed": 512, "failed": 0, "output_throughput": 1408 * speed, "per_user_throughput": 44 * speed}
    made |= {"total_token_throughput": 7046 * speed, "request_throughput": 0.69 * speed}
    return made | {"mean_ttft_ms": 2264 / speed, "p99_ttft_ms": 4000 / speed, "mean_itl_ms": 44.5 / speed}


def host(number: int) -> dict[str, t.Any]:
    """What the modules of one host say, with much that no report needs."""
    return {
        "number": number,
        "rank": {
            "engine": {"versions": {"vllm": "0.32.0", "torch": "2.13.0"}, "lock_digest": "9f2c"},
            "checkpoint": {"repository": "moonshotai/Kimi-K3", "revision": "f831", "identity_digest": "c0ffee"},
            "fabric": {"NCCL_IB_HCA": "=mlx5_4:1"},
            "status": {
                "state": "serving",
                "generation": 3,
                "configuration": "d1gest",
                "argv": ["vllm", "serve", "/srv/k3", "--node-rank", str(number), "--moe-backend", "flashinfer_trtllm"],
            },
            "unit": {"main_pid": 7},
        },
        "gpu": {
            "gpus": [{"name": "NVIDIA B200", "serial": "private"}] * 8,
            "smi": {"driver": "580.159.04", "cuda": "13.0"},
            "system": {"distribution": "ubuntu"},
        },
        "rdma": {"verdict": {"rails": [{"device": "mlx5_4", "port": 1, "rate": 400}]}, "stack": {"kind": "inbox"}},
    }


def document(
    name: str = "a", speeds: t.Sequence[float] = (1.0,), workloads: t.Sequence[dict[str, t.Any]] = ({"name": "page"},)
) -> dict[str, t.Any]:
    runs = [
        {
            "workload": workload["name"],
            "repetition": number,
            "seed": number,
            "file": f"{workload['name']}-{number}.json",
            "command": ["/opt/kimi-k3/venv/bin/vllm", *bench.words(workload, **PLACE)],
            "started": "2026-12-01T04:05:06Z",
            "seconds": 800.0,
            "figures": figures(speed),
        }
        for number, speed in enumerate(speeds, 1)
        for workload in workloads
    ]
    measured = {
        "seed": 1,
        "workloads": [{"name": workload["name"], **bench.identity(workload)} for workload in workloads],
        "runs": runs,
        "machine": {"processor": "Xeon", "processors": 224, "memory_gib": 2015},
        "commands": [],
    }
    about = {
        "name": name,
        "model": "kimi-k3",
        "host": "gpu-a",
        "started": "2026-12-01T04:05:06Z",
        "replica": {"group": "kimi_k3", "tensor_parallel": 8, "pipeline_parallel": 2},
    }
    return bench_report.record(about, {"gpu-a": host(0), "gpu-b": host(1)}, measured)


PLACE = {
    "url": "http://127.0.0.1:8000",
    "model": "kimi-k3",
    "tokenizer": "/srv/k3",
    "trust_remote_code": True,
    "seed": 1,
    "folder": "/x",
    "file": "y",
}


class Page(html.parser.HTMLParser):
    """What a page loads, and the text of its cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [str(value) for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th"):
            self.cells.append(data)


# The record


def test_a_record_has_what_a_reader_asks_for_and_no_more() -> None:
    made = document()
    rank = made["hosts"]["gpu-b"]
    assert rank["versions"] == {"vllm": "0.32.0", "torch": "2.13.0"}
    assert rank["command"][:2] == ["vllm", "serve"]
    assert rank["checkpoint"]["identity_digest"] == "c0ffee"
    assert (rank["configuration"], rank["lock"], rank["fabric"]) == ("d1gest", "9f2c", {"NCCL_IB_HCA": "=mlx5_4:1"})
    assert rank["hardware"]["gpus"] == {"NVIDIA B200": 8}
    assert (rank["hardware"]["rails"], rank["hardware"]["rail_rates"]) == (["mlx5_4:1"], [400])
    assert "private" not in str(made)


def test_hosts_without_anything_are_recorded_too() -> None:
    empty = {"number": 0, "rank": {"engine": None, "checkpoint": None, "fabric": None, "status": None}}
    assert bench_report.host_record(empty)["hardware"]["gpus"] == {}
    made = document()
    made["hosts"] = {"lab": bench_report.host_record(empty)}
    assert "no GPU" in bench_report.markdown(bench_report.report(made, []))


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ([], "x is no record of a benchmark."),
        ({"schema": 99}, "x has schema 99, and this release of the collection knows 1."),
        ({"schema": 1, "name": "a"}, "x is incomplete: it has no workloads, runs, hosts."),
        ({"schema": 1, "name": "a", "workloads": [], "runs": [], "hosts": {}}, "x has no run."),
    ],
)
def test_what_is_no_record_is_refused(broken: t.Any, sentence: str) -> None:
    with pytest.raises(bench.BenchError) as raised:
        bench_report.read_record(broken, "x")
    assert str(raised.value) == sentence


# Figures


@pytest.mark.parametrize(
    ("value", "text"), [(7046.4, "7,046"), (260.4, "260"), (44.54, "44.5"), (0.694, "0.69"), (-12.34, "-12.3")]
)
def test_figures_have_the_digits_they_deserve(value: float, text: str) -> None:
    assert bench_report.number(value) == text


def test_noise_is_that_of_the_difference() -> None:
    assert bench_report.noise([1.0], [1.0, 2.0]) is None
    assert bench_report.noise([1.0, 1.0], [2.0, 2.0]) == 0.0
    # Welch with equal variances and three runs each: four degrees of freedom, 2.776 * sqrt(1/3 + 1/3).
    assert bench_report.noise([1.0, 2.0, 3.0], [11.0, 12.0, 13.0]) == pytest.approx(2.776 * (2 / 3) ** 0.5)


def test_students_t_falls_towards_the_normal_distribution() -> None:
    values = [bench_report.student(freedom) for freedom in (0.5, 1, 2, 4.9, 15, 16, 30, 1000)]
    assert values[0] == values[1] == 12.706
    assert values[3] == 2.776
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(1.96, abs=0.01)


# The report


def test_tables_have_the_shape_of_the_published_ones() -> None:
    text = bench_report.markdown(bench_report.report(document(), []))
    assert "| page | 32 | 1,408 | 44.0 | 7,046 | 0.69 |" in text
    assert "| page | 2,264 / 4,000 | 44.5 / 1.00 | 1.00 / 1.00 | 1.00 / 1.00 |" in text
    assert "on 2 hosts (16 x NVIDIA B200) with vLLM 0.32.0, TP=8 within a host and PP=2 over the hosts" in text
    assert "±" not in text.split("## Workloads", maxsplit=1)[0]
    for part in (
        "--moe-backend flashinfer_trtllm",
        "NCCL_IB_HCA==mlx5_4:1",
        "c0ffee",
        "d1gest",
        "580.159.04",
        "--seed 1",
    ):
        assert part in text


def test_repetitions_show_their_spread() -> None:
    text = bench_report.markdown(bench_report.report(document(speeds=(1.0, 1.1)), []))
    assert "| page | 32 | 1,478 ± 99.6 |" in text
    assert "standard deviation" in text


def test_warnings_come_first() -> None:
    made = document()
    made["warnings"] = ["Something was odd."]
    text = bench_report.markdown(bench_report.report(made, []))
    assert text.index("> **Something was odd.**") < text.index("## Throughput")


def test_the_page_is_one_file_that_runs_nothing() -> None:
    made = document()
    made["name"] = "<script>alert(1)</script>"
    text = bench_report.page("x", bench_report.report(made, [("A plot", b"<svg/>")]))
    page = Page(text)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert [address.split(",")[0] for address in page.loads] == ["data:image/svg+xml;base64"]
    assert not re.search(r"url\(|@import", text)
    assert "1,408" in page.cells


def test_markdown_and_page_say_the_same() -> None:
    blocks = bench_report.report(document(speeds=(1.0, 1.2)), [])
    text = bench_report.markdown(blocks)
    for cell in Page(bench_report.page("x", blocks)).cells:
        assert cell in text


def test_lines_for_a_terminal() -> None:
    (line,) = bench_report.lines_of(document())
    assert line.startswith("page (random, 8192 in / 2048 out, 512 prompts, 32 at a time): Generation, tok/s 1,408; ")


# The comparison


def test_a_difference_above_its_noise_has_a_verdict_by_direction() -> None:
    (entry,) = bench_report.compare(document("a", (1.0, 1.01, 0.99)), document("b", (1.3, 1.31, 1.29)))
    rows = {row["metric"]: row for row in entry["rows"]}
    assert rows["output_throughput"]["percent"] == pytest.approx(30.0)
    assert rows["output_throughput"]["noise"] == pytest.approx(2.776 * (2 * 0.01**2 / 3) ** 0.5 * 100)
    assert rows["output_throughput"]["verdict"] == "better"
    assert rows["mean_ttft_ms"]["percent"] < 0
    assert rows["mean_ttft_ms"]["verdict"] == "better"
    assert rows["mean_tpot_ms"]["verdict"] == "within noise"
    assert not entry["few"]
    (entry,) = bench_report.compare(document("b", (1.3, 1.31, 1.29)), document("a", (1.0, 1.01, 0.99)))
    assert {row["verdict"] for row in entry["rows"]} == {"worse", "within noise"}


def test_a_difference_below_its_noise_is_called_that() -> None:
    (entry,) = bench_report.compare(document("a", (1.0, 1.2, 0.8)), document("b", (1.1, 1.3, 0.9)))
    assert {row["verdict"] for row in entry["rows"]} == {"within noise"}


def test_one_run_has_no_noise_and_two_have_hardly_one() -> None:
    one, two = document("a", (1.0,)), document("b", (1.3, 1.31))
    (entry,) = bench_report.compare(one, two)
    assert {row["verdict"] for row in entry["rows"]} == {"noise unknown"}
    assert entry["few"]
    text = bench_report.markdown(bench_report.comparison([one, two]))
    assert "One run says nothing about noise" in text
    assert "| +30.5 % | unknown | noise unknown |" in text
    text = bench_report.markdown(bench_report.comparison([two, two]))
    assert "With fewer than 3 runs on a side the noise is hardly known" in text
    assert "With fewer than 3 runs" in "".join(bench_report.compared_lines([two, two]))


def test_other_workloads_are_named_and_not_compared() -> None:
    mine = document("a", (1.0, 1.1), [{"name": "same"}, {"name": "long", "input_len": 8192}, {"name": "gone"}])
    theirs = document("b", (1.0, 1.1), [{"name": "same"}, {"name": "long", "input_len": 4096}])
    text = bench_report.markdown(bench_report.comparison([mine, theirs]))
    assert "Workload long is not compared: input_len is 8192 and 4096." in text
    assert "Workload gone is not compared: only a has it." in text
    assert text.count("| Generation, tok/s |") == 1
    assert "long is not compared: input_len is 8192 and 4096" in bench_report.compared_lines([mine, theirs])


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(
        bench.BenchError, match="have no workload in common that can be compared: 'page': prompts is 512"
    ):
        bench_report.compare(document("a"), document("b", workloads=[{"name": "page", "prompts": 8}]))


def test_seeds_do_not_make_another_workload() -> None:
    other = document("b")
    other["runs"][0]["seed"] = 99
    assert bench_report.compare(document("a"), other)[0]["rows"]


def test_what_else_differs_is_listed_by_rank() -> None:
    mine = document("a")
    theirs = copy.deepcopy(mine)
    theirs["hosts"] = {"other-a": theirs["hosts"]["gpu-a"], "other-b": theirs["hosts"]["gpu-b"]}
    assert bench_report.differing(mine, theirs) == []
    assert "are the same." in bench_report.markdown(bench_report.comparison([mine, theirs]))
    theirs["hosts"]["other-b"]["versions"]["vllm"] = "0.33.0"
    command = theirs["hosts"]["other-a"]["command"]
    command[command.index("flashinfer_trtllm")] = "auto"
    theirs["hosts"]["other-b"]["command"].append("--enable-prefix-caching")
    assert bench_report.differing(mine, theirs) == [
        ("rank 0: command", "--moe-backend flashinfer_trtllm", "--moe-backend auto"),
        ("rank 1: Versions", "torch 2.13.0, vllm 0.32.0", "torch 2.13.0, vllm 0.33.0"),
        ("rank 1: command", "none", "--enable-prefix-caching"),
    ]


def test_options_in_another_order_are_called_that() -> None:
    mine = document("a")
    theirs = copy.deepcopy(mine)
    command = theirs["hosts"]["gpu-a"]["command"]
    theirs["hosts"]["gpu-a"]["command"] = command[:3] + command[5:] + command[3:5]
    assert bench_report.differing(mine, theirs)[0][1] == "the same options in another order"


# Plots


def test_workloads_of_several_concurrencies_are_one_line() -> None:
    workloads = [
        {"name": "c8", "concurrency": 8, "prompts": 128},
        {"name": "c1", "concurrency": 1, "prompts": 16},
        {"name": "other", "input_len": 4},
        {"name": "all", "concurrency": 0},
    ]
    lines = bench_report.series(document(workloads=workloads))
    assert [points for _label, points in lines] == [[(1, "c1"), (8, "c8")], [(32, "other")]]
    assert lines[0][0] == "random, 8192 in / 2048 out"


def test_samples_are_milliseconds_of_requests_and_of_pieces() -> None:
    result = {"ttfts": [0.1, 0.2], "itls": [[0.01, 0.03], []], "output_lens": [3, 1], "latencies": [0.14, 0.2]}
    seen = bench_report.samples(result)
    assert seen["ttft"] == [100, 200]
    assert seen["itl"] == [10, 30]
    assert seen["tpot"] == [pytest.approx(20)]
    assert seen["e2el"] == [140, 200]
    del result["latencies"]
    assert bench_report.samples(result)["e2el"] == [pytest.approx(140), pytest.approx(200)]


def test_thinned_out_distributions_keep_both_ends() -> None:
    assert bench_report.shares([]) == ([], [])
    assert bench_report.shares([3, 1, 2]) == ([1, 2, 3], [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0])
    values, parts = bench_report.shares(range(100_000))
    assert (values[0], values[-1], parts[-1]) == (0, 99_999, 1.0)
    assert len(values) <= 402


def test_plots_are_drawn_and_the_same_figures_make_the_same_file() -> None:
    made = document(speeds=(1.0, 1.1), workloads=[{"name": "c1", "concurrency": 1}, {"name": "c8", "concurrency": 8}])
    pooled = {name: {key: [1.0, 2.0, 50.0] for key in bench.LATENCIES} for name in ("c1", "c8")}
    plots = bench_report.draw(made, pooled)
    assert [name for name, _picture in plots] == ["Throughput against concurrency", "Distribution of latencies"]
    for _name, picture in plots:
        assert b"<svg" in picture
        assert b"<script" not in picture
    assert bench_report.draw(made, pooled) == plots


def test_one_concurrency_is_no_line() -> None:
    assert [name for name, _picture in bench_report.draw(document(), {})] == ["Distribution of latencies"]


def test_without_matplotlib_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(bench.BenchError, match=r"pip install -r requirements-bench\.txt, or set bench_plots to false"):
        bench_report.draw(document(), {})
