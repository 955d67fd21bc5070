"""Which backend runs: the order of the requests, what an unusable one says, and that the choice can be compiled."""

import logging

import pytest
import torch

from kernels import dispatch
from kernels.dispatch import Backend, KernelUnavailable, available, explain, use_backend
from kernels.window_attention import window_attention

OWN, ALL = "PELLUCID_KERNELS_WINDOW_ATTENTION", "PELLUCID_KERNELS"


@pytest.fixture
def call():
    qkv = torch.rand(1, 5, 6, 3 * 2 * 4)
    return (qkv, torch.rand(2, 16, 3), torch.rand(2, 16, 3)), {"heads": 2, "window": 4}


def chosen(call, **options):
    tensors, keywords = call
    return (
        explain("window_attention", *tensors, **keywords, **options).splitlines()[0].split(":")[1].split(",")[0].strip()
    )


def test_without_a_request_the_first_backend_that_can_run_is_taken(call):
    assert chosen(call) == "sdpa"
    assert available("window_attention", *call[0], **call[1]) == ["chunked", "sdpa", "torch", "reference"]


def test_a_backend_that_declines_a_call_runs_it_when_asked(call):
    text = explain("window_attention", *call[0], **call[1])
    assert "not chunked: windows of 4 in float32 are slower by it" in text
    assert chosen(call, backend="chunked") == "chunked"
    with use_backend("chunked"):
        assert chosen(call) == "chunked"


def test_the_call_argument_beats_the_context_beats_the_variables(call, monkeypatch):
    monkeypatch.setenv(ALL, "sdpa")
    assert chosen(call) == "sdpa"
    monkeypatch.setenv(OWN, "torch")
    assert chosen(call) == "torch"
    with use_backend("window_attention", "reference"):
        assert chosen(call) == "reference"
        assert chosen(call, backend="sdpa") == "sdpa"
    assert chosen(call) == "torch"


def test_the_variables_are_read_at_each_call(call, monkeypatch):
    monkeypatch.setenv(OWN, "reference")
    assert chosen(call) == "reference"
    monkeypatch.delenv(OWN)
    assert chosen(call) == "sdpa"


@pytest.mark.parametrize("request_auto", ["argument", "context", "variable"])
def test_auto_at_any_step_ends_the_search(call, monkeypatch, request_auto):
    monkeypatch.setenv(ALL, "reference")
    if request_auto == "argument":
        assert chosen(call, backend="auto") == "sdpa"
    elif request_auto == "variable":
        monkeypatch.setenv(OWN, "auto")
        assert chosen(call) == "sdpa"
    else:
        with use_backend("auto"):
            assert chosen(call) == "sdpa"


def test_a_request_for_all_operators_passes_by_those_without_that_backend(monkeypatch):
    monkeypatch.setenv(ALL, "sdpa")
    assert "torch, chosen automatically" in explain("layer_norm2d")
    with use_backend("flash"):
        assert "torch, chosen automatically" in explain("layer_norm2d")


def test_the_innermost_context_decides_and_ends_with_its_block(call):
    with use_backend("window_attention", "torch"):
        with use_backend("reference"):
            assert chosen(call) == "reference"
        assert chosen(call) == "torch"
    with pytest.raises(RuntimeError), use_backend("torch"):
        raise RuntimeError
    assert chosen(call) == "sdpa"


def test_the_chosen_backend_is_the_one_that_runs(call, monkeypatch):
    ran = []
    backends = tuple(
        Backend(b.name, lambda *t, _name=b.name, **o: ran.append(_name), b.supports, b.why, b.declines)
        for b in dispatch._OPS["window_attention"]
    )
    monkeypatch.setitem(dispatch._OPS, "window_attention", backends)
    tensors, keywords = call
    window_attention(*tensors, **keywords)
    window_attention(*tensors, **keywords, backend="torch")
    with use_backend("reference"):
        window_attention(*tensors, **keywords)
    assert ran == ["sdpa", "torch", "reference"]


@pytest.mark.parametrize(
    ("ask", "who"),
    [
        (lambda patch: {"backend": "flash"}, r"backend='flash'"),
        (lambda patch: patch.setenv(OWN, "flash"), f"{OWN}=flash"),
        (lambda patch: patch.setenv(ALL, "flash"), f"{ALL}=flash"),
    ],
    ids=["argument", "own variable", "variable for all"],
)
def test_a_backend_that_was_asked_for_and_cannot_run_says_who_why_and_what_would_work(call, monkeypatch, ask, who):
    tensors, keywords = call
    keywords |= ask(monkeypatch) or {}
    with pytest.raises(KernelUnavailable) as caught:
        window_attention(*tensors, **keywords)
    message = str(caught.value)
    assert who in message
    assert "pellucid[flash]" in message
    assert "needs a CUDA tensor, this one is on cpu" in message
    assert "Usable now: chunked, sdpa, torch, reference" in message


def test_a_context_that_cannot_be_obeyed_raises_and_is_named(call):
    tensors, keywords = call
    with use_backend("flash"), pytest.raises(KernelUnavailable, match=r"use_backend\('flash'\)"):
        window_attention(*tensors, **keywords)


def test_explain_gives_a_reason_for_each_backend(call):
    tensors, keywords = call
    text = explain("window_attention", *tensors, **keywords, backend="torch")
    assert text.startswith("window_attention: torch, backend='torch'")
    assert "not flash: the package flash-attn is not installed" in text
    assert "not sdpa: would work" in text
    assert "cannot run" in explain("window_attention", *tensors, **keywords, backend="flash")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: available("window_atention"), "did you mean window_attention"),
        (
            lambda: explain("window_attention", backend="tritn"),
            "Known: triton, flash, chunked, .*reference, auto",
        ),
        (lambda: use_backend("window_attention", "sdpaa").__enter__(), "did you mean sdpa"),
        (lambda: use_backend("referense").__enter__(), "did you mean reference"),
        (lambda: use_backend("window", "torch").__enter__(), "Known: .*window_attention"),
        (lambda: dispatch.register("x", (Backend("fast", print, print, ""),)), "unknown backend 'fast'"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(ask, message):
    with pytest.raises(ValueError, match=message):
        ask()


@pytest.mark.parametrize("variable", [OWN, ALL])
def test_an_unknown_name_in_a_variable_is_an_error_that_names_the_variable(call, monkeypatch, variable):
    monkeypatch.setenv(variable, "fastest")
    with pytest.raises(ValueError, match=f"'fastest', asked for by {variable}=fastest"):
        chosen(call)


def test_an_operator_that_nothing_supports_lists_the_reasons(monkeypatch):
    monkeypatch.setitem(dispatch._OPS, "layer_norm2d", (Backend("torch", print, lambda *t, **o: "too cold", ""),))
    with pytest.raises(KernelUnavailable, match="torch: too cold"):
        dispatch.run("layer_norm2d", None, torch.rand(1))


def test_a_decision_is_logged_once(call, caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_decisions", {})
    tensors, keywords = call
    with caplog.at_level(logging.INFO, logger="pellucid"):
        for _ in range(3):
            window_attention(*tensors, **keywords)
        window_attention(*tensors, **keywords, backend="torch")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in lines] == ["window_attention runs by sdpa", "window_attention runs by torch"]


def test_the_choice_is_traced_by_the_compiler_and_follows_a_later_request(call, monkeypatch):
    tensors, keywords = call
    monkeypatch.setattr(dispatch, "_decisions", {})

    def attend(*tensors):
        return window_attention(*tensors, **keywords)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*tensors), attend(*tensors)
    torch.testing.assert_close(found, expected)
    with use_backend("window_attention", "flash"), pytest.raises(Exception, match="cannot run this call"):
        compiled(*tensors)
    with use_backend("reference"):
        torch.testing.assert_close(compiled(*tensors), expected)


def test_a_context_inside_compiled_code_works(call):
    tensors, keywords = call

    def attend(*tensors):
        with use_backend("window_attention", "torch"):
            return window_attention(*tensors, **keywords)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), attend(*tensors))


def test_autocast_does_not_reach_into_an_operator(call):
    tensors, keywords = call
    for backend in available("window_attention", *tensors, **keywords):
        expected = window_attention(*tensors, **keywords, backend=backend)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(
                window_attention(*tensors, **keywords, backend=backend), expected, rtol=0, atol=0
            )


def test_an_inner_block_equal_to_an_outer_one_leaves_the_one_between():
    with use_backend("reference"), use_backend("torch"):
        with use_backend("reference"):
            pass
        assert dispatch.requested("layer_norm2d") == "torch"
