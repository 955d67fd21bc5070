"""Output that cannot be shown, or that nobody reads."""

import io
import os

import pytest

from models.screen import Screen


@pytest.mark.parametrize(
    ("encoding", "text", "expected"),
    [
        ("utf-8", os.fsdecode(b"caf\xe9 \xc3\xbc.png"), b"caf\\udce9 \xc3\xbc.png"),
        ("ascii", "für.png", b"f\\xfcr.png"),
    ],
    ids=["no text", "ascii"],
)
def test_the_name_of_a_file_can_always_be_told(encoding, text, expected):
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, errors="strict")
    screen = Screen(stream)
    assert screen.write(text) == len(text)
    screen.flush()
    assert written.getvalue() == expected
