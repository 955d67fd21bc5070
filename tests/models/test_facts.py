"""What a network states about itself is checked before anything relies on it."""

import re
from types import SimpleNamespace

import pytest

from models.facts import wrong_facts


@pytest.mark.parametrize(
    ("fact", "value", "told"),
    [
        ("scale", 2.0, "is 2.0, but it must say by how much the network enlarges: a whole number from 1"),
        ("scale", True, "is True"),
        ("scale", [2], "is a list"),
        ("multiple_of", 0, "is 0, but it must say what the sides of its input must be multiples of"),
        ("minimum", None, "is None"),
        ("minimum", "16", "is '16'"),
        ("halo", -1, "is -1, .* or None for the whole picture: a whole number from 0"),
        ("tile_multiple", (8, 8), "is a tuple"),
        ("in_channels", 0.5, "is 0.5"),
    ],
)
def test_a_fact_of_the_wrong_kind_is_told_in_words(fact, value, told):
    (sentence,) = wrong_facts(SimpleNamespace(**{fact: value}))
    assert sentence.startswith(f"the attribute {fact} of SimpleNamespace is ")
    assert re.search(told, sentence), sentence


def test_right_facts_and_absent_ones_are_taken():
    assert wrong_facts(SimpleNamespace()) == []
    right = {"scale": 2, "multiple_of": 8, "minimum": 1, "halo": None, "tile_multiple": 64, "in_channels": 3}
    assert wrong_facts(SimpleNamespace(**right)) == []
    assert wrong_facts(SimpleNamespace(halo=0, in_channels=None)) == []


def test_all_wrong_facts_are_told_at_once(tiny, command, own_registry):
    network = own_registry.get("Tiny")
    own_registry.register(type("Vague", (network,), {"halo": "far", "multiple_of": 1.5}))
    code, printed = command("train.py", {**tiny, "network_g": {"type": "Vague"}})
    assert code == 2
    printed = " ".join(printed.split())
    assert "the attribute halo of Vague is 'far'" in printed
    assert "the attribute multiple_of of Vague is 1.5" in printed


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        (
            "PELLUCID_KERNELS",
            "tritn",
            "unknown backend 'tritn', asked for by PELLUCID_KERNELS=tritn; did you mean triton?",
        ),
        (
            "PELLUCID_KERNELS_WINDOW_ATTENTION",
            "sdap",
            "unknown backend of window_attention 'sdap', asked for by PELLUCID_KERNELS_WINDOW_ATTENTION=sdap; did you",
        ),
        (
            "PELLUCID_KERNELS_WINDOW_ATENTION",
            "sdpa",
            "unknown operator 'window_atention' in the name of PELLUCID_KERNELS_WINDOW_ATENTION; did you mean",
        ),
        ("PELLUCID_KERNELS", "flash", "the backend flash, asked for by PELLUCID_KERNELS=flash, cannot run this call"),
    ],
)
def test_a_kernel_that_there_is_not_is_told_in_its_own_words(small, command, monkeypatch, variable, value, told):
    monkeypatch.setenv(variable, value)
    code, printed = command("train.py", small, "--dry_run")
    assert code == 2
    assert told in " ".join(printed.split())
    assert "does not take the data" not in printed


def test_so_it_is_in_a_test(small, command, monkeypatch):
    monkeypatch.setenv("PELLUCID_KERNELS", "flash")
    code, printed = command("test.py", small)
    assert code == 2
    assert "error: window_attention: the backend flash, asked for by PELLUCID_KERNELS=flash, cannot run" in printed
    assert "Traceback" not in printed
