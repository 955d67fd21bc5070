"""What a page is made of: records, tables, files; how it looks and acts is tested in a browser."""

import csv
import json
import math
import os
import re
import socket
import subprocess
import sys
from html import unescape
from pathlib import Path

import cv2
import numpy as np
import pytest

from models import home, page, page_curves, page_tables, record
from models.album import reduced
from models.page_pictures import Sources, as_script, link
from models.record import Record, Shown, ShownSet
from options.errors import DataError

ROOT = Path(__file__).resolve().parents[2]


def make_set(pictures, **changes):
    facts = {"name": "s", "protocol": {"m": "RGB"}, "better": {"m": "higher"}, "baseline": "input"}
    means = {"means": [{"m": 1.0}], "baseline_means": {"m": 0.5}, "pictures": pictures, "count": len(pictures)}
    return ShownSet(**{**facts, **means, **changes})


def make_record(*sets, kind="test", networks=("net",)):
    each = len(networks)
    return Record(kind, "run", list(networks), 1, list(sets), [[("when", "now")]] * each, ["name: run\n"] * each)


def cells(html, picture):
    """The texts of the row of one picture."""
    (row,) = re.findall(rf'<tr><th scope="row" data-value="{picture}">(.*?)</tr>', html)
    return [unescape(re.sub("<[^>]*>", "", cell)) for cell in row.split("</th>")[1].split("</td>")[:-1]]


@pytest.fixture
def tested(small, command, tmp_path):
    """``tested("val.report=false", ...)``: exit code, what was printed, and the folder of results."""
    small["val"] |= {"save_img": True, "baseline": "bicubic"}
    small["network_g"] = {"type": "EDSR", "num_in_ch": 3, "num_out_ch": 3, "num_feat": 4, "num_block": 1, "upscale": 2}
    del small["train"], small["datasets"]["train"]

    def run(*overrides):
        return *command("test.py", small, *overrides), tmp_path / "out/results/small"

    return run


# what test.py writes


def test_a_test_leaves_a_page_and_all_that_it_shows(tested):
    code, printed, folder = tested()
    assert code == 0, printed
    made = record.load(folder)
    ((shown,),) = [entry.pictures for entry in made.sets]
    assert (shown.name, shown.size) == ("corner", (96, 140))
    sizes = {kind: cv2.imread(str(path)).shape[:2] for kind, path in shown.others.items()}
    assert sizes == {"input": (48, 70), "gt": (96, 140), "baseline": (96, 140), "thumbnail": (96, 140)}
    truth = cv2.imread(str(folder.parents[1].parent / "val/corner.png"))
    np.testing.assert_array_equal(cv2.imread(str(shown.others["gt"])), truth)
    (row,) = [row for row in csv.DictReader((folder / "metrics.csv").open()) if row["picture"] == "corner"]
    assert shown.scores == [{"psnr": float(row["value"])}]
    assert shown.baseline == {"psnr": float(row["baseline_value"])}
    facts = dict(made.facts[0])
    assert facts["network"].startswith("EDSR, ")
    assert facts["weights"] == "as the network is built"
    assert (folder / "index.html").read_text().count("data:image/png;base64,") == 4


def test_no_page_is_written_where_none_is_wanted(tested):
    code, printed, folder = tested("val.report=false")
    assert code == 0, printed
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".csv", ".log", ".yml", ".yml"]
    assert [path.name for path in folder.rglob("*.png")] == ["corner_small.png"]


def test_without_saved_pictures_the_page_says_why_it_has_none(tested):
    code, printed, folder = tested("val.save_img=false")
    assert code == 0, printed
    html = (folder / "index.html").read_text()
    assert "val.save_img is false" in html
    assert 'id="viewer"' not in html
    assert len(cells(html, "corner")) == 3


def test_pictures_without_ground_truth_are_on_the_page_without_scores(tested, tmp_path):
    lq = f"{{type: SingleImageDataset, dataroot_lq: {tmp_path / 'val'}, name: alone}}"
    code, printed, folder = tested(f"datasets.val={lq}", "val.baseline=null")
    assert code == 0, printed
    (shown,) = record.load(folder).sets[0].pictures
    assert (shown.scores, sorted(shown.others)) == ([{}], ["input", "thumbnail"])
    assert "Without ground truth" in (folder / "index.html").read_text()


def test_scores_are_there_before_the_page_and_whatever_becomes_of_it(tested, monkeypatch):
    prepare = home.prepare_folder

    def prepare_and_spoil(*arguments, **settings):
        # a folder stands where the page should be, and a file where its pictures should be
        folder = prepare(*arguments, **settings)
        (folder / "index.html").mkdir()
        (folder / "page").write_text("")
        return folder

    monkeypatch.setattr(home, "prepare_folder", prepare_and_spoil)
    code, printed, folder = tested()
    assert code == 1
    assert "error: cannot write" in printed
    assert "the page will lack a picture of held-out/corner" in printed
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3
    assert (folder / "visualization/held-out/corner_small.png").exists()


def test_two_processes_make_the_page_of_one(tested, tmp_path):
    for name in ("a", "b"):
        picture = cv2.imread(str(ROOT / "datasets/quickstart/val/fig.png"))[ord(name) :][:32, :40]
        cv2.imwrite(str(tmp_path / "val" / f"{name}.png"), picture)
    code, printed, folder = tested()
    assert code == 0, printed
    alone = record.load(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command, running = [sys.executable, "test.py", "-opt", str(tmp_path / "small.yml")], []
    for rank in ("0", "1"):
        environment = {**os.environ, **place, "OMP_NUM_THREADS": "1", "RANK": rank, "LOCAL_RANK": rank}
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL))
    assert [process.wait(100) for process in running] == [0, 0]
    together = record.load(folder)
    assert dict(together.facts[0])["when"] != dict(alone.facts[0])["when"]
    assert together.sets == alone.sets
    assert [shown.name for shown in together.sets[0].pictures] == ["a", "b", "corner"]
    assert all(path.exists() for shown in together.sets[0].pictures for path in shown.others.values())


def test_a_training_leaves_a_page_too_which_grows_with_it(tiny, command, tmp_path):
    code, printed = command("train.py", tiny, "val.report=true")
    assert code == 0, printed
    html = (tmp_path / "out/experiments/small/index.html").read_text()
    assert html.count("<figure>") == 3
    assert "4 of 4" in html
    assert len(cells(html, "corner")) == 1


# records


def test_a_record_comes_back_as_it_was_with_infinities_and_odd_names(tmp_path):
    name = 'a "b"/<c>\udce9'
    shown = Shown(name, [{"m": math.inf}], {"m": -math.inf}, (3, 4), [tmp_path / "visualization/x.png"])
    shown.others = {"gt": tmp_path / "page" / "y.png"}
    made = make_record(make_set([shown]))
    record.save(tmp_path, made)
    json.loads((tmp_path / "page.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert record.load(tmp_path) == made


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1}', '{"version": 0}', '{"version": 1, "sets": 3}'])
def test_a_damaged_record_is_told_with_the_way_out(tmp_path, text):
    (tmp_path / "page.json").write_text(text)
    with pytest.raises(DataError, match=r"page\.json.*run test\.py again"):
        record.load(tmp_path)


# tables


def test_values_that_are_no_numbers_have_words_of_their_own():
    assert [page_tables.number(v, 2) for v in (math.inf, -math.inf, math.nan, -1.0)] == ["∞", "−∞", "NaN", "−1.00"]
    assert [page_tables.number(v, 2, signed=True) for v in (1, math.inf, 0, -0.001)] == [
        "+1.00",
        "+∞",
        "±0.00",
        "±0.00",
    ]


def test_a_picture_that_equals_the_ground_truth_gains_nothing_over_another_that_does():
    html = page_tables.tables(make_record(make_set([Shown("a", [{"m": math.inf}], {"m": math.inf})])))
    assert cells(html, "a") == ["∞", "∞", "±0.0000"]
    html = page_tables.tables(make_record(make_set([Shown("a", [{"m": math.nan}], {"m": 1.0})])))
    assert cells(html, "a") == ["NaN", "1.0000", "NaN"]


def test_nothing_is_said_of_scores_where_there_are_none():
    unscored = make_set([Shown("a")], protocol={}, means=[{}], baseline_means={})
    for sets, titled, explained in (((unscored,), 1, 0), ((), 0, 0), ((unscored, make_set([Shown("a")])), 1, 1)):
        html = page.render(make_record(*sets), Path())
        assert html.count('<section id="scores"') == titled
        assert html.count("Rounded for reading") == explained


def test_infinite_means_are_in_decibels_and_say_nothing_of_the_gain():
    pictures = [Shown("a", [{"m": math.inf}], {"m": math.inf}), Shown("b", [{"m": 28.0}], {"m": 29.5})]
    made = make_record(make_set(pictures, means=[{"m": math.inf}], baseline_means={"m": math.inf}))
    html = page_tables.tables(made)
    assert cells(html, "b") == ["28.000", "29.500", "−1.500"]
    foot = re.sub("<[^>]*>", " ", html.partition("<tfoot>")[2]).split()
    assert foot == ["mean", "of", "2", "∞", "∞", "NaN"]
    assert "±0" not in page_tables.headlines(made)


@pytest.mark.parametrize(("better", "tone"), [("higher", "up"), ("lower", "down")])
def test_a_gain_looks_good_where_it_is(better, tone):
    html = page_tables.tables(make_record(make_set([Shown("a", [{"m": 2.0}], {"m": 1.0})], better={"m": better})))
    assert f'class="gain {tone}"' in html
    assert ("lower is better" in html) == (better == "lower")


def test_every_name_is_escaped_wherever_it_stands():
    odd = "<script>\"&'@@script@@\udce9"
    entry = make_set([Shown(odd, [{odd: 1.0}], {odd: 0.5})], name=odd, protocol={odd: odd}, better={odd: "higher"})
    entry.means, entry.baseline_means, entry.baseline = [{odd: 1.0}], {odd: 0.5}, odd
    made = make_record(entry, networks=[odd])
    made.title, made.facts, made.options, made.remarks = odd, [[(odd, odd)]], [odd], [odd]
    html = page.render(made, Path())
    assert html.count("<script>") == 1
    assert html.count("@@script@@") >= 10
    assert html.count("&lt;script&gt;&quot;&amp;&#x27;") >= 10


# curves


def ticks(html):
    return [float(value.replace("−", "-")) for value in re.findall(r'text-anchor="end">([^<]*)<', html)]


@pytest.mark.parametrize(("steady", "bad"), [(True, False), (False, False), (True, True), (False, True)])
def test_the_axis_of_a_curve_spans_its_finite_values(steady, bad):
    rows = [{"kind": "train", "iter": i, "l_pix": 0.1 if steady else 1.0 + i % 2} for i in range(1, 1401)]
    for row, spoilt in zip(rows[100:], [math.inf, -math.inf, math.nan] if bad else [], strict=False):
        row["l_pix"] = spoilt
    html = page_curves.curves(rows)
    found = ticks(html)
    # a constant has values around it, as different as they are many
    assert len(set(found)) == len(found) >= 3
    assert min(found) <= (0.1 if steady else 2)
    assert max(found) >= (0.1 if steady else 1)
    assert ("3 values are infinite or NaN" in html) == bad
    assert "(logarithmic)" in html
    assert not re.search(r'="[^"]*(nan|inf)', html)


def test_a_training_that_knows_no_finite_loss_still_has_its_page():
    html = page_curves.curves([{"kind": "train", "iter": 1, "lr": 1e-3, "l_pix": math.inf}])
    assert html.count("<figure>") == 2
    assert "1 value is infinite or NaN" in html


# files


def test_sets_go_into_the_page_while_they_fit_and_are_linked_as_a_whole_where_not(tmp_path):
    sets = []
    for name, size in (("one", 100), ("two", 300), ("three", 50)):
        (tmp_path / f"{name}.png").write_bytes(bytes(size))
        sets.append(make_set([Shown("a", outputs=[tmp_path / f"{name}.png"], size=(1, 1))], name=name))
    sources = Sources(make_record(*sets), tmp_path, budget=160)
    assert (sources.embedded, sources.linked) == (["one", "three"], ["two"])
    found = [picture["sources"][0]["src"] for picture in sources.content()]
    assert [src.startswith("data:image/png;base64,") for src in found] == [True, False, True]
    assert found[1] == "two.png"
    assert sources.content()[0]["before"] == "input"
    assert "two would make this page too large" in " ".join(sources.remarks())


@pytest.mark.parametrize(
    ("baseline", "scale", "judged"),
    [("input", 1, True), ("bicubic", 1, True), ("bicubic", 2, False), ("stretch", 1, False)],
)
def test_the_input_has_the_score_of_the_baseline_only_where_they_are_the_same(tmp_path, baseline, scale, judged):
    # as where the file of the baseline could not be written
    (tmp_path / "in.png").write_bytes(b"")
    shown = Shown("a", [{"m": 2.0}], {"m": 1.0}, others={"input": tmp_path / "in.png"})
    made = make_record(make_set([shown], baseline=baseline))
    made.scale = scale
    (source,) = Sources(made, tmp_path).content()[0]["sources"]
    assert source["scores"] == ("m 1.0000" if judged else "")


def test_files_that_are_not_there_are_counted_and_not_offered(tmp_path):
    sources = Sources(make_record(make_set([Shown("a", outputs=[tmp_path / "gone.png"])])), tmp_path)
    assert sources.content()[0]["sources"] == []
    assert any("1 picture file" in remark and "gone.png" in remark for remark in sources.remarks())


def test_rows_lead_to_what_is_there_and_only_there(tmp_path):
    for name in ("a.png", "b_gt.png", "b.jpg"):
        (tmp_path / name).write_bytes(b"0")
    whole = Shown("a", outputs=[tmp_path / "a.png"], size=(1, 1))
    lacking = Shown("b", outputs=[tmp_path / "b.png"], size=(1, 1), others={"gt": tmp_path / "b_gt.png"})
    gone = Shown("c", outputs=[tmp_path / "c.png"], size=(1, 1), others={"thumbnail": tmp_path / "b.jpg"})
    made = make_record(make_set([whole, lacking, gone]))
    for budget, small in ((99, "data:image/jpeg;base64,MA=="), (0, "b.jpg")):
        html = page.render(made, tmp_path, budget=budget)
        assert re.findall(r'<a href="([^"]*)" data-picture="(.)">', html) == [("a.png", "0"), ("b_gt.png", "1")]
        assert re.findall(r'<img src="([^"]*)"', html) == [small]


def test_a_link_is_an_address_for_any_name(tmp_path):
    assert link(tmp_path / 'a #1/50% "x"?\udce9.png', tmp_path / "page") == "../a%20%231/50%25%20%22x%22%3F%E9.png"


def test_json_in_a_script_cannot_end_it():
    text = as_script(["</script><!--", "\u2028&"])
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == ["</script><!--", "\u2028&"]


def test_a_small_picture_is_the_mean_of_squares():
    picture = np.arange(130 * 200 * 3, dtype=np.uint32).reshape(130, 200, 3).astype(np.uint8)
    small = reduced(picture)
    assert small.shape == (65, 100, 3)
    assert small[3, 5, 1] == round(picture[6:8, 10:12, 1].mean())
    assert reduced(picture[:5, :7]).shape == (5, 7, 3)


@pytest.mark.parametrize("turned", [False, True])
def test_of_a_long_strip_the_small_picture_is_the_middle(turned):
    strip = np.random.default_rng(0).integers(0, 256, (40, 1000, 3), dtype=np.uint8)
    small = reduced(strip.transpose(1, 0, 2) if turned else strip)
    np.testing.assert_array_equal(small.transpose(1, 0, 2) if turned else small, strip[:, 372:628])
