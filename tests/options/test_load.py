"""A file becomes frozen options, or every mistake in it is told at once."""

import pytest

from options import load
from options.errors import OptionsError


def mistakes(error):
    """The lines of the message, without the head line."""
    return str(error.value).splitlines()[1:]


def test_a_right_file_loads_with_its_types(load_file, right):
    options = load_file(right)
    assert options.train.optim_g.spec()["lr"] == 1e-3
    assert options.datasets["val"].phase == "val"
    assert options.datasets["train"].scale == 2
    assert "batch_size_per_gpu" not in options.datasets["train"].arguments()


@pytest.mark.parametrize("seed", ["5", "5.0", "'5'"])
def test_the_seed_of_the_data_is_that_of_the_run(load_file, right, seed):
    options = load_file(right, f"manual_seed={seed}")
    assert (options.manual_seed, options.datasets["train"].seed) == (5, 5)


def test_options_are_frozen(load_file, right):
    options = load_file(right)
    with pytest.raises(ValueError, match="frozen"):
        options.name = "other"


def test_six_typos_are_six_messages_with_suggestions(load_file, right):
    right["modle_type"] = right.pop("model_type")
    right["network_g"]["dimm"] = right["network_g"].pop("dim")
    right["datasets"]["train"]["use_hflp"] = right["datasets"]["train"].pop("use_hflip")
    right["train"]["tota_iter"] = right["train"].pop("total_iter")
    right["train"]["optim_g"]["wieght_decay"] = right["train"]["optim_g"].pop("weight_decay")
    right["val"]["metrics"]["psnr"]["crop_boarder"] = right["val"]["metrics"]["psnr"].pop("crop_border")
    with pytest.raises(OptionsError) as error:
        load_file(right)
    told = mistakes(error)
    assert len(told) == 6
    for place, meant in [
        ("modle_type", "model_type"),
        ("network_g.dimm", "dim"),
        ("datasets.train.use_hflp", "use_hflip"),
        ("train.tota_iter", "total_iter"),
        ("train.optim_g.wieght_decay", "weight_decay"),
        ("val.metrics.psnr.crop_boarder", "crop_border"),
    ]:
        line = next(line for line in told if place in line)
        assert f"did you mean {meant}?" in line
        assert line.strip().startswith("line ")


@pytest.mark.parametrize(
    ("section", "name", "meant"),
    [
        (("network_g",), "STT", "SST"),
        (("train", "optim_g"), "AdamWW", "AdamW"),
        (("train", "scheduler"), "MultiStepLr", "MultiStepLR"),
        (("train", "pixel_opt"), "L1Los", "L1Loss"),
        (("val", "metrics", "psnr"), "calculate_pnsr", "calculate_psnr"),
        (("datasets", "train"), "PairedImgDataset", "PairedImageDataset"),
    ],
)
def test_a_misspelt_type_is_told_with_the_nearest_one(load_file, right, section, name, meant):
    part = right
    for key in section:
        part = part[key]
    part["type"] = name
    with pytest.raises(OptionsError, match=f"did you mean {meant}"):
        load_file(right)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train.total_iter=many", r"train\.total_iter: .*integer.*'many'"),
        ("train.total_iter=0", r"train\.total_iter: .*greater than or equal to 1, got 0"),
        ("train.total_iter=1.5", r"train\.total_iter"),
        ("network_g.dim=wide", r"network_g\.dim: .*integer.*'wide'"),
        ("network_g.window_sizes=[4, x]", r"network_g\.window_sizes"),
        ("train.ema_decay=1", r"train\.ema_decay: .*less than 1"),
        ("train.optim_g.lr=fast", r"train\.optim_g\.lr"),
        ("train.optim_g.type=~", r"train\.optim_g\.type"),
        ("name=a/b", r"name: 'a/b' cannot be the name of a folder"),
        ("network_g.exp_ratio='2'", r"network_g\.exp_ratio: must be a number, got '2'"),
        ("network_g.dim=16.0", r"network_g\.dim: must be a whole number, got 16\.0"),
        ("datasets.train.use_rot=1", r"datasets\.train\.use_rot: must be true or false, got 1"),
        ('path.root="a\\0b"', r"path\.root: .*is not a path"),
        ("network_g.exp_ratio=.inf", r"network_g\.exp_ratio: .*finite"),
        ("train.optim_g.lr=.nan", r"train\.optim_g\.lr: .*finite"),
        ("train.grad_clip=.inf", r"train\.grad_clip: .*finite"),
        ("manual_seed=18446744073709551616", r"manual_seed: .*less than"),
        ("datasets.train.io_backend={type: disk, kep: 1}", r"datasets\.train\.io_backend\.kep: unknown option"),
        ("model_type=SRGANModel", r"model_type: unknown model SRGANModel"),
        ("datasets.trian.type=PairedImageDataset", r"datasets\.trian: unknown phase trian; did you mean train\?"),
        ("datasets.train.scale=4", r"datasets\.train\.scale: is 4, but the run's scale is 2"),
        ("path.pretrain_network_g=absent.pth", r"path\.pretrain_network_g: there is no file absent\.pth"),
        ("path.resume_state=absent.state", r"path\.resume_state: there is no file absent\.state"),
        ("train.pixel_opt=~", r"give at least one loss"),
        ("train=~", r"train: is missing"),
        ("datasets=~", r"datasets"),
        ("network_g=SST", r"network_g"),
        (
            "train.scheduler={type: CosineAnnealingRestartLR, periods: [3]}",
            r"train\.scheduler\.periods: its periods end at iteration 3, before total_iter 4",
        ),
        ("val.metrics.psnr.type=[1]", r"val\.metrics\.psnr\.type"),
        ("logger.wandb.projekt=x", r"logger\.wandb\.projekt: unknown option; did you mean project\?"),
        ("num_gpu=-3", r"num_gpu: .*greater than or equal to 0, got -3"),
        ("num_gpu=all", r"num_gpu: .*'all'"),
        ("manual_seed=-1", r"manual_seed: .*greater than or equal to 0, got -1"),
        ("file=x.yml", r"file: unknown option"),
        ("datasets.val.name=../x", r"datasets\.val\.name: '\.\./x' cannot be the name of a folder"),
        ("datasets.train.name=..", r"datasets\.train\.name: '\.\.' cannot be the name of a folder"),
        ("datasets.val.name=''", r"datasets\.val\.name: '' cannot be the name of a folder"),
        ("datasets.val.phase=train", r"datasets\.val\.phase: is set by the program"),
        ("datasets.train.use_hflip=off", r"datasets\.train\.use_hflip: must be true or false, got 'off'"),
        ("train.nan_guard=false", r"train\.nan_guard: .*'stop', 'skip' or 'off', got False"),
        ("val.overlap=8", r"val: overlap has no meaning without tile"),
        ("val={tile: 32, overlap: 17}", r"val: overlap 17 is more than half of tile 32"),
        ("val.tile=8", r"val\.tile: .*greater than or equal to 16, got 8"),
        ("train.losses={char: {type: L1Loss}}", r"train\.losses: the label char must start with l_"),
        ("train.losses={l_pix: {type: L1Loss}}", r"train\.losses: the label l_pix must start with l_ and not be l_pix"),
        ("train.losses={l_x: {type: L1Los}}", r"train\.losses\.l_x\.type: .*did you mean L1Loss"),
        ("import_paths=mine.py", r"import_paths must be a list of files or folders, got 'mine\.py'"),
        ("import_paths=[5]", r"import_paths must be a list of files or folders, got \[5\]"),
    ],
)
def test_a_wrong_value_is_told_with_its_place(load_file, right, override, text):
    with pytest.raises(OptionsError, match=text):
        load_file(right, override)


def test_a_typo_in_a_schedule_is_told_once(load_file, right):
    right["train"]["scheduler"]["gama"] = right["train"]["scheduler"].pop("gamma")
    with pytest.raises(OptionsError) as error:
        load_file(right)
    assert len(mistakes(error)) == 1
    assert "train.scheduler.gama: unknown argument of MultiStepLR; did you mean gamma?" in mistakes(error)[0]


def test_a_missing_type_lists_what_there_is(load_file, right):
    del right["train"]["pixel_opt"]["type"]
    with pytest.raises(OptionsError, match=r"train\.pixel_opt\.type: type is missing \(one of .*L1Loss"):
        load_file(right)


def test_a_missing_dataset_argument_is_told(load_file, right):
    del right["datasets"]["train"]["dataroot_gt"]
    with pytest.raises(OptionsError, match=r"datasets\.train\.dataroot_gt: is missing"):
        load_file(right)


@pytest.mark.parametrize("separator", [".", ":"])
def test_overrides_are_typed_like_yaml(load_file, right, separator):
    path = separator.join(["train", "optim_g", "lr"])
    options = load_file(right, f"{path}=2e-4", "val.suffix=a=b", "train.scheduler=~", "network_g.ranks=[2, 2]")
    assert options.train.optim_g.spec()["lr"] == 2e-4
    assert options.val.suffix == "a=b"
    assert options.train.scheduler is None
    assert options.network_g.spec()["ranks"] == [2, 2]


def test_overrides_are_never_run_as_code(load_file, right, tmp_path):
    target = tmp_path / "made"
    with pytest.raises(OptionsError):
        load_file(right, f"train.total_iter=!!python/object/apply:pathlib.Path.touch ['{target}']")
    options = load_file(right, f"val.suffix=__import__('pathlib').Path('{target}').touch()")
    assert options.val.suffix.startswith("__import__")
    assert not target.exists()


@pytest.mark.parametrize("text", ["train.total_iter", "=5", "a..b=1", "name.sub=1"])
def test_a_malformed_override_is_told(load_file, right, text):
    with pytest.raises(OptionsError, match="the override"):
        load_file(right, text)


def test_an_override_can_leave_a_set_out(load_file, right):
    assert list(load_file(right, "datasets.val=null").datasets) == ["train"]
    with pytest.raises(OptionsError, match="vla=null' leaves out a set that the file does not have"):
        load_file(right, "datasets.vla=null")


def test_an_override_can_add_a_section(load_file, right):
    options = load_file(right, "datasets.val_2.type=DownsampleImageDataset", "datasets.val_2.dataroot_gt=x")
    assert options.datasets["val_2"].arguments()["dataroot_gt"] == "x"


def test_keys_without_effect_are_named(load_file, right, caplog):
    load_file(right, "val.rgb2bgr=true", "val.max_minibatch=8", "train.use_ema=true")
    for place in ("val.rgb2bgr", "val.max_minibatch", "train.use_ema"):
        assert f"{place} has no effect" in caplog.text


def test_the_published_vocabulary_is_known(load_file, right):
    right["train"] |= {
        "warmup_iter": -1,
        "use_grad_clip": True,
        "mixing_augs": {"mixup": False, "mixup_beta": 1.2, "use_identity": True},
        "fft_loss_opt": {"type": "FFTLoss", "loss_weight": 0.1, "reduction": "mean"},
        "scheduler": {
            "type": "CosineAnnealingRestartCyclicLR",
            "periods": [2, 2],
            "restart_weights": [1, 1],
            "eta_mins": [3e-4, 1e-6],
        },
    }
    right["datasets"]["train"] |= {
        "geometric_augs": True,
        "mini_batch_sizes": [2],
        "iters": [4],
        "gt_sizes": [32],
        "use_shuffle": True,
        "dataset_enlarge_ratio": 1,
        "prefetch_mode": None,
    }
    right["val"] |= {"window_size": 8, "save_img": False, "rgb2bgr": True, "use_image": True, "max_minibatch": 8}
    right["logger"] |= {"use_tb_logger": True, "wandb": {"project": None, "resume_id": None}}
    right["dist_params"] = {"backend": "nccl", "port": 29500}
    options = load_file(right)
    assert options.train.use_grad_clip
    assert set(options.train.loss_specs()) == {"l_pix", "l_fft"}


def test_debug_shortens_the_intervals(load_file, right):
    options = load_file(right, debug=True)
    assert options.name == "debug_small"
    assert (options.val.val_freq, options.logger.print_freq) == (8, 1)
    assert not options.logger.use_tb_logger


def test_a_test_run_needs_no_training_section(load_file, right):
    del right["train"], right["datasets"]["train"]
    assert load_file(right, training=False).train is None
    right["datasets"] = {}
    with pytest.raises(OptionsError, match="no set to test on"):
        load_file(right, training=False)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("num_gpu=2", 2),
        ("num_gpu=auto", "auto"),
        ("manual_seed=~", 0),
        ("train.nan_guard=off", "off"),
        ("val={tile: 32, overlap: 16}", 16),
        ("train.losses={l_x: {type: L1Loss}}", {"l_pix", "l_x"}),
    ],
)
def test_a_right_value_is_taken(load_file, right, override, value):
    options = load_file(right, override)
    found = {
        "num_gpu": options.num_gpu,
        "manual_seed": options.manual_seed,
        "train.nan_guard": options.train.nan_guard,
        "val": options.val.overlap,
        "train.losses": set(options.train.loss_specs()),
    }
    assert found[override.split("=")[0]] == value


def test_no_seed_is_seed_0_for_the_data_too(load_file, right):
    assert load_file(right, "manual_seed=~").datasets["train"].seed == 0


def test_two_sets_to_judge_on_need_two_names(load_file, right):
    right["datasets"]["val_2"] = dict(right["datasets"]["val"])
    with pytest.raises(OptionsError, match="two sets are called held-out"):
        load_file(right)
    right["datasets"]["val_2"]["name"] = "more"
    assert len(load_file(right).phase("val")) == 2


def test_a_second_training_set_is_refused(load_file, right):
    right["datasets"]["train_2"] = {**right["datasets"]["train"], "name": "more"}
    with pytest.raises(OptionsError, match="only one training set"):
        load_file(right)


# own components


OWN = """from torch import nn

from archs import ARCHS


@ARCHS.register()
class PlainFromAPath(nn.Module):
    def __init__(self, *, width: int = 8) -> None:
        super().__init__()
"""


@pytest.fixture
def own_file(own_registry, right, tmp_path):
    """``own_file(text)``: a file of one's own, named in the options."""
    right["import_paths"] = ["my_archs"]
    (tmp_path / "my_archs").mkdir()

    def write(text):
        (tmp_path / "my_archs/plain.py").write_text(text)

    return write


def test_own_components_are_imported_from_a_path(load_file, right, own_file):
    own_file(OWN)
    right["network_g"] = {"type": "PlainFromAPath", "width": 4}
    assert load_file(right).network_g.arguments() == {"width": 4}
    right["network_g"]["widht"] = 4
    with pytest.raises(OptionsError, match=r"did you mean width\?"):
        load_file(right)


def test_a_syntax_error_in_an_own_file_is_told_with_its_line(load_file, right, own_file):
    own_file(OWN.replace("class PlainFromAPath(nn.Module):", "class PlainFromAPath(nn.Module)"))
    with pytest.raises(OptionsError, match=r"plain\.py cannot be imported: .*line 7"):
        load_file(right)


def test_a_missing_module_of_an_own_file_is_told(load_file, right, own_file):
    own_file("import there_is_no_such_module\n")
    with pytest.raises(OptionsError, match=r"plain\.py cannot be imported: .*there_is_no_such_module"):
        load_file(right)


def test_a_clash_with_a_shipped_name_is_told_with_both_files(load_file, right, own_file):
    own_file(OWN.replace("PlainFromAPath", "SST"))
    with pytest.raises(OptionsError, match=r"network SST is registered twice, by .*sst\.py and .*plain\.py"):
        load_file(right)


def test_an_own_file_that_was_mended_can_be_imported(load_file, right, own_file):
    own_file("import there_is_no_such_module\n")
    with pytest.raises(OptionsError):
        load_file(right)
    own_file(OWN)
    right["network_g"] = {"type": "PlainFromAPath"}
    assert load_file(right).network_g.type == "PlainFromAPath"


def test_own_files_can_be_named_in_the_environment(load_file, right, own_file, tmp_path, monkeypatch):
    own_file(OWN)
    del right["import_paths"]
    monkeypatch.setenv("PELLUCID_IMPORT", str(tmp_path / "my_archs/plain.py"))
    right["network_g"] = {"type": "PlainFromAPath"}
    assert load_file(right).network_g.type == "PlainFromAPath"


def test_a_missing_import_path_is_told(load_file, right):
    right["import_paths"] = ["nowhere"]
    with pytest.raises(OptionsError, match=r"there is no folder or \.py file nowhere"):
        load_file(right)


def test_the_command_line_takes_both_spellings_of_overrides():
    args = load.parse(["-opt", "x.yml", "a.b=1", "--force_yml", "c:d=2", "e:f=3", "--dry_run"], program="train.py")
    assert (args.overrides, args.force_yml, args.dry_run) == (["a.b=1"], ["c:d=2", "e:f=3"], True)
    args = load.parse(["-opt", "x.yml", "--local-rank", "1", "--launcher", "pytorch", "a=1"], program="train.py")
    assert (args.local_rank, args.launcher, args.overrides) == (1, "pytorch", ["a=1"])


def test_the_message_gives_lines_of_the_file(load_file, right, tmp_path):
    right["logger"]["print_frek"] = 5
    with pytest.raises(OptionsError) as error:
        load_file(right)
    line = next(i for i, text in enumerate((tmp_path / "run.yml").read_text().splitlines(), 1) if "print_frek" in text)
    assert f"line {line}: logger.print_frek: unknown option; did you mean print_freq?" in str(error.value)
