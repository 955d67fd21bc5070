"""Folders, listings and pairing: everything that is wrong is said at once, with names."""

import io
import json
import os
import pickle

import lmdb
import numpy as np
import pytest
from PIL import Image

import data.verify
from data.clean import DownsampleImageDataset
from data.io import encode, write_image
from data.paired import PairedImageDataset
from data.single import SingleImageDataset
from options.errors import DataError, OptionsError


@pytest.fixture
def folder(tmp_path, noise):
    """folder("gt", "a.png", "b/c.jpg", size=(8, 8)): a folder with these pictures; its path."""

    def make(name, *files, size=(16, 16)):
        (tmp_path / name).mkdir(exist_ok=True)
        for number, file in enumerate(files):
            write_image(tmp_path / name / file, noise((*size, 3), seed=number))
        return str(tmp_path / name)

    return make


def pair(gt, lq, **changed):
    return PairedImageDataset(
        **{"dataroot_gt": gt, "dataroot_lq": lq, "phase": "val", "scale": 2, "name": "Set", **changed}
    )


def test_pictures_come_in_natural_order_with_unique_names_and_nothing_else(folder, tmp_path):
    root = folder("lq", "10.png", "2.jpg", "1.PNG", "sub/1.png", "twin.png", "twin.jpg", ".hidden.png", ".h/3.png")
    (tmp_path / "lq" / "notes.txt").write_text("not a picture")
    (tmp_path / "lq" / "Thumbs.db").write_bytes(b"x")
    found = SingleImageDataset(dataroot_lq=root)
    assert [found[i]["name"] for i in range(len(found))] == ["1", "2", "10", "sub/1", "twin_jpg", "twin_png"]


def test_a_link_back_to_a_parent_is_not_followed_for_ever(folder, tmp_path):
    root = folder("lq", "a.png", "sub/b.png")
    os.symlink(root, tmp_path / "lq" / "sub" / "again")
    assert len(SingleImageDataset(dataroot_lq=root)) == 2


def test_an_empty_folder_and_a_missing_one_are_named(folder, tmp_path):
    with pytest.raises(DataError, match=r"Set \(test\): no images found in .*empty"):
        SingleImageDataset(dataroot_lq=folder("empty"), name="Set")
    # the second name is longer than file systems take
    for name in ("nowhere", "n" * 300):
        with pytest.raises(DataError, match=rf"the folder .*{name} does not exist"):
            SingleImageDataset(dataroot_lq=str(tmp_path / name))


def test_a_file_in_place_of_a_folder_is_told_so(tmp_path):
    (tmp_path / "list.txt").write_text("a.png")
    with pytest.raises(DataError, match=r"list\.txt is a file; a folder of pictures is wanted"):
        SingleImageDataset(dataroot_lq=str(tmp_path / "list.txt"))


def test_pairs_are_found_by_stem_across_extensions_and_subfolders(folder):
    gt = folder("gt", "a.png", "b/a.bmp", "v1.0.png")
    lq = folder("lq", "ax2.png", "b/ax2.webp", "v1.0x2.jpg", size=(8, 8))
    found = pair(gt, lq, filename_tmpl="{}x2")
    assert [(g, q) for g, q in found.pairs] == [
        ("a.png", "ax2.png"),
        ("b/a.bmp", "b/ax2.webp"),
        ("v1.0.png", "v1.0x2.jpg"),
    ]
    assert [found[i]["name"] for i in range(3)] == ["ax2", "b/ax2", "v1.0x2"]


def test_pictures_without_a_partner_are_listed_for_both_sides(folder):
    gt = folder("gt", "a.png", "b.png", "c.png")
    lq = folder("lq", "a.png", "d.png", size=(8, 8))
    with pytest.raises(
        DataError, match=r"(?s)Set \(val\): 2 problems.*2 GT without LQ.*b\.png, c\.png.*1 LQ without GT.*d\.png"
    ):
        pair(gt, lq)


def test_ambiguous_partners_are_refused(folder):
    with pytest.raises(DataError, match=r"several LQ pictures: a\.bmp, a\.tif"):
        pair(folder("gt", "a.png"), folder("lq", "a.bmp", "a.tif", size=(8, 8)))
    with pytest.raises(DataError, match="have the same stem"):
        pair(folder("gt2", "a.png", "a.bmp"), folder("lq2", "a.png", size=(8, 8)))


@pytest.mark.parametrize("template", ["x2", "{}{}", "{name}", "{}x{n}"])
def test_a_template_must_hold_the_name_once(folder, template):
    with pytest.raises(OptionsError, match=r"must hold \{\} once"):
        pair(folder("gt", "a.png"), folder("lq", "a.png", size=(8, 8)), filename_tmpl=template)


def test_a_listing_may_have_blank_lines_sizes_and_names_with_spaces(folder, tmp_path):
    gt = folder("gt", "a.png", "two words.png", "c.png", "not listed.png")
    lq = folder("lq", "a.png", "two words.png", "c.png", size=(8, 8))
    listing = tmp_path / "meta.txt"
    listing.write_bytes(b"\xef\xbb\xbftwo words.png (16,16,3) 1\r\n\r\na.png\n  \nc.png (16,16,3)\n")
    assert [g for g, _ in pair(gt, lq, meta_info_file=str(listing)).pairs] == ["two words.png", "a.png", "c.png"]


def test_listed_pictures_that_are_missing_are_named_with_file_and_line(folder, tmp_path):
    listing = tmp_path / "meta.txt"
    listing.write_text("a.png\n\ngone.png (480,480,3)\na.png\n")
    with pytest.raises(
        DataError, match=r"(?s)2 problems.*meta\.txt, line 3: .*gone\.png does not exist.*line 4: a\.png is listed"
    ):
        DownsampleImageDataset(dataroot_gt=folder("gt", "a.png"), scale=2, phase="val", meta_info_file=str(listing))
    listing.write_text("\n\n")
    with pytest.raises(DataError, match="lists no images"):
        DownsampleImageDataset(dataroot_gt=folder("gt"), scale=2, phase="val", meta_info_file=str(listing))
    with pytest.raises(DataError, match="cannot read meta_info_file"):
        DownsampleImageDataset(dataroot_gt=folder("gt"), phase="val", meta_info_file=str(tmp_path / "no.txt"))


@pytest.mark.parametrize(
    ("height", "width", "fits"), [(16, 17, True), (17, 16, True), (18, 16, False), (15, 16, False)]
)
def test_a_gt_may_be_larger_by_less_than_one_lq_pixel(folder, height, width, fits):
    gt, lq = folder("gt", "a.png", size=(height, width)), folder("lq", "a.png", size=(8, 8))
    if fits:
        item = pair(gt, lq)[0]
        assert item["gt"].shape == (3, 16, 16)
    else:
        with pytest.raises(DataError, match=rf"(?s)gt.a\.png is {height}x{width}.*lq.a\.png is 8x8.*should be 16x16"):
            pair(gt, lq)


def test_all_problems_of_a_set_are_counted_and_the_first_twenty_shown(folder, tmp_path):
    root = folder("lq", *[f"{i}.png" for i in range(30)])
    for i in range(25):
        (tmp_path / "lq" / f"{i}.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"(?s)25 problems.*0\.png.*19\.png.*and 5 more") as caught:
        SingleImageDataset(dataroot_lq=root)
    assert "20.png" not in str(caught.value)


@pytest.mark.parametrize("extension", [".png", ".jpg", ".bmp", ".tif", ".webp"])
def test_a_truncated_file_is_found_from_its_header_before_anything_runs(folder, tmp_path, extension):
    root = folder("lq", f"a{extension}", "b.png")
    path = tmp_path / "lq" / f"a{extension}"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=rf"a\{extension}: .*cut short"):
        SingleImageDataset(dataroot_lq=root)


def test_full_verification_finds_what_headers_hide_and_remembers_what_was_good(
    folder, tmp_path, monkeypatch, own_cache
):
    root = folder("lq", "a.png", "b.png")
    path = tmp_path / "lq" / "b.png"
    good = path.read_bytes()
    path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    SingleImageDataset(dataroot_lq=root)
    with pytest.raises(DataError, match=r"b\.png: wrong checksum"):
        SingleImageDataset(dataroot_lq=root, verify="full")
    path.write_bytes(good)

    decoded = []
    monkeypatch.setattr(
        data.verify, "decode", lambda content, label: decoded.append(label) or np.zeros((1, 1, 3), np.uint8)
    )
    SingleImageDataset(dataroot_lq=root, verify="full")
    assert [os.path.basename(label) for label in decoded] == ["b.png"]
    SingleImageDataset(dataroot_lq=root, verify="full")
    assert len(decoded) == 1
    assert all(json.loads(file.read_text()) for file in own_cache.rglob("*.json"))


@pytest.mark.parametrize("cache", ["a file", "a damaged cache"])
def test_an_unusable_cache_is_no_obstacle(folder, tmp_path, monkeypatch, own_cache, cache):
    root = folder("lq", "a.png")
    if cache == "a file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "file"))
    else:
        SingleImageDataset(dataroot_lq=root, verify="full")
        for file in own_cache.rglob("*.json"):
            file.write_text("{")
    assert len(SingleImageDataset(dataroot_lq=root, verify="full")) == 1


def test_transparent_pixels_are_found_before_anything_runs_and_opaque_alpha_passes(tmp_path, noise):
    opaque = np.dstack([noise((9, 9, 3)), np.full((9, 9), 255, np.uint8)])
    write_image(tmp_path / "a.png", opaque)
    for _ in range(2):
        assert SingleImageDataset(dataroot_lq=str(tmp_path))[0]["lq"].shape == (3, 9, 9)
    opaque[0, 0, 3] = 0
    write_image(tmp_path / "b.png", opaque)
    for _ in range(2):
        with pytest.raises(DataError, match=r"b\.png has transparent pixels; set alpha: drop, white or black"):
            SingleImageDataset(dataroot_lq=str(tmp_path))
    white = SingleImageDataset(dataroot_lq=str(tmp_path), alpha="white")[1]["lq"]
    assert white[:, 0, 0].tolist() == [1, 1, 1]


def test_a_picture_that_goes_bad_later_is_named_when_it_is_read(folder, tmp_path):
    found = SingleImageDataset(dataroot_lq=folder("lq", "a.png"), verify="off")
    (tmp_path / "lq" / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.png: No such file"):
        found[0]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ({"type": "dsik"}, "dsik is not known; did you mean disk"),
        ({"type": "memory", "kept": "x"}, "kept is not known for memory; did you mean keep"),
        ({"type": "memory", "keep": "x"}, "keep: x is not known"),
    ],
)
def test_a_wrong_backend_names_the_nearest_right_one(folder, backend, message):
    with pytest.raises(OptionsError, match=message):
        SingleImageDataset(dataroot_lq=folder("lq", "a.png"), io_backend=backend)


def test_a_missing_folder_option_says_so():
    with pytest.raises(OptionsError, match="the folder of pictures is missing"):
        SingleImageDataset(dataroot_lq=None)


@pytest.fixture
def database(tmp_path, noise):
    """An LMDB of the BasicSR layout; one key is cut at its first dot."""
    root = tmp_path / "lq.lmdb"
    pictures = {"0001_s001": noise((8, 9, 3)), "é ü": noise((8, 9, 1), seed=1), "img.v1_0": noise((8, 9, 3), seed=2)}
    with lmdb.open(str(root), map_size=1 << 22) as environment, environment.begin(write=True) as transaction:
        for name, image in pictures.items():
            key = "img" if name == "img.v1_0" else name
            transaction.put(key.encode(), encode(image, ".png"))
    lines = [f"{name}.png ({i.shape[0]},{i.shape[1]},{i.shape[2]}) 1" for name, i in pictures.items()]
    (root / "meta_info.txt").write_text("\n".join(lines), encoding="utf-8")
    return root, pictures


@pytest.mark.parametrize("backend", ["lmdb", "memory"])
def test_an_lmdb_of_basicsr_is_read(database, backend):
    root, pictures = database
    found = SingleImageDataset(dataroot_lq=str(root), io_backend={"type": backend})
    assert [found[i]["name"] for i in range(3)] == sorted(pictures)
    for item in (found[i] for i in range(3)):
        expected = np.broadcast_to(pictures[item["name"]], (8, 9, 3)).transpose(2, 0, 1)
        np.testing.assert_array_equal(np.round(item["lq"].numpy() * 255), expected)


def test_an_lmdb_serves_two_sets_pickles_and_forks(database):
    root, _ = database
    one, two = (SingleImageDataset(dataroot_lq=str(root), io_backend={"type": "lmdb"}) for _ in range(2))
    assert one[0]["lq"].equal(two[0]["lq"])
    assert pickle.loads(pickle.dumps(one))[0]["lq"].equal(two[0]["lq"])
    child = os.fork()
    if not child:
        os._exit(0 if len(one[1]["lq"]) == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert one[0]["lq"].equal(two[0]["lq"])


def test_an_lmdb_and_a_folder_are_not_taken_for_each_other(database, folder):
    root, _ = database
    with pytest.raises(OptionsError, match="is an LMDB; set io_backend"):
        SingleImageDataset(dataroot_lq=str(root))
    with pytest.raises(DataError, match=r"is not an LMDB: it has no data\.mdb"):
        SingleImageDataset(dataroot_lq=folder("plain", "a.png"), io_backend={"type": "lmdb"})
    (root / "meta_info.txt").write_text("gone.png (8,9,3) 1\n")
    with pytest.raises(DataError, match="has no entry gone"):
        SingleImageDataset(dataroot_lq=str(root), io_backend={"type": "lmdb"})


def test_two_sides_of_a_pair_are_never_turned_differently(tmp_path, photos):
    photo = photos["chelsea"][:40, :60]
    for side, orientation in (("gt", 6), ("lq", 1)):
        (tmp_path / side).mkdir()
        exif = Image.Exif()
        exif[0x112] = orientation
        file = io.BytesIO()
        Image.fromarray(photo).save(file, "jpeg", exif=exif)
        (tmp_path / side / "a.jpg").write_bytes(file.getvalue())
    item = pair(str(tmp_path / "gt"), str(tmp_path / "lq"), scale=1)[0]
    assert item["gt"].equal(item["lq"])
