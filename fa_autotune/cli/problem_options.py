"""The options by which `tune` and `bench` name problems."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from fa_autotune.cli.values import FilePath, WholeNumber
from fa_autotune.problem.family import DType
from fa_autotune.problem.models import (
    DEFAULT_SEQLENS,
    DEFAULT_TOKENS,
    KNOWN_MODELS,
    paper_problems,
    problems_for_model,
    problems_from_hf_config,
)
from fa_autotune.problem.problem import AttentionProblem

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
_DTYPES = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16, "fp32": DType.FLOAT32}

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--problem", "problem_texts", multiple=True, help="Such as 4x32x8x4096x4096x128,causal; may be repeated."
    ),
    click.option("--model", help=f"The problems of a model: {', '.join(KNOWN_MODELS)}."),
    click.option("--hf-config", type=FilePath(), help="The problems of a transformers config.json."),
    click.option("--paper", is_flag=True, help="The list that the published results are measured on."),
    click.option(
        "--seqlens",
        help=f"Lengths for --model and --hf-config, such as 512,2048. [default: {','.join(map(str, DEFAULT_SEQLENS))}]",
    ),
    click.option(
        "--batch-size",
        type=WholeNumber(min=1),
        help=f"Batch for --model and --hf-config. [default: {DEFAULT_TOKENS} tokens in all]",
    ),
    click.option("--dtype", type=click.Choice(list(_DTYPES)), help="For --model and --hf-config. [default: bf16]"),
)


def problem_options(command: CommandT) -> CommandT:
    """Give a command the options that `named_problems` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def named_problems(
    *,
    problem_texts: Sequence[str],
    model: str | None,
    hf_config: Path | None,
    paper: bool,
    seqlens: str | None,
    batch_size: int | None,
    dtype: str | None,
) -> list[AttentionProblem]:
    """All problems that the options name, each once; none where nothing is named."""
    if model is None and hf_config is None and (seqlens, batch_size, dtype) != (None, None, None):
        raise click.UsageError("--seqlens, --batch-size and --dtype shape --model and --hf-config; name one of these")
    options: dict[str, Any] = {
        "seqlens": DEFAULT_SEQLENS if seqlens is None else _lengths(seqlens),
        "batch_size": batch_size,
        "dtype": _DTYPES[dtype or "bf16"],
    }
    problems = [AttentionProblem.parse(text) for text in problem_texts]
    if model is not None:
        problems += problems_for_model(model, **options)
    if hf_config is not None:
        problems += problems_from_hf_config(hf_config, **options)
    return list(dict.fromkeys(problems + (paper_problems() if paper else [])))


def _lengths(text: str) -> list[int]:
    if not re.fullmatch(r"[0-9]{1,10}(,[0-9]{1,10})*", text.replace(" ", "")):
        raise click.BadParameter(f"{text!r} is not lengths like 512,2048", param_hint="--seqlens")
    return [int(word) for word in text.replace(" ", "").split(",")]
