"""Which results are compared, and what is said of those that are not."""

import math
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.io import write_image
from models import record, runtime
from models.record import Record, Shown, ShownSet
from scripts import compare

ROOT = Path(__file__).resolve().parents[2]
PSNR = {"psnr": "Y, crop 2, 8 bit"}


@pytest.fixture
def make(tmp_path):
    """``make("A", psnr=31, ...)``: a folder as test.py leaves it, with two crops of a photograph and a record."""
    photo = cv2.imread(str(ROOT / "datasets/quickstart/val/fig.png"))

    def results(name, *, psnr=30.0, sets=("photos",), pictures=("a", "b"), protocol=PSNR, scale=2, shift=0, title=None):
        folder, found = tmp_path / name, []
        for label in sets:
            shown = []
            for picture in pictures:
                place = ord(picture.strip("<>")) - ord("a")
                crop = photo[place * 20 : place * 20 + 24, :32] + np.uint8(shift)
                others = {"gt": crop, "input": crop[::2, ::2], "baseline": crop}
                paths = {kind: folder / "page" / label / f"{picture}_{kind}.png" for kind in others}
                for kind, path in paths.items():
                    write_image(path, others[kind])
                output = folder / "visualization" / label / f"{picture}.png"
                write_image(output, np.roll(crop, 1, 0))
                scores, reference = {key: psnr + place for key in protocol}, {key: 29.0 for key in protocol}
                shown.append(Shown(picture, [scores], reference, (24, 32), [output], paths))
            means = [{key: psnr + 0.5 for key in protocol}], {key: 29.0 for key in protocol}
            better = {key: "higher" for key in protocol}
            found.append(ShownSet(label, dict(protocol), better, "bicubic", *means, shown, len(shown)))
        title = title or name
        record.save(folder, Record("test", title, [title], scale, found, [[("when", "now")]], [f"name: {title}\n"]))
        return folder

    return results


@pytest.fixture
def run(tmp_path, capfd):
    """``run(folder, ...)``: exit code and what was printed."""

    def call(*arguments):
        code = runtime.run(compare.main, [*map(str, arguments), "-o", str(tmp_path / "out")])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return call


def test_equal_sets_are_compared_and_the_means_told(make, run, tmp_path):
    code, printed = run(make("A"), make("B", psnr=31.25), make("C"))
    assert code == 0, printed
    assert "photos: B: psnr 31.7500" in printed
    html = (tmp_path / "out/index.html").read_text()
    assert html.count('data-spoken="psnr, gain of') == 2
    assert "Gains are against A." in html
    assert html.count("data:image/png") == 2 * (3 + 3)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"sets": ("photos", "more")}, "the set more is missing in A"),
        ({"pictures": ("a", "b", "c")}, "photos/c is missing in A"),
        (
            {"protocol": {"psnr": "RGB, crop 0, 8 bit"}},
            "psnr on photos (Y, crop 2, 8 bit in A, RGB, crop 0, 8 bit in B)",
        ),
        ({"protocol": {**PSNR, "own": "RGB"}}, "own on photos (not computed in A, RGB in B)"),
        ({"shift": 1}, "photos/b has another input and ground truth"),
    ],
)
def test_what_differs_is_named_and_nothing_is_written(make, run, tmp_path, other, told):
    code, printed = run(make("A"), make("B", **other))
    assert code == 3
    assert told in printed
    assert "--common" in printed
    assert not (tmp_path / "out").exists()


def test_what_is_common_is_shown_on_demand_with_what_is_not_at_its_head(make, run, tmp_path):
    other = make("B", sets=("photos", "more"), pictures=("b", "a", "<c>"), protocol={**PSNR, "own": "RGB"}, psnr=20)
    code, printed = run(make("A", pictures=("a",)), other, "--common")
    assert code == 0, printed
    # of a alone, which has the second place in B
    assert "photos: B: psnr 20.0000" in printed
    html = (tmp_path / "out/index.html").read_text()
    assert html.index("Only a part is shown") < html.index("means-title")
    for left_out in ("photos/b is missing in A", "photos/&lt;c&gt; is missing in A", "own on photos", "the set more"):
        assert left_out in html


def test_pixels_decide_and_not_the_bytes_of_their_files(make, run):
    one, other = make("A"), make("B")
    path = other / "page/photos/a_gt.png"
    before = path.read_bytes()
    cv2.imwrite(str(path), cv2.imread(str(path)), [cv2.IMWRITE_PNG_COMPRESSION, 0])
    assert path.read_bytes() != before
    assert run(one, other)[0] == 0


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: shutil.rmtree(folder), "does not exist"),
        (lambda folder: (folder / "page.json").unlink(), "is no results folder with a page"),
        (lambda folder: shutil.rmtree(folder / "page"), "a picture of the page is gone"),
    ],
)
def test_a_folder_that_is_none_of_a_test_is_told(make, run, spoil, told):
    one, other = make("A"), make("B")
    spoil(other)
    code, printed = run(one, other)
    assert code == (1 if "gone" in told else 3)
    assert told in printed
    assert "Traceback" not in printed


def test_results_without_pictures_are_compared_by_what_they_say_and_the_page_tells(make, run, tmp_path):
    one, other = make("A"), make("B")
    made = record.load(other)
    for shown in made.sets[0].pictures:
        shown.others, shown.outputs, shown.size = {}, [None], None
    record.save(other, made)
    for order in ((one, other), (other, one)):
        code, printed = run(*order, "--force")
        assert code == 0, printed
        html = (tmp_path / "out/index.html").read_text()
        assert "B kept no pictures" in html
        # what one of them has is shown for both
        assert "ground truth" in html
        assert html.count("data:image/png") == 2 * 4


def test_an_option_file_is_answered_with_the_command_to_run(make, run):
    code, printed = run(make("A"), ROOT / "options/test/sr/sst_quickstart_x2.yml")
    assert code == 3
    assert "run test.py first" in printed


def test_scales_are_not_mixed_even_on_demand(make, run):
    code, printed = run(make("A"), make("B", scale=4), "--common")
    assert code == 3
    assert "A enlarges by 2, B by 4" in printed


def test_a_page_is_replaced_only_by_force(make, run, tmp_path):
    folders = make("A"), make("B")
    assert run(*folders)[0] == 0
    before = (tmp_path / "out/index.html").stat().st_mtime_ns
    code, printed = run(*folders)
    assert code == 2
    assert "--force" in printed
    assert (tmp_path / "out/index.html").stat().st_mtime_ns == before
    assert run(*folders, "--force")[0] == 0


def test_runs_of_one_name_are_told_apart_by_their_folders(make, run, tmp_path):
    code, printed = run(make("x/net", title="net"), make("y/net", title="net"))
    assert code == 0, printed
    assert f"photos: {tmp_path / 'x/net'}: psnr" in printed


def test_one_folder_is_not_compared_with_itself_however_it_is_written(make, run, tmp_path):
    one, other = make("z"), make("other")
    for again in (one, tmp_path / "other/../z"):
        code, printed = run(one, other, again)
        assert code == 2
        assert "given twice" in printed


def test_the_page_of_a_compared_run_is_not_overwritten_even_by_force(make, tmp_path, capfd):
    one, other = make("A"), make("B")
    (other / "index.html").write_text("its own page")
    assert runtime.run(compare.main, [str(one), str(other), "-o", str(tmp_path / "A/../B"), "--force"]) == 2
    assert "one of the compared folders" in capfd.readouterr().err
    assert (other / "index.html").read_text() == "its own page"


def test_means_are_those_of_the_runs_to_the_last_digit(make, run, tmp_path):
    # whose plain sum is rounded otherwise
    values = [0.1, 0.2, 0.3]
    folders = [make(name, pictures=tuple("abc")) for name in "AB"]
    for folder in folders:
        made = record.load(folder)
        for shown, value in zip(made.sets[0].pictures, values, strict=True):
            shown.scores = [{"psnr": value}]
        record.save(folder, made)
    assert run(*folders)[0] == 0
    assert sum(values) != math.fsum(values)
    foot = (tmp_path / "out/index.html").read_text().partition("<tfoot>")[2]
    assert f'data-value="{math.fsum(values) / 3!r}"' in foot


def test_sets_and_metrics_without_anything_in_common_are_told_as_such(make, run, tmp_path):
    one = make("A", sets=("photos", "more"))
    other = make("B", sets=("photos", "more"), protocol={"psnr": "RGB"})
    made = record.load(other)
    made.sets[1].pictures = made.sets[1].pictures[:0]
    record.save(other, made)
    code, printed = run(one, other, "--common")
    assert code == 0, printed
    html = (tmp_path / "out/index.html").read_text()
    assert "No metric was computed in one way" in html
    assert "No pictures were judged" not in html
    assert "more/a is missing in B" in html
