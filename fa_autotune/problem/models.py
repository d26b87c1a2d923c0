"""Problems that people name rather than write out: those of a model, of a published list, or of this machine.

Causal models are decoder-only language models in prefill (seqlen_q = seqlen_k); the others see both ways. Features that
no kernel serves yet (sliding windows, softcap) change no shape and are left out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fa_autotune.errors import InvalidProblemError
from fa_autotune.paths import expanded
from fa_autotune.problem.family import AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape

DEFAULT_SEQLENS = (1024, 2048, 4096, 8192)
DEFAULT_TOKENS = 16384  # batch_size × seqlen: enough work to fill a large GPU at any length
MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAttention:
    """The attention of one layer of a model. `causal` is false for encoders."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool = True


def _model(num_q_heads: int, num_kv_heads: int, head_dim: int, *, causal: bool = True) -> ModelAttention:
    return ModelAttention(
        num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, head_dim_v=head_dim, causal=causal
    )


# From the models' published configurations.
KNOWN_MODELS: dict[str, ModelAttention] = {
    "bert-base": _model(12, 12, 64, causal=False),
    "bert-large": _model(16, 16, 64, causal=False),
    "gemma-2-2b": _model(8, 4, 256),
    "gemma-2-9b": _model(16, 8, 256),
    "gemma-2-27b": _model(32, 16, 128),
    "gpt2": _model(12, 12, 64),
    "gpt2-xl": _model(25, 25, 64),
    "llama-2-7b": _model(32, 32, 128),
    "llama-2-13b": _model(40, 40, 128),
    "llama-3-8b": _model(32, 8, 128),
    "llama-3-70b": _model(64, 8, 128),
    "llama-3.2-1b": _model(32, 8, 64),
    "llama-3.2-3b": _model(24, 8, 128),
    "mistral-7b": _model(32, 8, 128),
    "mixtral-8x7b": _model(32, 8, 128),
    "phi-3-mini": _model(32, 32, 96),
    "qwen2.5-7b": _model(28, 4, 128),
    "qwen3-0.6b": _model(16, 8, 128),
    "qwen3-8b": _model(32, 8, 128),
    "qwen3-32b": _model(64, 8, 128),
    "vit-base": _model(12, 12, 64, causal=False),
}

_ENCODERS = (
    "albert",
    "bert",
    "camembert",
    "deberta-v2",
    "dinov2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
    "siglip",
    "vit",
    "xlm-roberta",
)


def known_model(name: str) -> ModelAttention:
    """Look a model up; InvalidProblemError names the close matches, or all."""
    wanted = name.lower().replace("_", "-").replace(" ", "-") if isinstance(name, str) else ""
    if found := KNOWN_MODELS.get(wanted):
        return found
    close = get_close_matches(wanted, KNOWN_MODELS, n=4)
    hint = f"did you mean {' or '.join(close)}" if close else f"known are: {', '.join(KNOWN_MODELS)}"
    raise InvalidProblemError(f"{name!r} is not a known model; {hint}; otherwise give its config.json or --problem")


def problems_for_model(
    name: str,
    *,
    seqlens: Sequence[int] = DEFAULT_SEQLENS,
    batch_size: int | None = None,
    tokens: int = DEFAULT_TOKENS,
    dtype: DType = DType.BFLOAT16,
    passes: Sequence[Pass] = (Pass.FWD,),
) -> list[AttentionProblem]:
    """The problems of a known model, one per pass and length.

    The batch is `batch_size` where given, else as many sequences as `tokens` holds, at least one.
    """
    return problems_for(
        known_model(name), seqlens=seqlens, batch_size=batch_size, tokens=tokens, dtype=dtype, passes=passes
    )


def problems_from_hf_config(
    path: Path | str,
    *,
    seqlens: Sequence[int] = DEFAULT_SEQLENS,
    batch_size: int | None = None,
    tokens: int = DEFAULT_TOKENS,
    dtype: DType = DType.BFLOAT16,
    passes: Sequence[Pass] = (Pass.FWD,),
) -> list[AttentionProblem]:
    """The problems of a transformers `config.json` (or the folder that holds it)."""
    return problems_for(
        model_from_hf_config(path), seqlens=seqlens, batch_size=batch_size, tokens=tokens, dtype=dtype, passes=passes
    )


def problems_for(
    model: ModelAttention,
    *,
    seqlens: Sequence[int],
    batch_size: int | None,
    tokens: int,
    dtype: DType,
    passes: Sequence[Pass],
) -> list[AttentionProblem]:
    """The problems of a model's attention, one per pass and length."""
    if not seqlens:
        raise InvalidProblemError("there is no sequence length; name at least one, such as 4096")
    return [
        _problem(
            batch_size=max(1, tokens // max(1, seqlen)) if batch_size is None else batch_size,
            num_q_heads=model.num_q_heads,
            num_kv_heads=model.num_kv_heads,
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            head_dim=model.head_dim,
            head_dim_v=model.head_dim_v,
            causal=model.causal,
            dtype=dtype,
        ).for_pass(kernel_pass)
        for kernel_pass in passes
        for seqlen in seqlens
    ]


def model_from_hf_config(path: Path | str) -> ModelAttention:
    """Heads, head dims and direction from a transformers `config.json`; InvalidProblemError says what is missing."""
    path = expanded(path)
    if path.is_dir():
        path = path / "config.json"
    config = _read_config(path)
    if isinstance(text := config.get("text_config"), dict):  # models of several modalities nest the language model
        config = text
    if config.get("is_encoder_decoder"):
        raise InvalidProblemError(
            f"{path} describes an encoder and a decoder, whose attentions differ; name each with --problem"
        )
    num_q_heads = _first_int(path, config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    if "qk_nope_head_dim" in config:
        head_dim = _first_int(path, config, "qk_nope_head_dim") + _first_int(path, config, "qk_rope_head_dim")
        head_dim_v = _first_int(path, config, "v_head_dim")
        num_kv_heads = num_q_heads  # latent attention in prefill: keys and values are expanded to all heads
    else:
        head_dim = head_dim_v = _head_dim(path, config, num_q_heads)
        num_kv_heads = _num_kv_heads(path, config, num_q_heads)
    model_type = config.get("model_type")
    encoder = model_type in _ENCODERS and not config.get("is_decoder", False)
    return ModelAttention(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=not encoder,
    )


def default_problems(dtype: DType = DType.BFLOAT16) -> list[AttentionProblem]:
    """What a GPU is tuned for where nothing is named: head_dim 64 and 128, full and causal, three lengths."""
    return [
        _square(tokens=DEFAULT_TOKENS, seqlen=seqlen, head_dim=head_dim, causal=causal, dtype=dtype)
        for head_dim in (64, 128)
        for causal in (False, True)
        for seqlen in (1024, 4096, 16384)
    ]


def paper_problems() -> list[AttentionProblem]:
    """The list of FlashAttention's papers (16,384 tokens, 2048 columns of heads), two GQA shapes and head_dim 256."""
    squares = [
        _square(tokens=16384, seqlen=seqlen, head_dim=head_dim, causal=causal)
        for head_dim in (64, 128)
        for causal in (False, True)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    ]
    others = (
        "4x8x8x4096x4096x256",
        "4x8x8x4096x4096x256,causal",
        "4x32x8x4096x4096x128,causal",
        "2x64x8x8192x8192x128,causal",
    )
    return [*squares, *(AttentionProblem.parse(text) for text in others)]


def tiny_problems() -> list[AttentionProblem]:
    """Problems that Triton's interpreter runs in milliseconds: causal, ragged and GQA ones among them."""
    texts = (
        "1x2x2x64x64x32,causal",
        "1x2x2x37x37x32,causal",
        "1x2x1x64x64x16",
        "1x2x2x33x64x16,fp16",
    )
    return [AttentionProblem.parse(text) for text in texts]


def _square(
    *, tokens: int, seqlen: int, head_dim: int, causal: bool, dtype: DType = DType.BFLOAT16
) -> AttentionProblem:
    heads = 2048 // head_dim
    return _problem(
        batch_size=tokens // seqlen,
        num_q_heads=heads,
        num_kv_heads=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        head_dim_v=head_dim,
        causal=causal,
        dtype=dtype,
    )


def _problem(*, head_dim: int, head_dim_v: int, causal: bool, dtype: DType, **lengths: int) -> AttentionProblem:
    family = AttentionFamily(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        bounded_right=causal,
        access=strongest_access(dtype, head_dim, head_dim_v),
    )
    return AttentionProblem(family=family, shape=AttentionShape(**lengths))


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise InvalidProblemError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes: no model's config.json")
        config = json.loads(content)
    except OSError as error:
        raise InvalidProblemError(f"{path} can't be read: {error.strerror}; name a transformers config.json") from error
    except (ValueError, RecursionError) as error:
        raise InvalidProblemError(f"{path} is not JSON: {error}; name a transformers config.json") from None
    if not isinstance(config, dict):
        raise InvalidProblemError(f"{path} is not a JSON object; name a transformers config.json")
    return config


def _first_int(path: Path, config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise InvalidProblemError(f"{name}={value!r} in {path} is not a positive integer")
        return value
    raise InvalidProblemError(f"{path} does not say {' or '.join(names)}; name the problems with --problem instead")


def _head_dim(path: Path, config: Mapping[str, Any], num_q_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _first_int(path, config, "head_dim")
    hidden_size = _first_int(path, config, "hidden_size", "n_embd", "d_model", "dim")
    if hidden_size % num_q_heads:
        raise InvalidProblemError(
            f"hidden_size={hidden_size} in {path} is no multiple of {num_q_heads} heads, and head_dim is not said; "
            "name the problems with --problem instead"
        )
    return hidden_size // num_q_heads


def _num_kv_heads(path: Path, config: Mapping[str, Any], num_q_heads: int) -> int:
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if any(config.get(name) is not None for name in names):
        return _first_int(path, config, *names)
    return 1 if config.get("multi_query") is True else num_q_heads
