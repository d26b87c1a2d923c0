"""The folder of shipped kernels: names that say what is in a file, an index, and nobody else's file touched."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fa_autotune.dispatch import shipped_kernels
from fa_autotune.dispatch.shipped_kernels import INDEX, find_shipped, shipped_files, write_shipped
from fa_autotune.dispatch.winners import WinnerRow
from fa_autotune.errors import FaAutotuneError
from fa_autotune.kernels.render import render
from fa_autotune.problem.problem import AttentionProblem
from kit.winners import A100, HOPPER, PORTABLE, TMA, plain_config, winner

SHORT = "4x32x8x1024x1024x128,causal"
LONG = "4x32x8x4096x4096x128,causal"
WIDE = "4x8x8x1024x1024x192x128,causal"
OTHER_TILE = replace(PORTABLE, BLOCK_M=128)


def plain_winner(text: str) -> WinnerRow:
    problem = AttentionProblem.parse(text)
    return winner(problem, plain_config(problem))


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def table_rows(index: str) -> list[list[str]]:
    """The cells of the index, without its heads."""
    lines = [
        line for line in index.splitlines() if line.startswith("| ") and "---" not in line and "problem" not in line
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


class TestNames:
    @pytest.mark.parametrize(
        ("problem", "expected"),
        [
            (LONG, "fwd_portable/bf16_d128_causal"),
            (
                "2x8x8x64x64x192x128,fp16,causal,left=31,softcap,varlen",
                "fwd_portable/fp16_d192x128_window_softcap_varlen",
            ),
            ("2x8x8x64x64x72,any,fp32", "fwd_portable/fp32_d72_full_any"),
            (f"{LONG},bwd_fused,unordered", "bwd_fused_hopper_ws/bf16_d128_causal_unordered"),
        ],
    )
    def test_say_pass_variant_dtype_head_dims_mask_and_features(self, problem: str, expected: str) -> None:
        row = plain_winner(problem)
        found = set(shipped_files([row])) - {INDEX}
        assert found == {f"{expected}-{render(row.candidate).digest[:8]}.py"}

    def test_are_one_for_a_kernel_of_several_problems(self) -> None:
        assert len(shipped_files([winner(LONG), winner(SHORT)])) == 2

    def test_are_several_for_several_kernels_of_a_family(self) -> None:
        assert len(shipped_files([winner(LONG), winner(LONG, OTHER_TILE)])) == 3

    def test_of_one_text_for_two_families_are_one(self) -> None:
        rows = [plain_winner(f"{text},bwd_postprocess") for text in (WIDE.replace("x128", ""), WIDE)]
        (found,) = set(shipped_files(rows)) - {INDEX}
        assert len({row.candidate.family.key for row in rows}) == 2
        assert shipped_files(rows)[found] == render(rows[1].candidate).text

    def test_that_clash_are_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shipped_kernels, "_DIGITS", 0)
        with pytest.raises(FaAutotuneError, match=r"two kernels would be fwd_portable/bf16_d128_causal-.py: 0 digits"):
            shipped_files([winner(LONG), winner(LONG, OTHER_TILE)])


class TestIndex:
    def test_has_the_winners_of_a_problem_the_fastest_first_with_their_share(self) -> None:
        times = {TMA: 1.0, HOPPER: 0.8, PORTABLE: 1.6}
        files = shipped_files([winner(LONG, config, median_ms=ms) for config, ms in times.items()])
        found = table_rows(files[INDEX])
        assert [(row[0], *row[2:]) for row in found] == [
            ("fwd bf16 d128 causal 4×32×8×4096×4096", "0.8", "100%"),
            ("fwd bf16 d128 causal 4×32×8×4096×4096", "1", "80%"),
            ("fwd bf16 d128 causal 4×32×8×4096×4096", "1.6", "50%"),
        ]

    def test_leads_to_files(self) -> None:
        files = shipped_files([winner(LONG), winner(LONG, TMA), plain_winner(f"{LONG},bwd_delta")])
        linked = [re.fullmatch(r"\[(.+)\]\((.+)\)", row[1]) for row in table_rows(files[INDEX])]
        assert {(match[1], match[2]) for match in linked if match} == {(name, name) for name in set(files) - {INDEX}}

    def test_names_problems_as_explain_takes_them(self) -> None:
        rows = [plain_winner(text) for text in (SHORT, f"{LONG},left=512", f"{LONG},bwd_dq,softcap", f"{SHORT},varlen")]
        found = {AttentionProblem.parse(cells[0]).key for cells in table_rows(shipped_files(rows)[INDEX])}
        assert found == {row.problem.key for row in rows}

    def test_compares_times_of_one_device_and_triton_only(self) -> None:
        rows = [
            winner(LONG, median_ms=1.0),
            winner(LONG, device=A100, median_ms=4.0),
            winner(LONG, triton="3.9.0", median_ms=0.5),
        ]
        index = shipped_files(rows)[INDEX]
        assert [row[3] for row in table_rows(index)] == ["100%"] * 3
        heads = [line for line in index.splitlines() if line.startswith("## ")]
        assert heads == [
            f"## fwd: {A100.name}, Triton 3.7.1",
            "## fwd: NVIDIA H200, Triton 3.7.1",
            "## fwd: NVIDIA H200, Triton 3.9.0",
        ]

    def test_is_the_same_whatever_the_order_of_the_winners(self) -> None:
        rows = [winner(LONG), winner(SHORT), winner(LONG, TMA, median_ms=1.0), plain_winner(f"{SHORT},bwd_delta")]
        assert shipped_files(rows) == shipped_files(rows[::-1])


class TestWriting:
    def test_writes_kernels_and_index(self, tmp_path: Path) -> None:
        rows = [winner(LONG), winner(LONG, TMA)]
        written = write_shipped(rows, tmp_path)
        assert {path.relative_to(tmp_path).as_posix(): path.read_text() for path in written} == shipped_files(rows)
        assert names(tmp_path) == set(shipped_files(rows))

    def test_again_changes_nothing(self, tmp_path: Path) -> None:
        before = {path: path.stat() for path in write_shipped([winner(LONG)], tmp_path)}
        assert {path: path.stat() for path in write_shipped([winner(LONG)], tmp_path)} == before

    def test_removes_what_is_no_winners_any_more_and_folders_that_are_empty_then(self, tmp_path: Path) -> None:
        write_shipped([winner(LONG), winner(LONG, TMA)], tmp_path)
        (tmp_path / "fwd_0011223344556677.py").write_text(
            render(winner(LONG, OTHER_TILE).candidate).text
        )  # as once named
        write_shipped([winner(LONG)], tmp_path)
        assert names(tmp_path) == set(shipped_files([winner(LONG)]))
        assert not (tmp_path / "fwd_tma").exists()

    def test_leaves_files_of_others_alone(self, tmp_path: Path) -> None:
        write_shipped([winner(LONG, TMA)], tmp_path)
        (tmp_path / "README.md").write_text("kernels\n")
        (tmp_path / "fwd_tma" / "mine.py").write_text("VALUE = 1\n")
        elsewhere = tmp_path.parent / f"{tmp_path.name}.py"
        elsewhere.write_text(render(winner(LONG).candidate).text)
        (tmp_path / "link.py").symlink_to(elsewhere)
        write_shipped([winner(LONG)], tmp_path)
        left = names(tmp_path) - set(shipped_files([winner(LONG)]))
        assert left == {"README.md", "fwd_tma/mine.py", "link.py"}

    @pytest.mark.parametrize("name", [INDEX, "a kernel's"])
    def test_never_writes_over_a_file_of_others(self, name: str, tmp_path: Path) -> None:
        (kernel,) = set(shipped_files([winner(LONG)])) - {INDEX}
        taken = tmp_path / (INDEX if name == INDEX else kernel)
        taken.parent.mkdir(exist_ok=True)
        taken.write_text("mine\n")
        with pytest.raises(FaAutotuneError, match=rf"{re.escape(str(taken))} is no file of ours.*move it away"):
            write_shipped([winner(LONG)], tmp_path)
        assert names(tmp_path) == {taken.relative_to(tmp_path).as_posix()}
        assert taken.read_text() == "mine\n"

    def test_puts_a_file_that_was_edited_right(self, tmp_path: Path) -> None:
        (kernel, _) = write_shipped([winner(LONG)], tmp_path)
        text = kernel.read_text()
        kernel.write_text(text + "# edited\n")
        write_shipped([winner(LONG)], tmp_path)
        assert kernel.read_text() == text


class TestFinding:
    def test_gives_the_file_of_a_kernel(self, tmp_path: Path) -> None:
        written = write_shipped([winner(LONG), winner(LONG, TMA)], tmp_path)
        assert find_shipped(winner(SHORT, TMA).candidate, tmp_path) in written

    def test_gives_a_kernel_that_is_named_for_another_family(self, tmp_path: Path) -> None:
        one, other = (plain_winner(f"{text},bwd_postprocess") for text in (WIDE.replace("x128", ""), WIDE))
        (kernel, _) = write_shipped([one, other], tmp_path)
        assert [find_shipped(row.candidate, tmp_path) for row in (one, other)] == [kernel, kernel]

    def test_of_another_kernel_is_nothing(self, tmp_path: Path) -> None:
        write_shipped([winner(LONG)], tmp_path)
        assert find_shipped(winner(LONG, OTHER_TILE).candidate, tmp_path) is None

    def test_where_there_is_no_folder_is_nothing(self, tmp_path: Path) -> None:
        assert find_shipped(winner(LONG).candidate, tmp_path / "none") is None

    def test_of_a_kernel_whose_digest_only_starts_alike_is_nothing(self, tmp_path: Path) -> None:
        (kernel, _) = write_shipped([winner(LONG)], tmp_path)
        digest = render(winner(LONG).candidate).digest
        kernel.write_text(kernel.read_text().replace(digest, f"{digest[:8]}00000000"))
        assert find_shipped(winner(LONG).candidate, tmp_path) is None
