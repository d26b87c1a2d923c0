"""What may be tried: variants by the kind of their template."""

import pytest

from fa_autotune.paths import templates_dir
from fa_autotune.space.candidate import CompileForm, Variant
from fa_autotune.space.registry import VARIANTS


@pytest.mark.parametrize("variant", Variant)
def test_gluon_is_what_its_templates_are_written_in(variant: Variant) -> None:
    names = {spec.template for spec in VARIANTS if spec.variant is variant}
    texts = [(templates_dir() / name).read_text() for name in names]
    assert texts
    assert {"@gluon.jit" in text for text in texts} == {variant.is_gluon}


def test_words_that_are_stored_stay_as_they_are() -> None:
    assert [variant.value for variant in Variant] == ["portable", "tma", "hopper_ws", "hopper_wide"]
    assert [form.value for form in CompileForm] == ["aligned", "general"]
