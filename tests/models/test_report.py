"""Scores as a table, a CSV file and a curve."""

import csv
import io
import json
import math
import warnings

import cv2
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from models import report
from models.report import SetScores

PROTOCOL = {"psnr": "Y, crop 2, 8 bit", "ssim": "RGB, crop 0, 8 bit"}


@pytest.fixture
def scores():
    """Two pictures, two metrics, bicubic beside them."""
    return SetScores(
        "photos",
        PROTOCOL,
        "bicubic",
        [
            ("a", {"psnr": 30.0, "ssim": 0.9}, {"psnr": 29.0, "ssim": 0.85}),
            ("sub/b", {"psnr": 31.0, "ssim": 0.7}, {"psnr": 31.5, "ssim": 0.75}),
        ],
    )


def shown(results):
    """The table as text, its lines without the frame."""
    console = Console(file=io.StringIO(), width=160)
    console.print(report.table(results))
    return console.file.getvalue()


def row_of(text, picture):
    """The cells of one picture's row."""
    (row,) = [line for line in text.splitlines() if f" {picture} " in line]
    return [cell.strip() for cell in row.replace("┃", "│").split("│")[1:-1]]


def csv_rows(path, results):
    report.write_csv(path, results)
    return list(csv.DictReader(path.open(newline="", encoding="utf-8")))


# means


def test_means_are_over_pictures(scores):
    assert scores.means() == {"psnr": 30.5, "ssim": pytest.approx(0.8)}
    assert scores.baseline_means() == {"psnr": 30.25, "ssim": pytest.approx(0.8)}


def test_a_mean_is_infinite_where_a_picture_is(scores):
    scores.rows.append(("c", {"psnr": math.inf, "ssim": 1.0}, {}))
    assert scores.means()["psnr"] == math.inf
    assert scores.unusual() == ["photos/c: psnr is inf"]


def test_a_mean_is_not_a_number_where_a_picture_has_none(scores):
    scores.rows.append(("c", {"psnr": math.nan, "ssim": 1.0}, {}))
    assert math.isnan(scores.means()["psnr"])
    assert scores.unusual() == ["photos/c: psnr is nan"]


# the CSV file


def test_a_csv_holds_each_picture_each_metric_and_the_means(scores, tmp_path):
    rows = csv_rows(tmp_path / "m.csv", [scores])
    assert [(row["picture"], row["metric"]) for row in rows] == [
        (picture, metric) for picture in ("a", "sub/b", "mean of 2") for metric in ("psnr", "ssim")
    ]
    assert rows[2] == {
        "set": "photos",
        "picture": "sub/b",
        "metric": "psnr",
        "protocol": "Y, crop 2, 8 bit",
        "value": "31.0",
        "baseline": "bicubic",
        "baseline_value": "31.5",
    }
    assert (rows[4]["value"], rows[4]["baseline_value"]) == ("30.5", "30.25")


def test_a_csv_keeps_every_digit(scores, tmp_path):
    scores.rows[0][1]["psnr"] = 100 / 3
    assert float(csv_rows(tmp_path / "m.csv", [scores])[0]["value"]) == 100 / 3


def test_a_csv_leaves_the_baseline_empty_where_there_is_none(tmp_path):
    alone = SetScores("s", PROTOCOL, None, [("a", {"psnr": 1.0}, {})])
    (row, mean) = csv_rows(tmp_path / "m.csv", [alone])
    assert (row["baseline"], row["baseline_value"], mean["baseline_value"]) == ("", "", "")


def test_a_csv_spells_out_infinity(scores, tmp_path):
    scores.rows[0][1]["psnr"] = math.inf
    rows = csv_rows(tmp_path / "m.csv", [scores])
    assert [row["value"] for row in rows if row["metric"] == "psnr"] == ["inf", "31.0", "inf"]


def test_names_with_commas_quotes_and_other_letters_survive_a_csv(scores, tmp_path):
    scores.rows[0] = ('Straße, "nachts"', *scores.rows[0][1:])
    assert csv_rows(tmp_path / "m.csv", [scores])[0]["picture"] == 'Straße, "nachts"'


# the table


def test_a_table_says_how_the_numbers_were_computed(scores):
    assert "psnr: Y, crop 2, 8 bit; ssim: RGB, crop 0, 8 bit" in shown([scores])


def test_a_table_has_a_row_of_means_with_the_gain_over_the_baseline(scores):
    assert row_of(shown([scores]), "mean of 2") == [
        *("photos", "mean of 2"),
        *("30.5000", "30.2500", "+0.2500", "0.8000", "0.8000", "+0.0000"),
    ]


def test_a_table_without_a_baseline_has_no_columns_for_it():
    alone = SetScores("s", {"psnr": "RGB, crop 0, 8 bit"}, None, [("a", {"psnr": 1.0}, {})])
    text = shown([alone])
    assert row_of(text, "a") == ["s", "a", "1.0000"]
    assert "gain" not in text


@pytest.mark.parametrize("name", ["sub/b", "[bold]b", "x[/y]", "[1]", "b\\[", "a:smile:"])
def test_names_stand_in_the_table_as_they_are(name):
    text = shown([SetScores(name, {name: "RGB"}, None, [(name, {name: 30.0}, {})])])
    assert row_of(text, "mean of 1") == [name, "mean of 1", "30.0000"]
    assert [line.split()[1:-1] for line in text.splitlines() if line.count(name) == 2] == [
        [name, "│", name, "│", "30.0000"]
    ]
    assert f"{name}: RGB" in text


def test_two_sets_share_a_table(scores):
    other = SetScores("more", {"psnr": "Y, crop 2, 8 bit"}, None, [("c", {"psnr": 20.0}, {})])
    text = shown([scores, other])
    assert row_of(text, "c") == ["more", "c", "20.0000", "", "", "", "", ""]
    assert row_of(text, "mean of 1")[2] == "20.0000"


def test_infinity_stands_in_the_table(scores):
    scores.rows[0][1]["psnr"] = math.inf
    assert row_of(shown([scores]), "a")[2] == "inf"


# the curve


def steps(count, **losses):
    return [{"kind": "train", "iter": i, "lr": 1e-3, **losses} for i in range(1, count + 1)]


def validation(step, name, value, baseline=None):
    row = {"kind": "val", "iter": step, "set": name, "scores": {"psnr": value}}
    return {**row, "baseline": {"bicubic": {"psnr": baseline}}} if baseline is not None else row


@pytest.fixture
def curve(tmp_path, monkeypatch):
    """``curve(rows)``: draw them without a warning; returns the axes (that of the learning rate left out)."""
    saved = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (saved.append(self), save(self, *a, **k)))

    def draw(rows):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report.learning_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
        assert cv2.imread(str(tmp_path / "curve.png")).std() > 5
        return [axis for axis in saved[-1].axes if not axis.get_ylabel().startswith("learning rate")]

    return draw


def labels(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()] if axis.get_legend() else []


def test_a_curve_shows_each_loss_and_each_set(curve):
    rows = [*steps(4, l_pix=0.5, l_fft=2.0), validation(2, "a", 30.0, 29.0), validation(2, "b", 20.0)]
    losses, psnr = curve([*rows, validation(4, "a", 31.0, 29.0), validation(4, "b", 21.0)])
    assert labels(losses) == ["l_pix", "l_fft"]
    assert labels(psnr) == ["a", "a, bicubic", "b"]
    assert [list(line.get_ydata()) for line in psnr.lines] == [[30.0, 31.0], [29.0, 29.0], [20.0, 21.0]]


def test_a_loss_below_zero_is_drawn(curve):
    positive, negative = curve(steps(3, l_pix=0.5))[0], curve(steps(3, l_pix=-20.0))[0]
    assert (positive.get_yscale(), negative.get_yscale()) == ("log", "linear")


def test_a_curve_needs_no_validation(curve):
    (losses,) = curve(steps(3, l_pix=0.5))
    assert list(losses.lines[0].get_xdata()) == [1, 2, 3]


def test_a_curve_needs_no_training_step(curve):
    _, psnr = curve([validation(4, "a", 30.0)])
    assert labels(psnr) == ["a"]


def test_losses_may_change_when_a_run_is_resumed(curve):
    (losses,) = curve([*steps(2, l_pix=0.5), {**steps(3, l_char=0.4)[-1]}])
    assert [list(line.get_xdata()) for line in losses.lines] == [[1, 2], [3]]


def test_a_set_that_came_later_joins_the_curve(curve):
    _, psnr = curve([*steps(4, l_pix=1.0), validation(2, "a", 30.0), validation(4, "a", 31.0), validation(4, "b", 9.0)])
    assert [list(line.get_xdata()) for line in psnr.lines] == [[2, 4], [4]]


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_a_curve_survives_what_is_not_finite(curve, value):
    rows = [*steps(2, l_pix=value), validation(1, "a", value, value), validation(2, "a", 31.0, value)]
    assert len(curve(rows)) == 2
