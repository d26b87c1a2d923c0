"""What bench says of figures: ratios, means, the table, the documents; and the command, on a faked run."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

from fa_autotune.benchmark import bench as bench_module
from fa_autotune.benchmark import peers
from fa_autotune.benchmark.bench import OURS, BenchReport, BenchRow, bench, geomean, prepare, table_rows
from fa_autotune.benchmark.peers import PEERS
from fa_autotune.cli import main
from fa_autotune.cli.bench import DEFAULT_PEERS, bench_command, markdown
from fa_autotune.dispatch.loaded_kernels import INTERPRETER_INDEX, dispatcher_of
from fa_autotune.errors import FaAutotuneError, UnsupportedError
from fa_autotune.evaluation.measure import MeasurePolicy
from fa_autotune.evaluation.seeded import seeded_features
from fa_autotune.evaluation.workload import bottom_right_diagonal
from fa_autotune.problem.device import KNOWN_DEVICES, Toolchain
from fa_autotune.problem.models import default_problems, paper_problems
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Measurement, Regime, Role
from fa_autotune.reference.attention import attention_reference, seeded_inputs
from kit.attention_calls import interpreted

CAUSAL = AttentionProblem.parse("1x16x16x4096x4096x128,causal")
FULL = AttentionProblem.parse("1x16x16x4096x4096x128")


def row(problem: AttentionProblem, contender: str, median_ms: float | None, note: str = "a note") -> BenchRow:
    """A measured row, or one that did not run."""
    measurement = None
    if median_ms is not None:
        measurement = Measurement(
            role=Role.CONFIRM,
            regime=Regime.EVENTS,
            launches=70,
            p20_ms=0.98 * median_ms,
            median_ms=median_ms,
            p80_ms=1.03 * median_ms,
        )
    return BenchRow(problem=problem, contender=contender, measurement=measurement, note=note)


def report(*rows: BenchRow, power_limit_w: float | None = 700.0) -> BenchReport:
    return BenchReport(
        rows=rows,
        device=replace(KNOWN_DEVICES["h200"], power_limit_w=power_limit_w),
        toolchain=Toolchain(triton="3.7.1", cuda="13.0", driver="580.95", torch="2.13.0"),
        cudnn=91900,
        python="3.11.9",
        started_at="2026-09-01T12:00:00+00:00",
        policy=MeasurePolicy(),
    )


# We take half of flash's time on FULL and the double on CAUSAL; flex runs only FULL.
REPORT = report(
    row(FULL, OURS, 0.5, "tma 64x128 w4 s2 (exact)"),
    row(FULL, "sdpa-flash", 1.0),
    row(FULL, "flex", 0.75, "torch 2.13.0 FlexAttention"),
    row(CAUSAL, OURS, 0.5, "portable 64x64 w4 s2 (nearest)"),
    row(CAUSAL, "sdpa-flash", 0.25),
    row(CAUSAL, "flex", None, "did not run: no"),
)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_geometric_mean_of_inverse_ratios_is_one() -> None:
    assert geomean([4.0, 0.25]) == 1.0


def test_geometric_mean_of_one_value_is_that_value() -> None:
    assert geomean([1.25]) == pytest.approx(1.25)


def test_tflops_count_matrix_products_and_half_of_them_where_causal() -> None:
    assert row(FULL, OURS, 1.0).tflops == pytest.approx(4 * 16 * 4096 * 4096 * 128 / 1e9)
    assert row(CAUSAL, OURS, 1.0).tflops == pytest.approx(2 * 16 * 4096 * 4096 * 128 / 1e9)


def test_what_did_not_run_has_no_tflops() -> None:
    assert row(FULL, "flex", None).tflops is None


def test_a_ratio_is_their_time_over_ours() -> None:
    assert REPORT.ratios("sdpa-flash") == [2.0, 0.5]


def test_a_ratio_needs_both_times() -> None:
    assert REPORT.ratios("flex") == [1.5]


def test_a_contender_that_never_ran_has_no_ratio() -> None:
    assert report(row(FULL, OURS, 1.0), row(FULL, "fa3", None)).ratios("fa3") == []


def test_contenders_and_problems_keep_their_order() -> None:
    assert REPORT.contenders() == [OURS, "sdpa-flash", "flex"]
    assert REPORT.problems() == [FULL, CAUSAL]


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_problem_and_one_for_the_means() -> None:
    assert [cells[0] for cells in table_rows(REPORT)] == ["problem", FULL.label, CAUSAL.label, "geometric mean"]


def test_every_row_of_the_table_fills_every_column() -> None:
    assert {len(cells) for cells in table_rows(REPORT)} == {8}


def test_the_table_shows_speeds_ratios_and_our_kernel() -> None:
    head, full, causal, means = table_rows(REPORT)
    assert dict(zip(head, full, strict=True)) == {
        "problem": FULL.label,
        "ms": "0.500",
        "ours TFLOP/s": "275",
        "sdpa-flash TFLOP/s": "137",
        "flex TFLOP/s": "183",
        "ours / sdpa-flash": "2.00",
        "ours / flex": "1.50",
        "kernel": "tma 64x128 w4 s2 (exact)",
    }
    assert causal[4:7] == ["–", "0.50", "–"]
    assert means[5:7] == ["1.00", "1.50"]


def test_a_peer_that_never_ran_has_a_dash_for_its_mean() -> None:
    *_, means = table_rows(report(row(FULL, OURS, 1.0), row(FULL, "fa3", None)))
    assert means[4] == "–"


def test_json_holds_every_row_and_its_measurement() -> None:
    document = json.loads(json.dumps(REPORT.as_json(), allow_nan=False))
    assert [entry["contender"] for entry in document["rows"]] == [OURS, "sdpa-flash", "flex"] * 2
    assert [entry["problem"] for entry in document["rows"][::3]] == [FULL.key, CAUSAL.key]
    assert document["rows"][0]["measurement"]["p80_ms"] == pytest.approx(0.515)
    assert document["rows"][5]["measurement"] is None
    assert document["geomean_speedup"] == {"sdpa-flash": pytest.approx(1.0), "flex": pytest.approx(1.5)}


def test_json_says_what_the_figures_were_taken_on() -> None:
    document = REPORT.as_json()
    assert document["device"]["power_limit_w"] == 700.0
    assert document["toolchain"]["driver"] == "580.95"
    assert document["policy"]["rounds"] == MeasurePolicy().rounds


# --- markdown ---------------------------------------------------------------------------------------------------------


def test_markdown_names_gpu_versions_driver_power_command_date_and_policy() -> None:
    text = markdown(REPORT, "fa-autotune bench --paper")
    for words in (
        "# Forward attention on NVIDIA H200, 2026-09-01",
        "```sh\nfa-autotune bench --paper\n```",
        "power limit 700 W, driver 580.95",
        "torch 2.13.0, CUDA 13.0, cuDNN 91900, Triton 3.7.1, Python 3.11.9",
        "measured from 2026-09-01T12:00:00+00:00",
        "7 rounds of about 8 ms each, device events round each launch, L2 cache flushed",
    ):
        assert words in text


def test_markdown_tells_the_largest_spread_of_each_contender() -> None:
    assert "largest spread, p80 − p20 over the median: ours 5.0%, sdpa-flash 5.0%, flex 5.0%\n" in markdown(REPORT, "c")


def test_markdown_says_why_a_peer_is_missing_and_how_often() -> None:
    text = markdown(REPORT, "c")
    assert "- flex: torch 2.13.0 FlexAttention (1 of 2 problems); did not run: no (1 of 2 problems)\n" in text


def test_markdown_holds_the_table() -> None:
    table = [line for line in markdown(REPORT, "c").splitlines() if line.startswith("|")]
    assert len(table) == 5
    assert table[1] == "| --- | --- | --- | --- | --- | --- | --- | --- |"
    assert table[2].startswith(f"| {FULL.label} | 0.500 | 275 | 137 | 183 | 2.00 | 1.50 | tma")


def test_markdown_without_a_power_limit_says_so() -> None:
    assert "power limit unknown" in markdown(report(row(FULL, OURS, 1.0), power_limit_w=None), "c")


# --- contenders -------------------------------------------------------------------------------------------------------


def run_prepare(**peers: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, str]]:
    tensor = torch.zeros(1)
    return prepare(peers, FULL, (tensor, tensor, tensor), attempt=timed)


def timed(launch: Callable[[], Any]) -> None:
    """As a timer would, which captures small problems in a graph."""
    if launch is refuses_capture:
        raise RuntimeError("operation not permitted when stream is capturing")
    launch()


def works(*_: object) -> tuple[Callable[[], None], str]:
    return (lambda: None), "works"


def fails_when_built(*_: object) -> Any:
    raise ModuleNotFoundError("No module named 'flash_attn_interface'")


def fails_when_launched(*_: object) -> tuple[Callable[[], None], str]:
    def launch() -> None:
        raise ValueError("head dims must be powers of two\nand more")

    return launch, "built"


def refuses_capture() -> None: ...


def fails_when_captured(*_: object) -> tuple[Callable[[], None], str]:
    return refuses_capture, "built"


def fails_without_a_word(*_: object) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("peer", "note"),
    [
        (fails_when_built, "did not run: No module named 'flash_attn_interface'"),
        (fails_when_launched, "did not run: head dims must be powers of two"),
        (fails_when_captured, "did not run: operation not permitted when stream is capturing"),
        (fails_without_a_word, "did not run: NotImplementedError"),
    ],
)
def test_a_peer_that_fails_is_left_out_and_says_why(peer: Callable[..., Any], note: str) -> None:
    launches, notes = run_prepare(ours=works, peer=peer, other=works)
    assert set(launches) == {"ours", "other"}
    assert notes == {"ours": "works", "peer": note, "other": "works"}


@pytest.mark.kernel
@interpreted
def test_ours_is_given_what_its_features_need() -> None:
    problem = AttentionProblem.parse("1x2x1x40x40x16,causal,left=9,softcap,alibi,sinks")
    q, k, v = seeded_inputs(problem.family, problem.shape, device=torch.device("cpu"), seed=0)
    launch, _ = bench_module._ours(dispatcher_of(INTERPRETER_INDEX), problem, q, k, v)
    launch()
    out = launch.args[3]
    assert out.shape == q.shape
    assert out.isfinite().all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("words", ["causal,softcap", "alibi", "causal,left=9,softcap,alibi", "left=20,right=3"])
def test_flex_is_given_the_same_problem(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(peers, "_compiled_flex", lambda: flex_attention)
    problem = AttentionProblem.parse(f"2x4x2x150x200x16,{words},fp32")
    q, k, v = seeded_inputs(problem.family, problem.shape, device=torch.device("cpu"), seed=0)
    launch, _ = PEERS["flex"](problem, q, k, v)
    expected, _ = attention_reference(
        q,
        k,
        v,
        softmax_scale=0.25,
        diagonal=bottom_right_diagonal(problem),
        features=seeded_features(problem, device=q.device),
    )
    torch.testing.assert_close(launch(), expected, atol=1e-5, rtol=1e-5, check_dtype=False)


def test_a_failure_of_ours_is_raised() -> None:
    with pytest.raises(ValueError, match="powers of two"):
        run_prepare(ours=fails_when_launched, other=works)


def test_sdpa_refuses_a_causal_rectangle_whose_diagonal_lies_elsewhere() -> None:
    problem = AttentionProblem.parse("1x2x2x64x128x64,causal")
    with pytest.raises(UnsupportedError, match="top-left"):
        PEERS["sdpa-flash"](problem, *(torch.zeros(1, 2, 64, 64) for _ in range(3)))


def test_an_unknown_peer_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="unknown peers fa9; known are sdpa-flash, sdpa-cudnn"):
        bench([FULL], against=["sdpa-flash", "fa9"])


def test_without_a_gpu_bench_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FaAutotuneError, match=r"torch sees no GPU; `fa-autotune doctor`"):
        bench([FULL], against=[])


def test_interpreted_kernels_are_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "interpreting", lambda: True)
    with pytest.raises(FaAutotuneError, match="without TRITON_INTERPRET"):
        bench([FULL], against=[])


# --- the command ------------------------------------------------------------------------------------------------------


class FakeRun:
    """Stands for `bench`: keeps its arguments, and answers with REPORT."""

    def __init__(self) -> None:
        self.problems: list[AttentionProblem] = []
        self.options: dict[str, Any] = {}

    def __call__(self, problems: list[AttentionProblem], *, on_problem: Callable[..., None], **options: Any) -> Any:
        self.problems, self.options = problems, options
        for problem in REPORT.problems():
            on_problem(problem, [found for found in REPORT.rows if found.problem == problem])
        return REPORT


@pytest.fixture
def fake() -> FakeRun:
    return FakeRun()


def command(fake: FakeRun | None, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], obj=fake)


def test_the_table_comes_on_stdout_and_progress_on_stderr(fake: FakeRun) -> None:
    done = command(fake, "--paper")
    assert done.exit_code == 0, done.output
    assert FULL.label in done.stdout
    assert "geometric mean" in done.stdout
    assert "flex: torch 2.13.0 FlexAttention (1 of 2 problems); did not run: no (1 of 2 problems)" in done.stdout
    assert f"[1/28] {FULL.label}: ours 275, sdpa-flash 137, flex 183 TFLOP/s" in done.stderr
    assert "sdpa-flash 275, flex – TFLOP/s" in done.stderr


def test_json_is_one_document_on_stdout(fake: FakeRun) -> None:
    document = json.loads(command(fake, "--paper", "--json").stdout)
    assert document["command"] == "fa-autotune bench --paper"
    assert len(document["rows"]) == len(REPORT.rows)


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        ((), default_problems()),
        (("--paper",), paper_problems()),
        (("--problem", "1x16x16x4096x4096x128", "--problem", "1x16x16x4096x4096x128,causal"), [FULL, CAUSAL]),
        (("--problem", FULL.key, "--problem", FULL.key), [FULL]),
        (
            ("--model", "llama-3-8b", "--seqlens", "4096", "--batch-size", "4"),
            [AttentionProblem.parse("4x32x8x4096x4096x128,causal")],
        ),
    ],
    ids=["default", "paper", "problems", "twice", "model"],
)
def test_problems_are_named_as_for_tune(
    arguments: tuple[str, ...], problems: list[AttentionProblem], fake: FakeRun
) -> None:
    assert command(fake, *arguments).exit_code == 0
    assert fake.problems == problems


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {"against": DEFAULT_PEERS.split(","), "device_index": 0, "backward": False}),
        (
            ("--against", "flex, fa3", "--gpu", "1", "--backward"),
            {"against": ["flex", "fa3"], "device_index": 1, "backward": True},
        ),
        (("--against", ""), {"against": [], "device_index": 0, "backward": False}),
    ],
)
def test_peers_and_gpu_are_handed_on(arguments: tuple[str, ...], options: dict[str, Any], fake: FakeRun) -> None:
    command(fake, *arguments)
    assert fake.options == options


def test_output_writes_a_table_and_every_figure(fake: FakeRun, tmp_path: Path) -> None:
    done = command(fake, "--paper", "--against", "sdpa-flash,flex", "--output", str(tmp_path / "new"))
    stem = tmp_path / "new/2026-09-01-nvidia_h200-forward"
    assert f"wrote {stem}.md" in done.stderr
    document = json.loads(stem.with_suffix(".json").read_text())
    assert document["command"] == "fa-autotune bench --paper --against sdpa-flash,flex"
    assert stem.with_suffix(".md").read_text() == markdown(REPORT, document["command"])


def test_output_overwrites_nothing(fake: FakeRun, tmp_path: Path) -> None:
    for _ in range(3):
        command(fake, "--output", str(tmp_path))
    stems = {path.stem for path in tmp_path.iterdir()}
    assert stems == {f"2026-09-01-nvidia_h200-forward{end}" for end in ("", "-2", "-3")}


def test_a_run_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    def fails(*_: object, **__: object) -> None:
        raise FaAutotuneError("no such peer")

    done = CliRunner().invoke(main, ["bench", "--output", str(tmp_path / "new")], obj=fails)
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])


def test_a_folder_that_takes_no_results_is_an_error_before_anything_is_measured(fake: FakeRun, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = command(fake, "--output", str(tmp_path / "file/folder"))
    assert done.exit_code == 2
    assert re.search(r"--output \S+ can't take results: .*; name another folder", done.stderr)
    assert fake.options == {}


def test_the_recorded_command_repeats_the_run_without_local_paths(fake: FakeRun, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"num_attention_heads": 4, "hidden_size": 256}')
    arguments = ["--problem", FULL.key, "--hf-config", str(config), "--seqlens", "512", "--gpu", "0", "--json"]
    document = json.loads(command(fake, *arguments).stdout)
    assert str(tmp_path) not in document["command"]
    assert document["command"] == (
        f"fa-autotune bench --problem '{FULL.key}' --hf-config config.json --seqlens 512 --gpu 0"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--against", "fa9"), "unknown peers fa9"),
        (("--problem", "4x4"), "is no problem"),
        (("--model", "lama-3-8b"), "did you mean"),
        (("--seqlens", "512"), "name one of these"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(arguments: tuple[str, ...], message: str) -> None:
    done = command(None, *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_help_names_every_peer() -> None:
    (against,) = (option for option in bench_command.params if option.name == "against")
    assert isinstance(against, click.Option)
    assert [name for name in PEERS if name not in (against.help or "")] == []


def test_fa3_is_found_under_the_name_of_its_forward_only_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fa3_fwd_interface.py").write_text("def flash_attn_func(q, k, v, causal): return q.shape, causal")
    monkeypatch.syspath_prepend(tmp_path)
    problem = AttentionProblem.parse("1x2x2x64x64x64,causal")
    launch, note = PEERS["fa3"](problem, *(torch.zeros(1, 2, 64, 64) for _ in range(3)))
    assert launch() == ((1, 64, 2, 64), True)
    assert note.startswith("fa3_fwd_interface")
