"""Tiny imitations of the archives: folders and names as the downloads have them, with crops of real photographs."""

import itertools
from pathlib import Path

import numpy as np

from data.degrade import bicubic_downsample
from data.io import encode, read_image

_QUICKSTART = Path(__file__).resolve().parents[2] / "datasets/quickstart"
_PHOTOS = {}


def photo(number, size):
    """A crop of a photograph, another one for each number."""
    names = ("picos.jpg", "stream.jpg", "aitzgorri.jpg")
    name = names[number % len(names)]
    if name not in _PHOTOS:
        _PHOTOS[name] = read_image(_QUICKSTART / "train" / name)
    whole = _PHOTOS[name]
    place = [(97 * number) % max(1, whole.shape[axis] - size[axis]) for axis in (0, 1)]
    return whole[place[0] : place[0] + size[0], place[1] : place[1] + size[1]]


def write(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(image, path.suffix))


def hazed(image):
    return (image // 2 + 90).astype(np.uint8)


def div2k(root, size=(60, 76)):
    for part, numbers in (("train", (1, 2)), ("valid", (801,))):
        for number in numbers:
            write(root / f"DIV2K_{part}_HR/{number:04d}.png", photo(number, size))


def div2k_lr(root, scale=2):
    for path in sorted(root.glob("DIV2K_train_HR/*.png")):
        low = bicubic_downsample(read_image(path), scale)
        write(root / f"DIV2K_train_LR_bicubic/X{scale}/{path.stem}x{scale}.png", low)


def flickr2k(root):
    for number in (1, 2):
        write(root / f"Flickr2K/Flickr2K_HR/{number:06d}.png", photo(5 + number, (65, 67)))


def df2k(root):
    div2k(root / "DIV2K")
    div2k_lr(root / "DIV2K")
    flickr2k(root)


def lsdir(root):
    # in folders of a thousand
    for number in (1, 2, 1001):
        write(root / f"LSDIR/train/{-(-number // 1000) * 1000:07d}/{number:07d}.png", photo(number, (48, 64)))
    good = photo(3, (48, 64))
    write(root / "LSDIR/val1/HR/val/0000001.png", good)
    write(root / "LSDIR/val1/X2/val/0000001x2.png", bicubic_downsample(good, 2))


def diverseg(root):
    write(root / "DiverSeg-IP/n01440764/n01440764_10026.JPEG", photo(1, (50, 40)))
    write(root / "DiverSeg-IP/pass/00a1.jpg", photo(2, (40, 50)))


def dflip(root):
    df2k(root)
    lsdir(root)
    diverseg(root)


def its(root):
    for scene, number in itertools.product((1, 2), (1, 2, 3)):
        good = photo(scene, (46, 62))
        write(root / f"ITS_v2/clear/{scene}.png", good)
        write(root / f"ITS_v2/hazy/{scene}_{number}_0.9{number}.png", hazed(good))


def ots(root):
    for scene, beta in itertools.product(("0001", "0005"), ("0.04", "0.2")):
        good = photo(int(scene), (40, 50))
        write(root / f"OTS_BETA/clear/{scene}.jpg", good)
        write(root / f"OTS_BETA/haze/part1/{scene}_0.85_{beta}.jpg", hazed(good))


def sots(root):
    good = np.kron(photo(1, (48, 64)), np.ones((10, 10, 1), np.uint8))
    write(root / "SOTS/indoor/nyuhaze500/gt/1400.png", good)
    for number in (1, 2):
        write(root / f"SOTS/indoor/nyuhaze500/hazy/1400_{number}.png", hazed(good[10:-10, 10:-10]))
    good = photo(2, (40, 50))
    write(root / "SOTS/outdoor/gt/0001.png", good)
    write(root / "SOTS/outdoor/hazy/0001_0.8_0.2.jpg", hazed(good))


def o_haze(root, scenes=("01", "45")):
    for scene in scenes:
        good = photo(int(scene), (44, 58))
        write(root / f"# O-HAZY NTIRE 2018/GT/{scene}_outdoor_GT.jpg", good)
        write(root / f"# O-HAZY NTIRE 2018/hazy/{scene}_outdoor_hazy.jpg", hazed(good))


def dense_haze(root):
    for scene in ("01", "55"):
        good = np.kron(photo(int(scene), (60, 80)), np.ones((20, 20, 1), np.uint8))
        write(root / f"Dense_Haze_NTIRE19/GT/{scene}_GT.png", good)
        write(root / f"Dense_Haze_NTIRE19/hazy/{scene}_hazy.png", hazed(good))


def nh_haze(root):
    dense_haze(root / "x")
    for path in sorted(root.rglob("*.png")):
        (root / "NH-HAZE").mkdir(exist_ok=True)
        path.rename(root / "NH-HAZE" / path.name)


def i_haze(root):
    good = photo(1, (44, 58))
    write(root / "# I-HAZY NTIRE 2018/GT/01_indoor_GT.jpg", good)
    write(root / "# I-HAZY NTIRE 2018/hazy/01_indoor_hazy.jpg", hazed(good))


def haze4k(root):
    for phase, number in itertools.product(("train", "test"), (1, 2)):
        good = photo(number, (40, 40))
        write(root / f"Haze4K/{phase}/gt/{number}.png", good)
        write(root / f"Haze4K/{phase}/haze/{number}_0.89_1.56.png", hazed(good))


IMITATIONS = {
    "DIV2K": div2k,
    "Flickr2K": flickr2k,
    "DF2K": df2k,
    "LSDIR": lsdir,
    "DiverSeg-IP": diverseg,
    "DFLIP": dflip,
    "ITS": its,
    "OTS": ots,
    "SOTS": sots,
    "O-HAZE": o_haze,
    "I-HAZE": i_haze,
    "Dense-Haze": dense_haze,
    "NH-HAZE": nh_haze,
    "Haze4K": haze4k,
}
