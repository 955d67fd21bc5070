"""The page of a test as a person has it: opened from the file system, without network, by mouse and by keyboard."""

import json
import runpy
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from models import page, record, runtime
from scripts import compare

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
# what a file system allows, and HTML, addresses and JSON have their own ideas of
ODD = """a "b" <i>&lt; #1 50% ?é'.@@title@@"""

NEAREST = """
import torch
from archs import ARCHS

@ARCHS.register()
class Nearest(torch.nn.Module):
    scale = 2

    def __init__(self, *, light: float = 0.0) -> None:
        super().__init__()
        self.light = torch.nn.Parameter(torch.tensor(light))

    def forward(self, x):
        return torch.nn.functional.interpolate(x, scale_factor=2) + self.light
"""


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Folders of two tests: pixels repeated, and the same a little lighter; one picture is of one colour."""
    place = tmp_path_factory.mktemp("page")
    (place / "photos").mkdir()
    photo = cv2.imread(str(ROOT / "datasets/quickstart/val/coffee.png"))
    for name, picture in {
        ODD: photo[80:176, 60:200],
        "cup 10": photo[200:280, 300:420],
        "cup 9": photo[:64, :72],
    }.items():
        cv2.imwrite(str(place / "photos" / f"{name}.png"), picture)
    cv2.imwrite(str(place / "photos" / "plain.png"), np.full((40, 48, 3), (40, 90, 200), np.uint8))
    (place / "nearest.py").write_text(NEAREST)
    main = runpy.run_path(str(ROOT / "test.py"), run_name="command")["main"]
    y = {"type": "calculate_psnr", "crop_border": 2, "test_y_channel": True}
    found = []
    for name, light in {"plain pixels": 0.0, "lighter": 0.03}.items():
        options = {
            "name": name,
            "scale": 2,
            "num_gpu": 0,
            "import_paths": [str(place / "nearest.py")],
            "network_g": {"type": "Nearest", "light": light},
            "datasets": {
                "test": {"type": "DownsampleImageDataset", "name": "photos", "dataroot_gt": str(place / "photos")}
            },
            "path": {"root": str(place)},
            "val": {
                "save_img": True,
                "baseline": "bicubic",
                "metrics": {"psnr": y, "ssim": {"type": "calculate_ssim"}},
            },
        }
        file = place / f"{name}.yml"
        file.write_text(yaml.safe_dump(options))
        assert runtime.run(main, ["-opt", str(file)]) == 0
        found.append(place / "results" / name)
    return found


@pytest.fixture
def opened(tab, results):
    """The first test's page."""
    tab.open(results[0] / "index.html")
    return tab


def names(tab):
    """The pictures in the order of the table's rows."""
    rows = "[...document.querySelectorAll('tbody tr')]"
    return tab.evaluate(f"{rows}.map((row) => row.cells[0].innerText.trim())")


def picture(folder, name, kind):
    """(h, w, 3) uint8 RGB of a kept picture."""
    place = folder / (
        f"visualization/photos/{name}_{folder.name}" if kind == "output" else f"page/photos/{name}_{kind}"
    )
    return cv2.imread(f"{place}.png")[..., ::-1]


def seen(tab, side, zoom=None):
    """What the stage shows of one side, one value a pixel of the picture, with the divider out of the way."""
    tab.evaluate("document.activeElement.blur()")
    tab.evaluate("document.querySelectorAll('.tag, #divider').forEach((e) => { e.style.visibility = 'hidden'; })")
    tab.evaluate("document.querySelector('#split').focus()")
    tab.press("End" if side == "left" else "Home")
    sheet = "document.querySelector('#pane-right .sheet').getBoundingClientRect()"
    stage = "document.querySelector('#stage').getBoundingClientRect()"
    x, y, w, h = tab.evaluate(
        f"(() => {{ const s = {sheet}, t = {stage}; return [s.x - t.x, s.y - t.y, s.width, s.height]; }})()"
    )
    zoom = int(tab.text("#zoom").rstrip(" %")) // 100
    shot = tab.screenshot("#stage")[round(y) : round(y + h), round(x) : round(x + w)]
    blocks = shot.reshape(shot.shape[0] // zoom, zoom, shot.shape[1] // zoom, zoom, 3)
    # enlarged by whole pixels: all of a block have the same value
    assert (blocks == blocks[:, :1, :, :1]).all()
    return blocks[:, 0, :, 0]


def differences(one, other):
    return np.abs(one.astype(int) - other.astype(int))


def test_the_page_asks_for_nothing_but_itself_and_has_nothing_to_complain_of(opened, results):
    requests = [url for url in opened.requests() if not url.startswith("data:")]
    assert requests == [(results[0] / "index.html").as_uri()]
    assert opened.complaints() == []


def test_names_are_shown_as_they_are(opened):
    assert names(opened) == [ODD, "cup 9", "cup 10", "plain"]
    assert opened.evaluate("[...document.querySelectorAll('#picture option')].map((o) => o.textContent)") == names(
        opened
    )
    assert opened.evaluate("document.querySelector('#pane-left img').alt") == f"{ODD}, bicubic"


def test_the_protocol_stands_at_the_numbers(opened):
    heads = "[...document.querySelectorAll('th[scope=colgroup]')].map((head) => head.innerText.trim())"
    assert opened.evaluate(heads) == ["psnr Y, crop 2, 8 bit", "ssim RGB, crop 0, 8 bit"]


def test_a_click_sorts_numbers_with_infinity_on_top_and_again_turns_them_round(opened):
    scores = "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[1].innerText)"
    opened.click("thead th:nth-child(2) button")
    down = opened.evaluate(scores)
    assert down[0] == "∞"
    assert [float(text) for text in down[1:]] == sorted((float(text) for text in down[1:]), reverse=True)
    assert opened.evaluate("document.querySelector('thead th:nth-child(2)[scope=col]').ariaSort") == "descending"
    opened.click("thead th:nth-child(2) button")
    assert opened.evaluate(scores) == down[::-1]
    assert names(opened)[3] == "plain"
    assert "mean of 4" in opened.text("tfoot")


def test_the_keyboard_sorts_by_name_as_people_count(opened):
    opened.evaluate("document.querySelector('th.name button').focus()")
    opened.press("Enter", "Enter")
    assert names(opened) == ["plain", "cup 10", "cup 9", ODD]
    assert opened.evaluate("document.querySelector('th.name').ariaSort") == "descending"
    assert "descending" in opened.text("#spoken")
    opened.press(" ")
    assert names(opened) == [ODD, "cup 9", "cup 10", "plain"]


def test_everything_can_be_reached_by_the_tab_key_and_shows_that_it_is(opened):
    reached, outlined = [], []
    for _ in range(60):
        opened.press("Tab")
        reached.append(opened.evaluate("document.activeElement.id || document.activeElement.tagName"))
        outlined.append(opened.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
        if reached[-1] == "SUMMARY":
            break
    wanted = {"theme", "picture", "left", "right", "swap", "larger", "smaller", "fit", "stage", "split", "A", "SUMMARY"}
    assert wanted <= set(reached)
    assert "none" not in outlined


def test_each_side_shows_the_pixels_of_its_file(opened, results):
    np.testing.assert_array_equal(seen(opened, "left"), picture(results[0], ODD, "baseline"))
    np.testing.assert_array_equal(seen(opened, "right"), picture(results[0], ODD, "output"))


def test_the_arrow_keys_move_the_divider_and_the_picture_is_cut_there(opened):
    width = opened.box("#stage")[2]
    cut = "Number(getComputedStyle(document.querySelector('#pane-left')).clipPath.match(/ ([0-9.]+)%/)[1])"
    assert opened.evaluate(cut) == pytest.approx(50)
    opened.evaluate("document.querySelector('#split').focus()")
    opened.press(*["ArrowLeft"] * 10)
    assert opened.evaluate(cut) == pytest.approx(51)
    assert opened.evaluate("document.querySelector('#divider').offsetLeft + 14") == pytest.approx(0.49 * width, abs=1)
    opened.press("Home")
    assert opened.evaluate(cut) == pytest.approx(100)


def test_the_divider_follows_the_pointer(opened):
    x, y, w, h = opened.box("#stage")
    opened.drag((x + w / 2, y + h / 2), (x + w / 3, y + h / 2), (x + w / 4, y + h / 2))
    assert opened.evaluate("Number(document.querySelector('#split').value)") == pytest.approx(250, abs=2)


def test_the_wheel_zooms_at_the_pointer_once_the_picture_is_in_focus_and_keys_and_buttons_do(opened):
    x, y, w, h = opened.box("#stage")
    zoom = "document.querySelector('#pane-left .sheet').getBoundingClientRect().width / 140"
    start = opened.evaluate(zoom)
    opened.wheel((x + w / 2, y + h / 2), 40)
    assert opened.evaluate(zoom) == start
    opened.evaluate("document.querySelector('#stage').focus({preventScroll: true})")
    x, y, w, h = opened.box("#stage")
    left = "document.querySelector('#pane-left .sheet').getBoundingClientRect().left"
    opened.wheel((x, y + h / 2), -100)
    larger = opened.evaluate(zoom)
    assert larger > 1.2 * start
    opened.press("+")
    assert opened.evaluate(zoom) == pytest.approx(1.5 * larger)
    before = opened.evaluate(left)
    opened.press("ArrowLeft")
    assert opened.evaluate(left) == pytest.approx(before + 48)
    opened.drag((x + 40, y + 30), (x + 60, y + 30))
    assert opened.evaluate(left) == pytest.approx(before + 68)
    opened.press("1")
    assert opened.evaluate(zoom) == pytest.approx(1)
    opened.click("#larger")
    assert opened.text("#zoom") == "150 %"
    opened.click("#fit")
    assert opened.evaluate(zoom) == start


def test_any_two_can_be_chosen_and_stay_chosen_for_the_next_picture(opened, results):
    opened.choose("#left", "gt")
    opened.choose("#right", "input")
    opened.click("tbody tr:nth-child(3) a")
    assert (
        opened.evaluate("document.querySelector('#left').value + document.querySelector('#right').value") == "gtinput"
    )
    np.testing.assert_array_equal(seen(opened, "left"), picture(results[0], "cup 10", "gt"))
    repeated = picture(results[0], "cup 10", "input").repeat(2, axis=0).repeat(2, axis=1)
    np.testing.assert_array_equal(seen(opened, "right"), repeated)
    opened.click("#swap")
    assert opened.evaluate("document.querySelector('#left').value") == "input"
    opened.click("#previous")
    assert opened.evaluate("document.querySelector('#stage').ariaLabel") == "cup 9, 64 by 72 pixels"


def test_a_difference_is_the_absolute_one_of_each_channel_times_the_factor_it_states(opened, results):
    opened.choose("#right", "difference-output-0")
    exact = differences(picture(results[0], ODD, "output"), picture(results[0], ODD, "gt"))
    for factor in (8, 2):
        opened.choose("#factor", str(factor))
        assert opened.evaluate("document.querySelector('#tag-right').textContent").endswith(f"ground truth, × {factor}")
        assert differences(seen(opened, "right"), np.minimum(factor * exact, 255)).max() <= 1


def test_pictures_beside_the_page_are_shown_whatever_their_names_and_said_to_be_there(tab, results, tmp_path):
    folder = tmp_path / "with ü #1"
    shutil.copytree(results[0], folder)
    page.write_page(folder / "index.html", record.load(folder), budget=0)
    assert (folder / "index.html").stat().st_size < 200_000
    tab.open(folder / "index.html")
    assert "keep its folder together" in tab.text("footer")
    assert tab.evaluate("[...document.querySelectorAll('tbody img')].every((image) => image.naturalWidth > 0)")
    np.testing.assert_array_equal(seen(tab, "right"), picture(results[0], ODD, "output"))
    files = [url for url in tab.requests() if url.startswith("file:")]
    # the page, the small pictures and what is chosen, none of the others
    assert len([url for url in files if not url.endswith("_thumbnail.jpg")]) == 3
    assert tab.complaints() == []

    shutil.rmtree(folder / "visualization")
    tab.open(folder / "index.html")
    assert "still beside this page" in tab.text("#failed")

    # written without them, the page offers what is left
    for path in (folder / "page/photos").glob("cup 9_[gib]*.png"):
        path.unlink()
    page.write_page(folder / "index.html", record.load(folder))
    tab.open(folder / "index.html")
    links = "[...document.querySelectorAll('tbody tr')].map((row) => row.querySelectorAll('a').length)"
    assert tab.evaluate(links) == [1, 0, 1, 1]
    tab.click("tbody tr:nth-child(3) a")
    assert tab.evaluate("document.querySelector('#pane-right img').alt") == "cup 10, ground truth"
    # those of the page whose files were gone
    assert set(tab.complaints()) == {"Failed to load resource: net::ERR_FILE_NOT_FOUND"}


def test_light_and_dark_follow_the_system_until_they_are_chosen(opened):
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    opened.media(prefers_color_scheme="light")
    light = opened.evaluate(paper)
    opened.media(prefers_color_scheme="dark")
    dark = opened.evaluate(paper)
    assert light == "rgb(253, 253, 252)"
    assert dark == "rgb(20, 21, 23)"
    opened.click("#theme")
    assert (opened.text("#theme"), opened.evaluate(paper)) == ("Theme: light", light)
    opened.click("#theme")
    opened.media(prefers_color_scheme="light")
    assert (opened.text("#theme"), opened.evaluate(paper)) == ("Theme: dark", dark)


def test_nothing_moves_by_itself_where_motion_is_not_wanted_and_paper_is_white(opened):
    moving = "[...document.querySelectorAll('*')].filter((e) => getComputedStyle(e).transitionDuration !== '0s').length"
    assert opened.evaluate(moving) > 0
    opened.media(prefers_reduced_motion="reduce", prefers_color_scheme="dark")
    assert opened.evaluate(moving) == 0
    opened.media(kind="print", prefers_color_scheme="dark")
    assert opened.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(253, 253, 252)"
    assert opened.evaluate("getComputedStyle(document.querySelector('.bar')).display") == "none"


@pytest.mark.parametrize("width", [320, 360])
def test_a_phone_scrolls_in_one_direction(opened, width):
    opened.resize(width, 740)
    opened.choose("#right", "difference-output-0")
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    assert opened.evaluate(f"document.querySelector('.scroll').scrollWidth > {width}")
    assert opened.box("#stage")[2] == width - 32


def test_paper_shows_whole_tables(opened):
    # the width of A4 between its margins
    opened.resize(718, 1000)
    over = "(() => { const e = document.querySelector('.scroll'); return e.scrollWidth - e.clientWidth; })()"
    assert opened.evaluate(over) > 0
    opened.media(kind="print")
    assert opened.evaluate(over) <= 0


def test_the_options_in_force_can_be_read_and_copied(opened, results):
    opened.click("summary")
    shown = opened.evaluate("document.querySelector('pre').textContent")
    assert yaml.safe_load(shown)["network_g"] == {"type": "Nearest", "light": 0.0}
    opened.evaluate("document.addEventListener('copy', () => { window.copied = String(getSelection()); })")
    opened.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    opened.click(".copy")
    opened.wait("window.copied")
    assert yaml.safe_load(opened.evaluate("window.copied")) == yaml.safe_load(shown)


def findings(tab, axe):
    """Serious and critical findings of axe, with the elements they are about."""
    tab.evaluate(f"{axe}; 0")
    kinds = "v.impact, v.id, v.nodes.map((n) => n.html + ' ' + n.failureSummary)"
    found = tab.evaluate(
        f"axe.run().then((r) => JSON.stringify([r.passes.length, r.violations.map((v) => [{kinds}])]))"
    )
    passed, violations = json.loads(found)
    assert passed > 15
    return [violation for violation in violations if violation[0] in ("serious", "critical")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened, axe, scheme):
    opened.media(prefers_color_scheme=scheme)
    opened.click("summary")
    opened.choose("#right", "difference-output-0")
    opened.click("thead th:nth-child(2) button")
    assert findings(opened, axe) == []


# several networks


@pytest.fixture(scope="session")
def comparison(results, tmp_path_factory):
    target = tmp_path_factory.mktemp("comparison")
    assert runtime.run(compare.main, [*map(str, results), "-o", str(target)]) == 0
    return target / "index.html"


def test_two_networks_stand_side_by_side(tab, results, comparison, axe):
    tab.open(comparison)
    heads = "[...document.querySelectorAll('th[scope=col]')].map((head) => head.innerText.trim())"
    columns = ["bicubic", "plain pixels", "lighter", "gain of lighter"]
    assert tab.evaluate(heads) == ["picture", *columns, *columns]
    np.testing.assert_array_equal(seen(tab, "left"), picture(results[0], ODD, "output"))
    np.testing.assert_array_equal(seen(tab, "right"), picture(results[1], ODD, "output"))
    assert findings(tab, axe) == []
    assert tab.complaints() == []


def test_a_gain_is_that_over_the_first_and_a_worse_one_has_its_colour_and_its_sign(tab, comparison):
    tab.open(comparison)
    cells = tab.evaluate("[...document.querySelectorAll('tbody tr')[1].cells].map((cell) => cell.innerText)")
    assert float(cells[4].replace("−", "-")) == pytest.approx(float(cells[3]) - float(cells[2]), abs=1.1e-3)
    assert cells[4].startswith("−")
    assert "down" in tab.evaluate("document.querySelectorAll('tbody tr')[1].cells[4].className")


# training


def test_the_page_of_a_training_shows_curves(tab, tmp_path, axe):
    steps = [{"kind": "train", "iter": i, "lr": 1e-3 / i, "l_pix": 1 / i} for i in range(1, 9)]
    scores = {"set": "photos", "scores": {"psnr": 30.0}, "baseline": {"bicubic": {"psnr": 29.0}}}
    steps += [{"kind": "val", "iter": i, **scores} for i in (4, 8)]
    page.write_page(tmp_path / "index.html", record.Record("training", "run", ["run"], 2, [], [[]], [""], curve=steps))
    tab.open(tmp_path / "index.html")
    titles = tab.evaluate("[...document.querySelectorAll('figcaption b')].map((title) => title.textContent)")
    assert titles == ["psnr", "loss", "learning rate"]
    heights = tab.evaluate("[...document.querySelectorAll('svg path.line')].map((line) => line.getBBox().height)")
    # two constants, and two that fall
    assert [height > 50 for height in heights] == [False, False, True, True]
    assert "photos, bicubic" in tab.text("figcaption")
    assert findings(tab, axe) == []
    assert tab.complaints() == []
