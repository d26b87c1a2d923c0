"""The options that name problems: what each stands for, that they add up, and what goes with what."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fa_autotune.cli.problem_options import named_problems, problem_options
from fa_autotune.errors import FaAutotuneError
from fa_autotune.problem.family import DType
from fa_autotune.problem.models import paper_problems, problems_for_model
from fa_autotune.problem.problem import AttentionProblem

NOTHING: dict[str, Any] = {
    **{"problem_texts": (), "model": None, "hf_config": None, "paper": False},
    **{"seqlens": None, "batch_size": None, "dtype": None},
}
TEXT = "4x32x8x4096x4096x128,causal"


def test_nothing_is_named_by_nothing() -> None:
    assert named_problems(**NOTHING) == []


def test_ways_to_name_problems_add_up_and_each_problem_comes_once() -> None:
    llama = problems_for_model("llama-3-8b", seqlens=[4096], batch_size=4, dtype=DType.BFLOAT16)
    assert AttentionProblem.parse(TEXT) in llama
    found = named_problems(
        **{**NOTHING, "problem_texts": (TEXT, TEXT), "model": "llama-3-8b", "seqlens": "4096", "batch_size": 4}
    )
    assert found == llama
    both = named_problems(**{**NOTHING, "problem_texts": (TEXT,), "paper": True})
    assert both == list(dict.fromkeys([AttentionProblem.parse(TEXT), *paper_problems()]))


def test_lengths_batch_and_dtype_are_those_of_a_model_or_its_config(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}))
    for named in ({"model": "llama-3-8b"}, {"hf_config": config}):
        found = named_problems(**{**NOTHING, **named, "seqlens": "256, 512", "batch_size": 3, "dtype": "fp16"})
        assert {problem.shape.seqlen_q for problem in found} == {256, 512}
        assert {problem.shape.batch_size for problem in found} == {3}
        assert {problem.family.dtype for problem in found} == {DType.FLOAT16}


@pytest.mark.parametrize("option", [{"seqlens": "512"}, {"batch_size": 2}, {"dtype": "bf16"}])
def test_what_shapes_a_model_needs_one(option: dict[str, Any]) -> None:
    with pytest.raises(click.UsageError, match=r"--seqlens, --batch-size and --dtype shape --model and --hf-config"):
        named_problems(**{**NOTHING, "problem_texts": (TEXT,), **option})


@pytest.mark.parametrize("seqlens", ["512;1024", "", "long"])
def test_lengths_that_are_none_are_refused(seqlens: str) -> None:
    with pytest.raises(click.BadParameter, match="is not lengths like 512,2048"):
        named_problems(**{**NOTHING, "model": "llama-3-8b", "seqlens": seqlens})


def test_an_unknown_model_is_an_error_of_ours() -> None:
    with pytest.raises(FaAutotuneError, match="llama-99"):
        named_problems(**{**NOTHING, "model": "llama-99"})


def test_a_command_gets_every_option_with_its_default() -> None:
    given: list[dict[str, Any]] = []

    @click.command()
    @problem_options
    def command(**options: Any) -> None:
        given.append(options)

    assert CliRunner().invoke(command, ["--problem", TEXT, "--problem", "x", "--batch-size", "2"]).exit_code == 0
    assert CliRunner().invoke(command, ["--batch-size", "0"]).exit_code == 2
    assert given == [{**NOTHING, "problem_texts": (TEXT, "x"), "batch_size": 2}]
