"""YAML as people write it."""

import pytest

from options import yaml_file
from options.errors import OptionsError


def read(tmp_path, text):
    file = tmp_path / "run.yml"
    file.write_text(text, encoding="utf-8")
    return yaml_file.read(file)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2E5", 2e5),
        ("-1.5e-3", -1.5e-3),
        (".5", 0.5),
        ("1.", 1.0),
        ("!!float 1e5", 1e5),
        ("-1", -1),
        ("5", 5),
        ("true", True),
        ("~", None),
        ("[1, 2e-1, a]", [1, 0.2, "a"]),
        ("a:b", "a:b"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        # neither octal nor base 60
        ("010", 10),
        ("1:30", "1:30"),
        ("190:20:30.15", "190:20:30.15"),
        ("0x10", 16),
        ("0o10", "0o10"),
        ("1_0", "1_0"),
        ("1_000.5", "1_000.5"),
        ("+5", 5),
        ("on", "on"),
        ("off", "off"),
        ("Off", "Off"),
        ("yes", True),
        ("No", False),
        ("y", "y"),
        ("n", "n"),
        ("'5'", "5"),
        ("null", None),
        (".inf", float("inf")),
    ],
)
def test_values_have_the_type_they_look_like(tmp_path, text, value):
    options, _ = read(tmp_path, f"key: {text}\n")
    assert options["key"] == value
    assert type(options["key"]) is type(value)
    assert yaml_file.value_of(text, "key") == value


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path):
    with pytest.raises(OptionsError, match=r"run\.yml:4: train\.lr stands twice \(first in line 2\)"):
        read(tmp_path, "train:\n  lr: 1\n  steps: 2\n  lr: 3\n")


def test_each_key_knows_its_line(tmp_path):
    _, lines = read(tmp_path, "a:\n  b: 1\n\n  c: [5,\n    6]\n")
    assert lines[("a", "b")] == 2
    assert lines[("a", "c")] == 4
    assert lines[("a", "c", 1)] == 5


@pytest.mark.parametrize(
    "text", ["a: [1, 2", "a: b: c", "\tx: 1", "a: !!python/object/apply:os.system [ls]", "a: *b", "a: \x00"]
)
def test_broken_or_dangerous_yaml_is_an_error_in_words(tmp_path, text):
    with pytest.raises(OptionsError, match=r"not valid YAML"):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["", "just words", "- a\n- b\n"])
def test_a_file_without_sections_is_refused(tmp_path, text):
    with pytest.raises(OptionsError, match="must hold sections"):
        read(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(OptionsError, match=r"there is no option file .*absent\.yml"):
        yaml_file.read(tmp_path / "absent.yml")


def test_a_folder_or_binary_file_is_named(tmp_path):
    (tmp_path / "x.yml").write_bytes(b"\xff\xfe\x00\x80")
    for path in (tmp_path, tmp_path / "x.yml"):
        with pytest.raises(OptionsError, match="cannot be read"):
            yaml_file.read(path)
