import json

import pytest

from fa_autotune.errors import InvalidProblemError
from fa_autotune.problem.family import DType
from fa_autotune.problem.models import (
    KNOWN_MODELS,
    default_problems,
    model_from_hf_config,
    paper_problems,
    problems_for_model,
    problems_from_hf_config,
    tiny_problems,
)
from fa_autotune.problem.problem import AttentionProblem

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.fixture
def write_config(tmp_path):
    def write(config):
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    return write


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_every_known_model_gives_valid_problems(name):
    assert len(problems_for_model(name, seqlens=(512, 1024))) == 2


def test_llama_3_8b_at_4096_is_gqa_prefill():
    assert problems_for_model("llama-3-8b", seqlens=[4096]) == [AttentionProblem.parse("4x32x8x4096x4096x128,causal")]


def test_an_encoder_is_not_causal():
    assert not problems_for_model("bert-base")[0].family.bounded_right


def test_a_models_name_may_be_spelled_with_capitals_and_underscores():
    assert problems_for_model("Llama_3_8B") == problems_for_model("llama-3-8b")


def test_a_batch_size_overrides_the_tokens():
    assert problems_for_model("gpt2", seqlens=[1024], batch_size=3)[0].shape.batch_size == 3


def test_a_length_above_the_tokens_gives_a_batch_of_one():
    assert problems_for_model("gpt2", seqlens=[65536])[0].shape.batch_size == 1


def test_a_length_of_zero_is_refused():
    with pytest.raises(InvalidProblemError, match="seqlen_q=0"):
        problems_for_model("gpt2", seqlens=[0])


def test_no_length_at_all_is_refused():
    with pytest.raises(InvalidProblemError, match="no sequence length"):
        problems_for_model("gpt2", seqlens=[])


def test_a_misspelled_model_is_answered_with_close_names():
    with pytest.raises(InvalidProblemError, match=r"did you mean .*llama-3-8b"):
        problems_for_model("lama-3-8b")


def test_an_unknown_model_is_answered_with_all_names():
    with pytest.raises(InvalidProblemError, match=r"known are: .*qwen3-8b"):
        problems_for_model("zzzzz")


def test_a_config_gives_the_same_problems_as_the_known_model(write_config):
    assert problems_from_hf_config(write_config(LLAMA)) == problems_for_model("llama-3-8b")


def test_a_folder_with_a_config_may_be_named(write_config):
    assert model_from_hf_config(write_config(LLAMA).parent) == KNOWN_MODELS["llama-3-8b"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"head_dim": 64}, (32, 8, 64, 64, True)),
        ({"num_key_value_heads": None}, (32, 32, 128, 128, True)),
        ({"num_key_value_heads": None, "multi_query": True}, (32, 1, 128, 128, True)),
        ({"model_type": "roberta"}, (32, 8, 128, 128, False)),
        ({"model_type": "roberta", "is_decoder": True}, (32, 8, 128, 128, True)),
        ({"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, (32, 32, 192, 128, True)),
        ({"text_config": {"n_head": 4, "n_embd": 256}}, (4, 4, 64, 64, True)),
    ],
    ids=["head_dim", "MHA", "MQA", "encoder", "encoder as decoder", "latent attention", "nested"],
)
def test_a_configs_spelling_is_understood(changes, expected, write_config):
    model = model_from_hf_config(write_config({**LLAMA, **changes}))
    assert (model.num_q_heads, model.num_kv_heads, model.head_dim, model.head_dim_v, model.causal) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ({"model_type": "mamba"}, "does not say num_attention_heads"),
        ({**LLAMA, "num_attention_heads": "32"}, "num_attention_heads='32'"),
        ({**LLAMA, "num_attention_heads": True}, "num_attention_heads=True"),
        ({**LLAMA, "hidden_size": 4097}, "no multiple of 32 heads"),
        ({**LLAMA, "is_encoder_decoder": True}, "an encoder and a decoder"),
        ({**LLAMA, "num_key_value_heads": 5}, "no multiple of num_kv_heads=5"),
        ({**LLAMA, "head_dim": 1024}, "head_dim=1024"),
        (" " * (2**20 + 1), "larger than"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_with_the_reason(config, message, write_config):
    with pytest.raises(InvalidProblemError, match=message):
        problems_from_hf_config(write_config(config))


def test_a_config_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidProblemError, match="can't be read"):
        model_from_hf_config(tmp_path / "nothing.json")


@pytest.mark.parametrize("problems", [default_problems(), paper_problems(), tiny_problems()])
def test_no_list_names_a_problem_twice(problems):
    assert len(set(problems)) == len(problems)


def test_the_published_list_has_28_problems_of_16384_tokens():
    tokens = [problem.shape.batch_size * problem.shape.seqlen_q for problem in paper_problems()]
    assert tokens == [16384] * 28


def test_the_published_list_has_2048_columns_of_query_heads_but_for_gqa():
    columns = [p.shape.num_q_heads * p.family.head_dim for p in paper_problems() if p.shape.gqa_group_size == 1]
    assert columns == [2048] * 26


def test_tiny_problems_are_small_enough_for_the_interpreter():
    assert all(max(p.shape.seqlen_q, p.shape.seqlen_k) <= 64 for p in tiny_problems())


def test_the_default_list_can_be_had_in_float16():
    assert {problem.family.dtype for problem in default_problems(DType.FLOAT16)} == {DType.FLOAT16}
