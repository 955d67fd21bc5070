"""The text of the option files of the published MB-TaylorFormer networks, from the table in ``scripts.mbt_table``."""

from collections.abc import Iterable

from archs.mb_taylorformer import PRESETS
from scripts.mbt_table import OWN_FILE, WEIGHTS, Pairs, Setting, settings

# label after psnr and ssim -> arguments; the first is the protocol of the authors' scripts
_FLOAT, _8BIT = "quantize: false", ""
_ROUNDED_FIRST = {"": _8BIT, "_float": _FLOAT}
METRICS = {
    "dehaze": {"": _FLOAT, "_8bit": _8BIT},
    "denoise": {"": _FLOAT, "_8bit": _8BIT},
    "deblur": _ROUNDED_FIRST,
    "derain": {"": "test_y_channel: true", "_float": "test_y_channel: true, quantize: false"},
    "desnow": {"": "test_y_channel: true", "_rgb": _8BIT, "_float": _FLOAT},
}
PROTOCOLS = {
    "dehaze": ("psnr and ssim as in the authors' script: RGB, clamped and not rounded;",),
    "denoise": ("psnr and ssim as in the authors' script: RGB, clamped and not rounded;",),
    "deblur": ("psnr and ssim as in the authors' script: RGB of the saved files, 8 bit;",),
    "derain": (
        "psnr and ssim on Y of BT.601 of the saved files, 8 bit, as the authors' script does in MATLAB,",
        "which also rounds Y;",
    ),
    "desnow": (
        "psnr and ssim on Y of BT.601, 8 bit, as the authors' option file judges the training (they have no",
        "script for the scores);",
    ),
}
OTHERS = {
    "dehaze": "psnr_8bit and ssim_8bit on the saved files.",
    "denoise": "psnr_8bit and ssim_8bit on the saved files.",
    "deblur": "psnr_float and ssim_float before the rounding.",
    "derain": "psnr_float and ssim_float before the rounding.",
    "desnow": "psnr_rgb and ssim_rgb on the saved files, psnr_float and ssim_float on RGB before the rounding.",
}


def files(others: Iterable[Setting] = ()) -> dict[str, str]:
    """Path from the checkout -> text of every file of the table, and of ``others`` like them."""
    found = {}
    for setting in (*settings(), *others):
        found[_path(setting, "train")] = training_file(setting)
        found[_path(setting, "test")] = test_file(setting)
    return found


def training_file(setting: Setting) -> str:
    """The text of the option file for training."""
    watched = setting.data.watched
    return f"""{_training_head(setting)}
{_top(setting)}
manual_seed: {setting.seed}

{_network(setting)}

datasets:
  train:
    name: {setting.corpus}
{_source(setting.data.train)}
    gt_size: 256
    use_hflip: true
    use_rot: true
    small: pad
    batch_size_per_gpu: {setting.batch}
    num_worker_per_gpu: 8
  val:
    name: {watched}
{_source(setting.data.test[watched])}

path:
  pretrain_network_g: ~
  strict_load_g: true

train:
  total_iter: 500000
  use_grad_clip: true
  grad_clip: 0.01
  optim_g: {{type: AdamW, lr: {setting.lr}, betas: [0.9, 0.999], weight_decay: 1e-4}}
  scheduler:
    type: CosineAnnealingRestartCyclicLR
    periods: [200000, 300000]
    restart_weights: [1, 1]
    eta_mins: [{setting.lr}, {setting.floor}]
{_losses(setting)}

val:
  val_freq: 4000
  save_img: false
  baseline: input
{_metrics({"": "test_y_channel: true" if setting.luma else _8BIT})}

logger:
  print_freq: 100
  save_checkpoint_freq: 4000
  use_tb_logger: true
"""


def test_file(setting: Setting) -> str:
    """The text of the option file for testing."""
    task = setting.data.task
    sets = {name: pairs for name, pairs in setting.data.test.items() if not name.endswith("-crops")}
    parts = [
        f"  test_{number}:\n    name: {name}\n{_source(pairs)}" for number, (name, pairs) in enumerate(sets.items(), 1)
    ]
    head = [
        f"# {setting.title}: the test of",
        f"# {setting.paper}.",
        *_test_command(setting),
        *_expected(setting),
        *_lines("Protocol:", "whole pictures, continued by reflection to multiples of 8;", *PROTOCOLS[task]),
        f"#           {OTHERS[task]}",
        *_layout("Judged:", list(sets.values())),
        *_origin(),
    ]
    return (
        "\n".join(head)
        + f"""
{_top(setting)}

{_network(setting)}

datasets:
{chr(10).join(parts)}

path:
  pretrain_network_g: experiments/{setting.name}/models/net_g_latest.pth
  strict_load_g: true

val:
  save_img: true
  baseline: input
{_metrics(METRICS[task])}
"""
    )


def _path(setting: Setting, kind: str) -> str:
    return f"options/{kind}/{setting.data.task}/{setting.name}.yml"


def _training_head(setting: Setting) -> str:
    file, batch = _path(setting, "train"), setting.batch
    protocol = "Y of BT.601" if setting.luma else "RGB"
    head = [
        f"# {setting.title}, as in",
        f"# {setting.paper}.",
        f"# Command:  torchrun --nproc_per_node=8 train.py -opt {file} \\",
        "#             --launcher pytorch",
        f"#           One GPU, the same {8 * batch} samples a step (8 x {batch}, accumulated):",
        f"#           python train.py -opt {file} train.accum_iter=8",
        *_expected(setting),
        *_settings(setting),
        *_layout("Data:", [setting.data.train], setting.data.source),
        *_layout("Judged:", [setting.data.test[setting.data.watched]]),
        f"# Protocol: whole pictures, {protocol}, rounded to 8 bit, no crop, as the authors judge the training.",
    ]
    return "\n".join([*head, *_origin()])


def _settings(setting: Setting) -> list[str]:
    known = setting.corpus in OWN_FILE[setting.version, setting.size]
    told = ["those of the authors' option file."]
    if not known:
        told = ["those of the authors' option files for other data; theirs for this set is not published."]
    if setting.version == 1:
        told.append("It ends at 1e-5, where the paper's text has 1e-6.")
        if setting.size == "B":
            told.append("Theirs starts from weights that are not published; this one starts anew.")
    if setting.batch == 2:
        told.append("Theirs loads 4 samples for each GPU and trains on 2 of them; this one loads 2.")
    return _lines("Settings:", *told, *setting.notes)


def _test_command(setting: Setting) -> list[str]:
    file, weights = _path(setting, "test"), WEIGHTS.get(setting.key)
    lines = [f"# Command:  python test.py -opt {file}"]
    if weights is not None:
        lines += [
            "#           The authors' weights:",
            f"#           python test.py -opt {file} \\",
            f"#             path.pretrain_network_g=pretrained_models/{weights}.pth",
        ]
    if setting.corpus == "GoPro":
        lines.append("#           For HIDE the authors have weights of their own, HIDE-XL.pth.")
    return lines


def _expected(setting: Setting) -> list[str]:
    return _lines("Expected:", *setting.expected)


def _layout(word: str, sets: list[Pairs], source: str = "") -> list[str]:
    told = [f"{source}:"] if source else []
    for pairs in sets:
        rule = f"paired by the names of {pairs.naming}" if pairs.naming else "pairs of equal names, of any ending"
        if pairs.lq == pairs.gt:
            told += [f"datasets/{pairs.lq} ({rule})"]
        else:
            told += [f"datasets/{pairs.lq} with datasets/{pairs.gt}", f"({rule})"]
    return _lines(word, *told)


def _lines(word: str, first: str, *others: str) -> list[str]:
    return [f"# {word:<9} {first}", *(f"#           {text}" for text in others)]


def _origin() -> list[str]:
    return ["# Generated by python -m scripts.make_options; give another name to a file that you change."]


def _top(setting: Setting) -> str:
    return f"name: {setting.name}\nmodel_type: RestorationModel\nscale: 1\nnum_gpu: auto"


def _network(setting: Setting) -> str:
    sizes = {key: list(value) for key, value in PRESETS[setting.preset].items() if key != "type"}
    options = {"type": setting.network, **sizes, "offset_clamp": [-3, 3], **setting.extra}
    return "\n".join(["network_g:", *(f"  {key}: {value}" for key, value in options.items())])


def _source(pairs: Pairs) -> str:
    lines = [
        f"type: {'ResideDataset' if pairs.naming else 'PairedImageDataset'}",
        f"dataroot_gt: datasets/{pairs.gt}",
        f"dataroot_lq: datasets/{pairs.lq}",
    ]
    lines += [f"naming: {pairs.naming}"] if pairs.naming else []
    lines += [f"split: {pairs.split}"] if pairs.split else []
    lines += [f"io_backend: {{type: {'memory' if pairs.memory else 'disk'}}}"]
    return "\n".join(f"    {line}" for line in lines)


def _losses(setting: Setting) -> str:
    lines = ["  pixel_opt: {type: L1Loss, loss_weight: 1.0, reduction: mean}"]
    lines += ["  fft_loss_opt: {type: FFTLoss, loss_weight: 0.1, reduction: mean}"] if setting.version == 2 else []
    return "\n".join(lines)


def _metrics(kinds: dict[str, str]) -> str:
    lines = ["  metrics:"]
    for label, arguments in kinds.items():
        for metric in ("psnr", "ssim"):
            more = f", {arguments}" if arguments else ""
            lines.append(f"    {metric}{label}: {{type: calculate_{metric}{more}}}")
    return "\n".join(lines)
