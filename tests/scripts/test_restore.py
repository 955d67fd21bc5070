"""python -m scripts.restore: what comes out for each kind of picture, and what is refused with which words."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.modules.module import register_module_forward_hook

from archs import ARCHS
from data.io import decode, encode, read_image, write_image
from data.metadata import read_metadata
from data.resize import imresize
from models import runtime
from models.checkpoint import save_pth, save_safetensors
from models.infer import restore as restore_tensor
from scripts import restore

ROOT = Path(__file__).resolve().parents[2]
SPEC = {"type": "EDSR", "num_in_ch": 3, "num_out_ch": 3, "num_feat": 4, "num_block": 1, "upscale": 2}


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return ARCHS.build(SPEC).eval()


@pytest.fixture(scope="module")
def weights(network, tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_safetensors(file, network.state_dict(), {"network_g": SPEC, "scale": 2, "weights": "params_ema", "task": "sr"})
    return str(file)


@pytest.fixture
def tool(weights, capfd, monkeypatch, tmp_path):
    """tool(INPUT ..., options ...) in an empty folder with the tiny network; exit code and what was printed."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, own=True):
        capfd.readouterr()
        given = [str(argument) for argument in arguments] + (["--weights", weights] if own else [])
        code = runtime.run(restore.main, given)
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return call


@pytest.fixture(scope="module")
def photo():
    return read_image(ROOT / "datasets/quickstart/val/coffee.png")[60:101, 200:255]


def by_network(network, image):
    """What the network itself makes of an RGB picture, as numbers of the picture's own depth before rounding."""
    top = np.iinfo(image.dtype).max
    with torch.no_grad():
        result = network(torch.from_numpy(image / np.float32(top)).permute(2, 0, 1)[None])
    return result[0].permute(1, 2, 0).numpy().clip(0, 1) * top


def assert_written(result, expected, extension):
    if extension == ".jpg":
        expected = decode(encode(expected.round().astype(np.uint8), ".jpg")).astype(float)
        assert np.abs(result - expected).mean() < 0.1
    else:
        assert np.abs(result - expected).max() <= 0.51


@pytest.mark.parametrize("extension", [".png", ".tif", ".bmp", ".webp", ".jpg"])
def test_a_photograph_comes_out_as_the_network_makes_it(tool, tmp_path, network, photo, extension):
    write_image(tmp_path / f"a{extension}", photo)
    code, printed = tool(f"a{extension}")
    assert code == 0, printed
    result = read_image(tmp_path / "restored" / f"a_x2{extension}")
    expected = by_network(network, read_image(tmp_path / f"a{extension}"))
    assert_written(result, expected, extension)


@pytest.mark.parametrize("extension", [".png", ".tif"])
def test_sixteen_bits_are_restored_as_sixteen_bits(tool, tmp_path, network, photo, extension):
    deep = photo.astype(np.uint16) * 257 + np.arange(55, dtype=np.uint16)[:, None]
    write_image(tmp_path / f"a{extension}", deep.clip(0, 65535))
    assert tool(f"a{extension}")[0] == 0
    result = read_image(tmp_path / "restored" / f"a_x2{extension}")
    assert result.dtype == np.uint16
    assert np.abs(result - by_network(network, read_image(tmp_path / f"a{extension}"))).max() < 2
    # through 8 bits every sample would be a multiple of 257
    assert (result % 257 != 0).mean() > 0.9


def test_sixteen_bits_into_a_format_of_eight_are_told(tool, tmp_path, network, photo):
    write_image(tmp_path / "a.png", photo.astype(np.uint16) * 257)
    code, printed = tool("a.png", "--format", "webp")
    assert code == 0
    assert "8 bits, as .webp holds no 16" in printed
    result = read_image(tmp_path / "restored/a_x2.webp")
    assert np.abs(result - by_network(network, photo)).max() <= 0.51


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("alpha", [False, True])
def test_grey_stays_grey(tool, tmp_path, network, photo, alpha, dtype):
    grey = photo[..., 1:2].astype(dtype)
    picture = np.concatenate([grey, np.full_like(grey, 200)], axis=2) if alpha else grey
    write_image(tmp_path / "a.png", picture)
    assert tool("a.png")[0] == 0
    result = read_image(tmp_path / "restored/a_x2.png")
    assert (result.shape[2], result.dtype) == (2 if alpha else 1, dtype)
    expected = by_network(network, grey.repeat(3, axis=2)) @ [0.299, 0.587, 0.114]
    assert np.abs(result[..., 0] - expected).max() <= 0.6


def test_transparency_is_enlarged_by_bicubic(tool, tmp_path, photo):
    alpha = imresize(np.tile(np.linspace(0, 255, 6).astype(np.uint8), (5, 1)), 10)[:41, :55, None]
    write_image(tmp_path / "a.png", np.concatenate([photo, alpha], axis=2))
    assert tool("a.png")[0] == 0
    result = read_image(tmp_path / "restored/a_x2.png")
    assert np.abs(result[..., 3].astype(int) - imresize(alpha[..., 0], 2)).max() <= 1


def test_what_is_stored_under_transparent_pixels_does_not_show(tool, tmp_path, photo):
    alpha = np.zeros((41, 55, 1), np.uint8)
    alpha[5:30, 10:40] = 255
    results = []
    for name, under in (("black", 0), ("white", 255)):
        colors = np.where(alpha == 0, np.uint8(under), photo)
        write_image(tmp_path / f"{name}.png", np.concatenate([colors, alpha], axis=2))
        assert tool(f"{name}.png")[0] == 0
        results.append(read_image(tmp_path / f"restored/{name}_x2.png"))
    np.testing.assert_array_equal(*results)


def test_a_palette_with_transparency(tool, tmp_path, photo):
    picture = Image.fromarray(photo).quantize(16)
    picture.save(tmp_path / "a.png", transparency=3)
    code, printed = tool("a.png")
    assert code == 0, printed
    assert read_image(tmp_path / "restored/a_x2.png").shape == (82, 110, 4)


def test_transparency_needs_a_format_that_holds_it(tool, tmp_path, photo):
    write_image(tmp_path / "a.png", np.concatenate([photo, photo[..., :1]], axis=2))
    write_image(tmp_path / "b.png", photo)
    code, printed = tool("a.png", "b.png", "--format", "jpg")
    assert code == 3
    assert "--alpha white" in printed
    assert [path.name for path in (tmp_path / "restored").glob("*.*g")] == ["b_x2.jpg"]
    code, printed = tool("a.png", "b.png", "--format", "jpg", "--alpha", "white", "--force")
    assert code == 0, printed
    assert read_image(tmp_path / "restored/a_x2.jpg").shape == (82, 110, 3)


@pytest.mark.parametrize("target", ["jpg", "png", "webp", "tiff"])
def test_exif_data_and_profile_are_kept_and_the_picture_stands_upright(tool, tmp_path, network, photo, target):
    exif = Image.Exif()
    exif[274], exif[271] = 6, "Maker"
    exif.get_ifd(0x8769).update({40962: 55, 40963: 41})
    Image.fromarray(photo).save(tmp_path / "a.png", exif=exif, icc_profile=b"p" * 200)
    code, printed = tool("a.png", "--format", target)
    assert code == 0, printed
    assert "41 x 55" in printed
    assert "82 x 110" in printed
    (file,) = (path for path in (tmp_path / "restored").iterdir() if path.suffix != ".jsonl")
    opened = Image.open(file)
    found = opened.getexif()
    inner = found.get_ifd(0x8769)
    assert (found.get(274, 1), found[271], inner[40962], inner[40963]) == (1, "Maker", 82, 110)
    assert opened.info["icc_profile"] == b"p" * 200
    expected = by_network(network, np.ascontiguousarray(photo.swapaxes(0, 1)[:, ::-1]))
    assert_written(read_image(file), expected, file.suffix)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("CMYK", "CMYK JPEG.*save it as RGB"),
        ("pages", "several pages; save the page"),
        ("moving", "animated.*save the"),
    ],
)
def test_pictures_that_cannot_be_restored_faithfully_are_told_with_the_way_out(tool, tmp_path, photo, kind, words):
    picture = Image.fromarray(photo)
    more = {"save_all": True, "append_images": [picture.rotate(180)]}
    if kind == "CMYK":
        picture.convert("CMYK").save(tmp_path / "a.jpg")
    else:
        picture.save(tmp_path / ("a.tif" if kind == "pages" else "a.png"), **more)
    code, printed = tool(*tmp_path.iterdir())
    assert code == 3
    assert "1 failed" in printed
    assert re.search(words, printed.replace("\n", " "))


def test_tiles_give_what_the_whole_picture_gives(tool, tmp_path, photo):
    write_image(tmp_path / "a.png", photo)
    assert tool("a.png", "-o", "whole.png")[0] == 0
    code, printed = tool("a.png", "-o", "tiles.png", "--tile", 32)
    assert code == 0
    assert "in tiles of 32" in printed
    np.testing.assert_array_equal(read_image(tmp_path / "whole.png"), read_image(tmp_path / "tiles.png"))


def test_the_self_ensemble_is_that_of_the_library(tool, tmp_path, network, photo):
    write_image(tmp_path / "a.png", photo)
    assert tool("a.png", "--self_ensemble", "--dtype", "float32")[0] == 0
    lq = torch.from_numpy(photo / np.float32(255)).permute(2, 0, 1)[None]
    expected = restore_tensor(network, lq, self_ensemble=True)[0].permute(1, 2, 0).numpy().clip(0, 1) * 255
    assert np.abs(read_image(tmp_path / "restored/a_x2.png") - expected).max() <= 0.51


def test_weights_of_a_network_that_keeps_the_size(tool, tmp_path, photo):
    spec = {"type": "MBTaylorFormer", "dim": [4, 8, 8, 8], "num_blocks": [1, 1, 1, 1], "heads": [1, 1, 1, 1]}
    spec["num_path"] = [1, 1, 1, 1]
    network = ARCHS.build(spec)
    facts = {"network_g": spec, "scale": 1, "weights": "params_ema", "task": "dehaze"}
    save_safetensors(tmp_path / "haze.safetensors", network.state_dict(), facts)
    alpha = photo[..., :1]
    write_image(tmp_path / "a.png", np.concatenate([photo, alpha], axis=2))
    code, printed = tool("a.png", "--weights", "haze.safetensors", own=False)
    assert code == 0, printed
    result = read_image(tmp_path / "restored/a_dehazed.png")
    assert result.shape == (41, 55, 4)
    np.testing.assert_array_equal(result[..., 3:], alpha)
    code, printed = tool("a.png", "--weights", "haze.safetensors", "--task", "sr", own=False)
    assert (code, "is for dehaze" in printed) == (2, True)
    tiles = ("--tile", 20, "--overlap", 19, "-o", "b.png")
    code, printed = tool("a.png", "--weights", "haze.safetensors", *tiles, own=False)
    assert (code, "an overlap of 19 leaves less than 8 pixels of tiles of 16" in printed) == (3, True)


def test_haze_is_removed_up_to_the_edge_of_a_picture(tool, tmp_path):
    write_image(tmp_path / "fog.png", np.full((96, 120, 3), 199, np.uint8))
    code, printed = tool("fog.png", "--task", "dehaze", own=False)
    assert code == 0, printed
    grey = read_image(tmp_path / "restored/fog_dehazed.png").astype(float).mean(axis=2)
    assert grey.shape == (96, 120)
    inner = grey[24:-24, 24:-24].mean()
    for edge in (grey[0], grey[-1], grey[:, 0], grey[:, -1]):
        assert abs(edge[24:-24].mean() - inner) < 1


def test_weights_that_do_not_say_which_network_they_are_of(tool, tmp_path, network, photo):
    write_image(tmp_path / "a.png", photo)
    state = network.state_dict()
    save_pth(tmp_path / "net.pth", {"params": state, "params_ema": {k: v * 0 for k, v in state.items()}})
    code, printed = tool("a.png", "--weights", "net.pth", own=False)
    assert code == 2
    assert "--opt FILE.yml" in printed
    assert "--network" in printed
    described = "{" + ", ".join(f"{key}: {value}" for key, value in SPEC.items()) + "}"
    arguments = ("a.png", "--weights", "net.pth", "--param_key", "params")
    assert tool(*arguments, "--network", described, "-o", "one.png", own=False)[0] == 0
    (tmp_path / "run.yml").write_text(f"name: run\nnetwork_g: {described}\n")
    assert tool(*arguments, "--opt", "run.yml", "-o", "two.png", own=False)[0] == 0
    expected = by_network(network, photo)
    for name in ("one.png", "two.png"):
        assert np.abs(read_image(tmp_path / name) - expected).max() <= 0.51


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scale", "3"], "--scale 3: the network of .* enlarges by 2"),
        (["--task", "dehaze"], "--task dehaze: .* is for sr"),
        (["--device", "gpu"], "--device gpu is not known"),
        (["--dtype", "float16"], "--dtype: float16 is slower"),
        (["--param_key", "params"], "has no params, only params_ema"),
        (["--opt", "no.yml"], "there is no option file no.yml"),
        (["--network", "EDSR"], "the network must read"),
        (["--network", "{type: EDSX}"], "unknown network EDSX.*did you mean EDSR"),
        (["--network", "{type: EDSR, widht: 3}"], "widht"),
    ],
)
def test_options_that_fit_nothing_end_with_exit_code_2(tool, tmp_path, photo, arguments, words):
    write_image(tmp_path / "a.png", photo)
    code, printed = tool("a.png", *arguments)
    assert code == 2
    assert re.search(words, printed), printed
    assert not (tmp_path / "restored").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tile", "0"],
        ["--tile", "many"],
        ["--quality", "101"],
        ["--scale", "5"],
        ["--overlap", "-1"],
        ["--tile", "32", "--overlap", "32"],
        [],
    ],
)
def test_misspelt_options_are_told_before_anything_is_loaded(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        restore.main([*(["a.png"] if arguments else []), *arguments])
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_scale_that_is_not_shipped_is_told(tool, tmp_path, photo, monkeypatch):
    from scripts import restore_network

    monkeypatch.setattr(restore_network, "WEIGHTS", tmp_path)
    write_image(tmp_path / "a.png", photo)
    (tmp_path / "sst_tiny_x2.safetensors").touch()
    for asked, name in (("--scale 3", "sst_tiny_x3"), ("--task dehaze", "mb_taylorformer_tiny_dehaze")):
        code, printed = tool("a.png", *asked.split(), own=False)
        printed = printed.replace("\n", "")
        assert (code, f"{asked}: " in printed, f"{name}.safetensors" in printed) == (2, True, True)
        assert "what works: --scale 2, --weights FILE" in printed


def test_a_result_too_large_for_its_format_is_refused_before(tool, tmp_path):
    write_image(tmp_path / "a.png", np.zeros((1, 8200, 3), np.uint8))
    code, printed = tool("a.png", "--format", "webp")
    assert code == 3
    assert "16400 x 2 pixels, and a .webp file at most 16383" in printed.replace("\n", " ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a", "no file without extension can be written"),
        ("a.jfif", "no .jfif file can be written; take --format png, jpg, webp or tiff"),
        ("wide.png", "a .png file at most 1000000 along a side"),
        ("y" * 249 + ".png", "File name too long"),
    ],
    ids=["no extension", "extension", "wide", "name"],
)
def test_a_result_that_cannot_be_written_is_refused_before_anything_is_computed(tool, tmp_path, photo, name, words):
    picture = np.zeros((1, 500_001, 3), np.uint8) if name == "wide.png" else photo
    (tmp_path / name).write_bytes(encode(picture, ".png"))
    ran = []
    with register_module_forward_hook(lambda *_: ran.append(name)):
        code, printed = tool(name)
    assert (code, ran) == (3, [])
    assert words in printed.replace("\n", " ")
    assert not (tmp_path / "restored").exists()


def test_the_size_of_a_large_webp_is_told_as_it_stands(tool, tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    noise = np.random.default_rng(0).integers(0, 256, (500, 800, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.webp", lossless=True, exif=exif)
    code, printed = tool("a.webp", "--dry_run", "--tile", 64)
    assert (code, "500 x 800" in printed) == (0, True)


def test_ctrl_c_while_pytorch_is_loaded_shows_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "scripts.restore", "a.png"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_network_that_computes_nonsense_is_told(tool, tmp_path, network, photo):
    broken = {key: value * 1e30 for key, value in network.state_dict().items()}
    save_safetensors(tmp_path / "bad.safetensors", broken, {"network_g": SPEC, "weights": "params"})
    write_image(tmp_path / "a.png", photo)
    code, printed = tool("a.png", "--weights", "bad.safetensors", own=False)
    assert code == 3
    assert "NaN or infinite" in printed
    assert not list(tmp_path.glob("restored/*.png"))


def test_metadata_of_the_result_can_be_read_again(tool, tmp_path, photo):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[274] = 3
    Image.fromarray(photo).save(file, "tiff", exif=exif, icc_profile=b"q" * 300)
    (tmp_path / "a.tif").write_bytes(file.getvalue())
    assert tool("a.tif")[0] == 0
    found = read_metadata((tmp_path / "restored/a_x2.tif").read_bytes())
    assert (found.orientation, found.icc) == (1, b"q" * 300)
