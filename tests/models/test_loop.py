"""fit is bounded by iterations, writes what it promises, and evaluate judges as the protocol says."""

import json
import math
import signal

import cv2
import numpy as np
import pytest
import torch
from safetensors import safe_open

import data
from models import checkpoint, loop
from models.metrics import METRICS
from models.restoration import NotFinite
from models.runtime import Interrupted


@pytest.fixture
def run(make_options, make_model, tools, tmp_path):
    """``run("train.total_iter=6", ...)``: fit in an empty folder; returns model, folder and scores."""

    def fit(*overrides, model=None, options=None):
        options = options or make_options(f"path.root={tmp_path}", "logger.use_tb_logger=false", *overrides)
        model = model or make_model(options)
        train_loader = data.build_loader(options.datasets["train"])
        val = {d.name: data.build_loader(d) for d in options.phase("val").values()}
        folder = tmp_path / "experiment"
        folder.mkdir(exist_ok=True)
        return model, folder, loop.fit(model, train_loader, val, options, tools, folder=folder)

    fit.folder = tmp_path / "experiment"
    return fit


@pytest.fixture
def one_small_picture(tmp_path, right):
    """A validation set of one corner of a photograph, so that validation takes no time."""
    folder = tmp_path / "corner"
    folder.mkdir()
    picture = cv2.imread("datasets/quickstart/val/coffee.png")
    cv2.imwrite(str(folder / "corner.png"), picture[100:164, 200:280])
    right["datasets"]["val"]["dataroot_gt"] = str(folder)
    return folder


def rows(folder, kind):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.usefixtures("one_small_picture")
def test_training_ends_at_total_iter_though_the_batch_exceeds_the_set(run):
    model, folder, scores = run("train.total_iter=5", "datasets.train.batch_size_per_gpu=16", "val.val_freq=2")
    assert model.iteration == 5
    assert [row["iter"] for row in rows(folder, "train")] == [1, 2, 3, 4, 5]
    # the last validation belongs to the last iteration, and is not done twice
    assert [row["iter"] for row in rows(folder, "val")] == [2, 4, 5]
    assert scores[0].means()["psnr"] == rows(folder, "val")[-1]["scores"]["psnr"]


@pytest.mark.usefixtures("one_small_picture")
def test_a_run_leaves_weights_states_pictures_and_a_curve(run):
    model, folder, _ = run("val.save_img=true")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {
        "models/net_g_2.pth",
        "models/net_g_4.pth",
        "models/net_g_latest.pth",
        "models/net_g_best.safetensors",
        "training_states/2.state",
        "training_states/4.state",
        "visualization/held-out/corner/corner_2.png",
        "visualization/held-out/corner/corner_4.png",
        "metrics.jsonl",
        "curve.png",
        "index.html",
    }
    saved = torch.load(folder / "models/net_g_latest.pth", weights_only=True)
    torch.testing.assert_close(dict(saved["params_ema"]), dict(model.ema.network.state_dict()))
    picture = cv2.imread(str(folder / "visualization/held-out/corner/corner_4.png"))
    assert picture.shape == (64, 80, 3)
    assert cv2.imread(str(folder / "curve.png")).std() > 5


@pytest.mark.usefixtures("one_small_picture")
def test_the_best_weights_carry_what_they_are(run):
    model, folder, _ = run()
    with safe_open(folder / "models/net_g_best.safetensors", "pt") as file:
        facts = file.metadata()
        keys = set(file.keys())
    assert json.loads(facts["network_g"])["type"] == "SST"
    assert facts["scale"] == "2"
    assert facts["weights"] == "params_ema"
    assert keys == set(model.network.state_dict())
    best = max(rows(folder, "val"), key=lambda row: row["scores"]["psnr"])
    assert facts["iteration"] == str(best["iter"])


@pytest.fixture
def mean_error(monkeypatch):
    """A metric of one's own, of which less is better."""

    def mean_error(img, img2):
        return float(np.abs(img.astype(float) - img2).mean())

    mean_error.better = "lower"
    monkeypatch.setattr(METRICS, "_entries", {**METRICS._entries, "mean_error": mean_error})


@pytest.mark.usefixtures("one_small_picture", "mean_error")
@pytest.mark.parametrize(
    ("metric", "pick"),
    [
        ("{type: calculate_psnr}", max),
        ("{type: calculate_psnr, better: lower}", min),
        ("{type: mean_error}", min),
        ("{type: mean_error, better: higher}", max),
    ],
)
def test_the_best_is_by_the_metric_or_as_the_options_say(run, metric, pick):
    # forth and back, so that the first, a middle and the last validation differ
    schedule = "train.scheduler={type: MultiStepLR, milestones: [2, 4], gamma: 0.3}"
    _, folder, _ = run(f"val.metrics={{m: {metric}}}", schedule, "train.total_iter=6", "val.val_freq=1")
    with safe_open(folder / "models/net_g_best.safetensors", "pt") as file:
        kept = file.metadata()
    best = pick(rows(folder, "val"), key=lambda row: row["scores"]["m"])
    assert (kept["iteration"], json.loads(kept["scores"])) == (str(best["iter"]), best["scores"])


def test_the_first_set_decides_which_weights_are_the_best(run, one_small_picture, tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    picture = cv2.imread(str(one_small_picture / "corner.png"))
    cv2.imwrite(str(tmp_path / "more/narrow.png"), picture[:, :40])
    # the first set is best at the start, the second at the end
    scripts = {80: iter([3.0, 2.0, 1.0]), 40: iter([1.0, 2.0, 3.0])}
    monkeypatch.setattr(METRICS, "_entries", {"scripted": lambda img, img2: next(scripts[img.shape[1]])})
    second = f"datasets.val_2={{type: DownsampleImageDataset, dataroot_gt: {tmp_path / 'more'}}}"
    _, folder, _ = run("val.metrics={m: {type: scripted}}", second, "train.total_iter=3", "val.val_freq=1")
    with safe_open(folder / "models/net_g_best.safetensors", "pt") as file:
        assert file.metadata()["iteration"] == "1"


@pytest.mark.usefixtures("one_small_picture")
def test_the_first_metric_decides_which_weights_are_the_best(run):
    metrics = "val.metrics={a: {type: calculate_psnr, better: lower}, b: {type: calculate_psnr}}"
    _, folder, _ = run(metrics, "train.total_iter=3", "val.val_freq=1")
    with safe_open(folder / "models/net_g_best.safetensors", "pt") as file:
        iteration = int(file.metadata()["iteration"])
    assert iteration == min(rows(folder, "val"), key=lambda row: row["scores"]["a"])["iter"]


@pytest.mark.usefixtures("one_small_picture")
def test_a_state_is_saved_before_each_validation_and_again_with_its_scores(run, monkeypatch):
    seen = []
    evaluate = loop.evaluate

    def watched(model, *arguments, **settings):
        state = checkpoint.load_state(folder / f"training_states/{model.iteration}.state")
        seen.append((model.iteration, state["validated"]))
        return evaluate(model, *arguments, **settings)

    monkeypatch.setattr(loop, "evaluate", watched)
    folder = run.folder
    run()
    assert seen == [(2, 0), (4, 2)]
    assert checkpoint.load_state(folder / "training_states/4.state")["validated"] == 4


@pytest.mark.usefixtures("one_small_picture")
def test_old_checkpoints_go_where_asked(run):
    _, folder, _ = run("train.total_iter=6", "logger.keep_checkpoints=1")
    assert {path.name for path in (folder / "models").iterdir()} == {
        "net_g_6.pth",
        "net_g_latest.pth",
        "net_g_best.safetensors",
    }
    assert [path.name for path in (folder / "training_states").iterdir()] == ["6.state"]


@pytest.mark.usefixtures("one_small_picture")
def test_a_signal_saves_a_state_of_the_finished_step(run, make_options, make_model, tmp_path):
    options = make_options(f"path.root={tmp_path}", "logger.use_tb_logger=false", "train.total_iter=50")
    model = make_model(options)
    step = model.train_step

    def signalled(batches):
        if model.iteration == 2:
            signal.raise_signal(signal.SIGTERM)
        return step(batches)

    model.train_step = signalled
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as stop:
        run(model=model, options=options)
    assert stop.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    state = checkpoint.load_state(tmp_path / "experiment/training_states/3.state")
    assert state["model"]["iteration"] == 3


@pytest.mark.usefixtures("one_small_picture")
def test_a_loss_that_is_not_finite_saves_the_state_before_it(run, make_options, make_model, tmp_path):
    options = make_options(f"path.root={tmp_path}", "logger.use_tb_logger=false", "train.total_iter=50")
    model = make_model(options)
    step = model.train_step

    def spoiled(batches):
        if model.iteration == 1:
            batches[0]["gt"][:] = math.nan
        return step(batches)

    model.train_step = spoiled
    with pytest.raises(NotFinite, match="iteration 2"):
        run(model=model, options=options)
    state = checkpoint.load_state(tmp_path / "experiment/training_states/1.state")
    assert all(value.isfinite().all() for value in state["model"]["weights"]["params"].values())


def test_a_validation_picture_is_scored_as_the_saved_file_would_be(make_options, make_model, tools, tmp_path):
    metrics = {
        "psnr": {"type": "calculate_psnr", "crop_border": 2, "test_y_channel": True},
        "ssim": {"type": "calculate_ssim", "crop_border": 2, "test_y_channel": True},
    }
    options = make_options(val={"metrics": metrics, "baseline": "bicubic"})
    loader = data.build_loader(options.datasets["val"])
    model = make_model(options)

    def only_coffee():
        return (batch for batch in loader if batch["name"] == ["coffee"])

    (scores,) = loop.evaluate(
        model, {"set": only_coffee()}, options, tools, picture_path=lambda name, picture: tmp_path / f"{picture}.png"
    )
    # published protocol: MATLAB's bicubic down and up in 8 bit, Y, crop 2
    assert scores.baseline_means()["psnr"] == pytest.approx(30.5924, abs=2e-4)
    assert scores.baseline_means()["ssim"] == pytest.approx(0.885872, abs=2e-6)
    from models.metrics import calculate_psnr

    result = cv2.imread(str(tmp_path / "coffee.png"))[..., ::-1]
    truth = cv2.imread("datasets/quickstart/val/coffee.png")[..., ::-1]
    assert scores.means()["psnr"] == calculate_psnr(result, truth, 2, test_y_channel=True)


def test_pictures_without_ground_truth_are_restored_but_not_scored(make_options, make_model, tools, tmp_path, caplog):
    cv2.imwrite(str(tmp_path / "x.png"), np.full((9, 7, 3), 100, np.uint8))
    options = make_options(f"datasets.val={{type: SingleImageDataset, dataroot_lq: {tmp_path}, name: alone}}")
    made = []
    (scores,) = loop.evaluate(
        make_model(options),
        {"alone": data.build_loader(options.datasets["val"])},
        options,
        tools,
        on_picture=lambda name, judged: made.append((name, judged.name, judged.output.rounded.shape)),
    )
    assert made == [("alone", "x", (18, 14, 3))]
    assert scores.rows == []
    assert "has no ground truth" in caplog.text


def test_identical_pictures_are_reported_as_infinite(make_options, tools):
    class Same:
        def predict(self, lq):
            return lq

    picture = torch.rand(1, 3, 16, 16)
    options = make_options(val={"metrics": {"psnr": {"type": "calculate_psnr"}}})
    (scores,) = loop.evaluate(Same(), {"s": [{"lq": picture, "gt": picture, "name": ["a"]}]}, options, tools)
    assert scores.means()["psnr"] == math.inf
    assert scores.unusual() == ["s/a: psnr is inf"]


@pytest.mark.usefixtures("one_small_picture")
def test_weights_that_are_spoilt_are_not_saved_as_the_last_good_ones(run, make_options, make_model, tmp_path, caplog):
    options = make_options(f"path.root={tmp_path}", "logger.use_tb_logger=false", "train.total_iter=50")
    model = make_model(options)
    step = model.train_step

    def spoiling(batches):
        logs = step(batches)
        # as an update by an infinite rate leaves them, after a loss that was fine
        next(model.network.parameters()).data.fill_(math.nan)
        return logs

    model.train_step = spoiling
    with pytest.raises(NotFinite, match="iteration 2"):
        run(model=model, options=options)
    assert "the weights hold NaN, so they are not saved" in caplog.text
    assert not list((tmp_path / "experiment").glob("models/*.pth"))
