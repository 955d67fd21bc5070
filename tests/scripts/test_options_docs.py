"""The table of options says what the schema and the constructors say."""

import pytest

from options import schema
from scripts.options_docs import document, main


@pytest.fixture(scope="module")
def text():
    return document()


@pytest.mark.parametrize(
    "row",
    [
        "| `train.total_iter` | whole number, at least 1 | required | optimizer steps of the whole run |",
        "| `num_gpu` | whole number, at least 0 or auto | auto | 0: CPU; auto: one GPU where there is one |",
        "| `train.nan_guard` | stop or skip or off | stop | at a loss or gradient that is not finite |",
        "| `val.self_ensemble` | true or false | false | average over the 8 flips and rotations |",
        "| `logger.keep_checkpoints` | whole number, at least 1 or ~ | ~ | newest checkpoints to keep, "
        "besides the best; default: all |",
        "| `path.root` | path or ~ | ~ | folder of experiments/, results/ and tb_logger/; default: here |",
        "| `ranks` | whole number or list of (whole number or ~) or ~ | ~ |",
        "| `kernel` | matlab or pillow | matlab |",
        "| `betas` | list of number, number | [0.9, 0.999] |",
        "| `milestones` | list of whole number | required |",
    ],
)
def test_a_row_gives_type_range_default_and_meaning(text, row):
    assert row in text.splitlines()


def test_every_key_of_the_schema_has_a_row(text):
    for key in set(schema.Options.model_fields) - {"file", "datasets"}:
        assert f"| `{key}` |" in text, key
    for key, field in schema.DatasetOptions.model_fields.items():
        assert field.exclude or f"| `datasets.<phase>.{key}` |" in text, key


def test_the_tables_are_printed_and_hold_no_python(text, capsys):
    main([])
    assert capsys.readouterr().out == text
    for piece in ("Annotated", "Optional", "Union[", " at 0x", "<class", "NoneType"):
        assert piece not in text
