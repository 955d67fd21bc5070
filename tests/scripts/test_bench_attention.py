"""python -m scripts.bench_attention: what it writes agrees, and what it cannot do is said in words."""

import json
from pathlib import Path

import pytest
import torch

from data.io import read_image, write_image
from kernels.coreset_attention import cases, wildcat_attention
from models import runtime
from scripts import attention_inputs, attention_report, bench_attention
from scripts import attention_peers as peers

QUICKSTART = Path(__file__).parents[2] / "datasets" / "quickstart" / "val"
SMALL = ("--n", "256", "--sides", "16", "--windows", "12", "--rank", "16", "--bins", "4", "--photos", "PHOTO")


@pytest.fixture
def bench(tmp_path, capfd):
    write_image(tmp_path / "photo.png", read_image(QUICKSTART / "coffee.png")[:40, :50])

    def call(*words):
        words = [str(tmp_path / "photo.png") if word == "PHOTO" else word for word in ("--quick", *words)]
        capfd.readouterr()
        code = runtime.run(bench_attention.main, words)
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return call


def test_table_and_json_agree_and_the_plot_is_a_picture(bench, tmp_path):
    code, printed = bench(*SMALL, "--out", str(tmp_path / "out"))
    assert code == 0, printed
    found = json.loads((tmp_path / "out/results.json").read_text())
    tables = (tmp_path / "out/results.md").read_text()
    lines = [line for line in tables.splitlines() if line.startswith("|") and not line.startswith(("|---", "|  |"))]
    rows = [row for case in found["cases"] for row in case["rows"]]
    assert [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines] == [
        attention_report.cells(row) for row in rows
    ]
    for row in rows:
        for cell in attention_report.cells(row):
            assert cell in printed
    assert read_image(tmp_path / "out/results.png").shape[2] in (3, 4)


def test_every_way_to_attend_is_in_the_results_with_what_made_them(bench, tmp_path):
    bench(*SMALL, "--out", str(tmp_path / "out"), "--threads", "1")
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert [case["kind"] for case in found["cases"]] == ["gaussian", "photo", "window"]
    for case in found["cases"]:
        rows = {row["method"]: row for row in case["rows"]}
        assert set(rows) == {
            *("exact (SDPA)", "mean of v", "Taylor, 1st order", "uniform keys", "averaged keys"),
            *("Nystrom, 6 steps", "Nystrom, pinv", "WildCat"),
        }
        assert rows["exact (SDPA)"]["ratio"] == 1
        assert rows["exact (SDPA)"]["relative_error"] < 1e-4
        assert rows["mean of v"]["relative_error"] == pytest.approx(1, abs=1e-4)
        assert len(case["gammas"]) == 1
    assert found["machine"]["threads"] == 1
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert found["settings"]["rank"] == [16]
    assert any("idle machine" in note for note in found["notes"])


def test_a_run_without_a_folder_writes_nothing(bench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    code, printed = bench("--inputs", "gaussian", *SMALL)
    assert (code, set(tmp_path.rglob("*"))) == (0, before)
    assert "256 keys, d 32" in printed


def test_results_are_overwritten_only_by_force(bench, tmp_path):
    words = ("--inputs", "gaussian", *SMALL, "--out", str(tmp_path / "out"))
    assert bench(*words)[0] == 0
    (tmp_path / "out/results.md").write_text("mine")
    code, printed = bench(*words)
    assert code == 2
    assert "results.md" in printed
    assert "--force" in printed
    assert (tmp_path / "out/results.md").read_text() == "mine"
    assert bench(*words, "--force")[0] == 0
    assert (tmp_path / "out/results.md").read_text() != "mine"


def test_an_interrupted_run_leaves_what_it_has_found(bench, tmp_path, monkeypatch):
    measure, seen = bench_attention.measure, []

    def interrupted(case, ways, args):
        if case.kind == "photo":
            raise KeyboardInterrupt
        seen.append(case.kind)
        return measure(case, ways, args)

    monkeypatch.setattr(bench_attention, "measure", interrupted)
    code, _ = bench(*SMALL, "--out", str(tmp_path / "out"))
    assert code == 130
    found = json.loads((tmp_path / "out/results.json").read_text())["cases"]
    assert [case["kind"] for case in found] == seen == ["gaussian"]


def test_wrong_options_leave_no_folder(bench, tmp_path):
    assert bench(*SMALL, "--rank", "512", "--out", str(tmp_path / "out"))[0] == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--inputs", "gausian"), "unknown 'gausian'; did you mean gaussian? (known: gaussian, photo, window)"),
        (("--crops", "centre"), "unknown 'centre' (known: middle, corner)"),
        (("--rank", "0"), "--rank must be at least 1, got 0"),
        (("--sides", "1,8"), "--sides must be at least 2, got 1,8"),
        (("--std", "0"), "--std must be above 0, got 0"),
        (("--amplitudes", "nan"), "--amplitudes must be at least 0, got nan"),
        (("--threads", "-1"), "must not be negative"),
        (("--rank", "512"), "--rank 512 is more than the 144 keys of window, middle 12 x 12"),
        (("--rank", "17"), "17 averages are not tiles of a grid of 16 x 16"),
        (("--sides", "60"), "no photograph is as large as 60 x 60; give others with --photos"),
        (("--out", "PHOTO"), "the folder cannot be made"),
    ],
)
def test_wrong_options_are_refused_in_words(bench, words, message):
    code, printed = bench(*SMALL, *words)
    assert code == 2, printed
    assert printed.count(message) == 1


def test_words_where_numbers_belong_are_refused(bench, capfd):
    with pytest.raises(SystemExit, match="2"):
        bench("--rank", "64,many")
    assert "'64,many' are not whole numbers separated by commas" in capfd.readouterr().err


@pytest.mark.parametrize(("content", "message"), [(None, "no pictures in"), (b"no picture", "cannot read")])
def test_photographs_that_are_none_are_named(bench, tmp_path, content, message):
    place = tmp_path / "place"
    place.mkdir()
    if content:
        (place / "a.png").write_bytes(content)
    code, printed = bench(*SMALL, "--photos", str(place))
    assert code == 3
    assert message in printed
    assert str(place) in printed


def test_what_is_left_out_is_said(bench, tmp_path):
    write_image(tmp_path / "small.png", read_image(QUICKSTART / "fig.png")[:14, :30])
    more = ("--photos", str(tmp_path / "photo.png"), str(tmp_path / "small.png"))
    code, printed = bench(*SMALL, "--rank", "2,16", *more)
    assert code == 0, printed
    assert "2 keys in 4 bins" in printed
    ways, _ = bench_attention.methods([2, 16], [4])
    assert [way.rank for way in ways if way.name == "WildCat"] == [16]
    assert "smaller than 16 x 16, so left out there: small.png" in printed


def test_usual_photographs_are_the_held_out_ones():
    assert {path.name for path in QUICKSTART.iterdir()} <= set(attention_inputs.read_photos(None))


def test_a_slow_method_has_fewer_turns():
    case = attention_inputs.Case("gaussian", "", 8, 1.0, None, (lambda: cases.gaussian_inputs(8, 2),))
    rows = [bench_attention.Row(bench_attention.methods([2], [])[0][0]) for _ in range(2)]
    rows[0].seconds.append(30.0)
    bench_attention.time_all(case, rows, bench_attention.parse(["--repeats", "3"]))
    assert [len(row.seconds) for row in rows] == [1, 3]


def test_a_result_that_is_not_finite_is_told():
    row = bench_attention.Row(bench_attention.Method("lost", lambda: None), [float("nan")], [float("inf")], [0.5])
    case = attention_inputs.Case("gaussian", "", 8, 1.0, None, ())
    (found,) = attention_report.entry(case, [row], 8, [1.0])["rows"]
    assert found["relative_error"] is None
    assert attention_report.cells(found)[3:6] == ("not finite", "", "not finite")


def test_a_crop_of_one_colour_is_named(bench, tmp_path):
    photo = read_image(QUICKSTART / "fig.png")[:40, :40].copy()
    photo[:20, :20] = 90
    write_image(tmp_path / "flat.png", photo)
    code, printed = bench(*SMALL, "--photos", str(tmp_path / "flat.png"), "--crops", "corner")
    assert code == 3
    assert "flat.png: the 16 x 16 crop has one colour" in printed
    assert "--crops" in printed


def test_on_photographs_wildcat_loses_far_less_than_as_many_keys_or_averages():
    found = []
    grid, settings = (64, 64), {"scale": 32**-0.5, "rank": 256}
    for seed, photo in enumerate(attention_inputs.read_photos([str(QUICKSTART)]).values()):
        q, k, v = cases.photo_inputs(photo, side=64, d=32, seed=seed)
        exact = peers.exact_attention(q, k, v, scale=settings["scale"])
        q, k, v = q.float(), k.float(), v.float()
        outs = (
            wildcat_attention(q, k, v, bins=16, grid=grid, **settings),
            peers.uniform_subset(q, k, v, **settings),
            peers.pooled_attention(q, k, v, grid=grid, **settings),
        )
        found.append([cases.relative_error(out, exact, v) for out in outs])
    wildcat, uniform, averaged = (sum(errors) / len(errors) for errors in zip(*found, strict=True))
    assert wildcat < 0.015
    assert wildcat < uniform / 4
    assert wildcat < averaged / 2
