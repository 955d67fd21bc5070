"""Write the option files of the published networks from their tables: python -m scripts.make_options.

SST's are here, MB-TaylorFormer's in ``scripts.mbt_options``; those of WildCat, from ``scripts.wildcat_table``, are like
them; those of the small networks that ship are in ``scripts.tiny_table``. ``--check`` writes nothing and says which
file differs from its table. A file that differs is only replaced with ``--force``.
"""

import argparse
import sys
from pathlib import Path

from archs.sst import PRESETS
from models.runtime import run
from options.errors import UserError
from scripts import mbt_options, tiny_table, wildcat_table
from scripts.sst_table import JUDGED_IN_TRAINING, SETS, Setting, settings

ROOT = Path(__file__).resolve().parent.parent


def files() -> dict[str, str]:
    """Path from the checkout -> text of every file of the tables."""
    found = {**mbt_options.files(wildcat_table.mbt_settings()), **tiny_table.files()}
    for setting in (*settings(), *wildcat_table.sst_settings()):
        found[f"options/train/sr/{setting.name}.yml"] = training_file(setting)
        found[f"options/test/sr/{setting.name}.yml"] = test_file(setting)
    return found


def training_file(setting: Setting) -> str:
    """The text of the option file for training."""
    lr = "5e-4" if setting.scale == 2 else "2.5e-4"
    return f"""{_training_head(setting)}
{_top(setting)}
manual_seed: 0

{_network(setting)}

datasets:
{_training_set(setting)}
{_judged_sets(setting, "val", JUDGED_IN_TRAINING)}

{_training_path(setting)}

train:
  total_iter: {setting.total_iter}
  warmup_iter: 20000
  ema_decay: 0.999
  optim_g: {{type: AdamW, lr: {lr}, betas: [0.9, 0.9], weight_decay: 0}}
  scheduler: {{type: MultiStepLR, milestones: [{_row(setting.halvings)}], gamma: 0.5}}
  pixel_opt: {{type: L1Loss, loss_weight: 1.0, reduction: mean}}

val:
  val_freq: 5000
  save_img: false
{_metrics(setting)}

logger:
  print_freq: 100
  save_checkpoint_freq: 5000
  use_tb_logger: true
"""


def test_file(setting: Setting) -> str:
    """The text of the option file for testing."""
    file = f"options/test/sr/{setting.name}.yml"
    weights = f"experiments/{setting.name}/models/net_g_latest.pth"
    head = [
        *_named(f"{setting.title}: the test of", setting),
        f"# Command:  python test.py -opt {file}",
        "#           The authors' weights:",
        f"#           python test.py -opt {file} \\",
        f"#             path.pretrain_network_g=pretrained_models/{setting.weights}.pth",
        *_expected(setting),
        "# Protocol: whole pictures, the averaged weights, results rounded to 8 bit, PSNR and SSIM on Y of BT.601,",
        f"#           {setting.scale} pixels cut off at each edge.",
        *_layout([(f"datasets/{gt}", f"datasets/{lq}/X{setting.scale}") for gt, lq in SETS.values()], setting.scale),
        *_origin(),
    ]
    return (
        "\n".join(head)
        + f"""
{_top(setting)}

{_network(setting)}

datasets:
{_judged_sets(setting, "test", tuple(SETS))}

path:
  pretrain_network_g: {weights}
  param_key_g: params_ema
  strict_load_g: true

val:
  save_img: true
{_metrics(setting)}
"""
    )


def _training_head(setting: Setting) -> str:
    file, batch = f"options/train/sr/{setting.name}.yml", setting.batch
    head = [
        *_named(f"{setting.title}, as in", setting),
        f"# Command:  torchrun --nproc_per_node=4 train.py -opt {file} --launcher pytorch",
        f"#           One GPU, the same {4 * batch} samples a step (4 x {batch}, accumulated):",
        f"#           python train.py -opt {file} train.accum_iter=4",
        *_expected(setting),
    ]
    start = setting.warm_start
    if start is not None:
        head += [
            f"# Start:    the averaged weights of {start}; those of the upsampler are resampled to this scale.",
            "#           From the authors' weights: "
            f"path.pretrain_network_g=pretrained_models/{start.removeprefix('WildCat')}.pth",
        ]
    if setting.name == "SSTlight_Plus_DIV2K_X4":
        head += [
            "#           The authors' file of this name takes the weights of SSTlight_Plus_DFLIP_X3; every other file",
            "#           of theirs stays with its own data, and so does this one.",
        ]
    pairs = [(f"datasets/{gt}", f"datasets/{lq}/X{setting.scale}") for gt, lq in map(SETS.get, JUDGED_IN_TRAINING)]
    return "\n".join([*head, *_training_data(setting), *_layout(pairs, setting.scale), *_origin()])


def _expected(setting: Setting) -> list[str]:
    told = setting.expected
    return [f"# Expected: {told[0]}", *(f"#           {text}" for text in told[1:])]


def _named(text: str, setting: Setting) -> list[str]:
    line = f"# {text} {setting.paper}."
    return [line] if len(line) <= 120 else [f"# {text}", f"# {setting.paper}."]


def _training_data(setting: Setting) -> list[str]:
    if setting.corpus == "DFLIP":
        return [
            "# Data:     datasets/DFLIP.lmdb, ground truth alone (DF2K, LSDIR and DiverSeg-IP, 614,944 pictures);",
            "#           the LQ is reduced from each patch by Pillow's bicubic, as the authors do.",
        ]
    gt, lq = _paired_roots(setting)
    return [f"# Data:     {gt},", f"#           {lq} (sub-images, MATLAB's bicubic)."]


def _layout(pairs: list[tuple[str, str]], scale: int) -> list[str]:
    lines = [f"{gt} with {lq}" for gt, lq in pairs]
    return [
        f"# Judged on pairs: picture.png of the first folder, picturex{scale}.png of the second",
        *(f"#           {line}" for line in lines),
    ]


def _origin() -> list[str]:
    return ["# Generated by python -m scripts.make_options; give another name to a file that you change."]


def _top(setting: Setting) -> str:
    return f"name: {setting.name}\nmodel_type: RestorationModel\nscale: {setting.scale}\nnum_gpu: auto"


def _network(setting: Setting) -> str:
    preset = PRESETS[setting.variant]
    lines = ["network_g:", f"  type: {setting.network}"]
    for key, value in {**preset, **setting.extra}.items():
        lines.append(f"  {key}: [{_row(value)}]" if isinstance(value, tuple) else f"  {key}: {value}")
    return "\n".join([*lines, f"  upscaling_factor: {setting.scale}"])


def _training_set(setting: Setting) -> str:
    if setting.corpus == "DFLIP":
        source = """    type: DownsampleImageDataset
    dataroot_gt: datasets/DFLIP.lmdb
    kernel: pillow
    downsample: patch
    small: pad"""
    else:
        gt, lq = _paired_roots(setting)
        source = f"""    type: PairedImageDataset
    dataroot_gt: {gt}
    dataroot_lq: {lq}"""
    return f"""  train:
    name: {setting.corpus}
{source}
    io_backend: {{type: lmdb}}
    gt_size: {setting.gt_size}
    use_hflip: true
    use_rot: true
    batch_size_per_gpu: {setting.batch}
    num_worker_per_gpu: 4
    prefetch_mode: cuda
    pin_memory: true"""


def _paired_roots(setting: Setting) -> tuple[str, str]:
    folder = f"datasets/{setting.corpus}/{setting.corpus}_train"
    return f"{folder}_HR_sub.lmdb", f"{folder}_LR_bicubic/X{setting.scale}_sub.lmdb"


def _judged_sets(setting: Setting, phase: str, names: tuple[str, ...]) -> str:
    parts = []
    for number, name in enumerate(names, 1):
        gt, lq = SETS[name]
        parts.append(f"""  {phase}_{number}:
    name: {name}
    type: PairedImageDataset
    dataroot_gt: datasets/{gt}
    dataroot_lq: datasets/{lq}/X{setting.scale}
    filename_tmpl: '{{}}x{setting.scale}'""")
    return "\n".join(parts)


def _training_path(setting: Setting) -> str:
    if setting.warm_start is None:
        return "path:\n  pretrain_network_g: ~\n  strict_load_g: true"
    return f"""path:
  pretrain_network_g: experiments/{setting.warm_start}/models/net_g_latest.pth
  param_key_g: params_ema
  strict_load_g: true"""


def _metrics(setting: Setting) -> str:
    settings = f"crop_border: {setting.scale}, test_y_channel: true"
    return f"""  metrics:
    psnr: {{type: calculate_psnr, {settings}}}
    ssim: {{type: calculate_ssim, {settings}}}"""


def _row(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def differences(root: Path) -> list[str]:
    """One sentence for each file under ``root`` that is missing, or is not as the table has it."""
    told = []
    for name, text in files().items():
        if not (root / name).exists():
            told.append(f"{name} is missing")
        elif (root / name).read_text(encoding="utf-8") != text:
            found = (root / name).read_text(encoding="utf-8").splitlines()
            pairs = zip(text.splitlines(), found, strict=False)
            line = next((i for i, (own, other) in enumerate(pairs, 1) if own != other), None)
            told.append(
                f"{name} differs from the table, from line {line or min(len(found), text.count(chr(10))) + 1} on"
            )
    return told


def write(root: Path, *, force: bool = False) -> list[str]:
    """Write what is missing under ``root``; with ``force`` also what differs. Returns the files written.

    Raises:
        UserError: files differ from the table and ``force`` is not given; nothing is written then.
    """
    told = differences(root)
    edited = [text for text in told if "differs" in text]
    if edited and not force:
        raise UserError("\n".join([*edited, "nothing was written; --force replaces these files"]))
    written = []
    texts = files()
    for name in (text.split(" ")[0] for text in told):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(texts[name], encoding="utf-8")
        written.append(name)
    return written


def main(argv: list[str]) -> None:
    """Check or write."""
    parser = argparse.ArgumentParser(prog="python -m scripts.make_options", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say which file differs from the table")
    parser.add_argument("--force", action="store_true", help="replace files that differ from the table")
    args = parser.parse_args(argv)
    if not args.check:
        written = write(ROOT, force=args.force)
        print(f"{len(written)} of {len(files())} files written; the others were as the table has them")
        return
    told = differences(ROOT)
    if told:
        raise UserError("\n".join([*told, "python -m scripts.make_options --force writes the table's files"]))
    print(f"all {len(files())} files are as the table has them")


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
