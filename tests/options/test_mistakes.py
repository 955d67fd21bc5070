"""Where a mistake is said to be, what is suggested for it, and what is found before anything is built."""

import pytest
import torch

from options.errors import OptionsError


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("batch_size", "batch_size_per_gpu"),
        ("batchsize_per_gpu", "batch_size_per_gpu"),
        ("num_worker", "num_worker_per_gpu"),
        ("num_workers", "num_worker_per_gpu"),
        ("gtsize", "gt_size"),
        ("use_flip", "use_hflip"),
    ],
)
def test_a_misspelt_key_of_a_data_set_is_told_with_the_loaders_keys_in_mind(load_file, right, key, meant):
    with pytest.raises(OptionsError, match=rf"datasets\.train\.{key}: .*did you mean {meant}\?"):
        load_file(right, f"datasets.train.{key}=4")


def test_what_constructors_refuse_is_told_at_once_with_the_lines(load_file, right, tmp_path):
    right["network_g"]["num_heads"] = 3
    right["datasets"]["train"]["gt_size"] = 33
    right["train"]["total_iter"] = 0
    with pytest.raises(OptionsError) as error:
        load_file(right)
    lines = (tmp_path / "run.yml").read_text().splitlines()
    told = str(error.value).splitlines()[1:]
    for key, text in [
        ("network_g.num_heads", "num_heads must divide dim=16, got 3"),
        ("datasets.train.gt_size", "33 is not a multiple of scale 2; take 32 or 34"),
        ("train.total_iter", "greater than or equal to 1, got 0"),
    ]:
        line = next(i for i, line in enumerate(lines, 1) if line.strip().startswith(key.split(".")[-1] + ":"))
        assert any(row.startswith(f"  line {line}: {key}: ") and text in row for row in told), told
    assert len(told) == 3


def test_a_network_of_another_scale_is_told_by_the_loader(load_file, right):
    with pytest.raises(OptionsError, match=r"network_g: scale is 2, but the network SST enlarges by 3"):
        load_file(right, "network_g.upscaling_factor=3")


def test_a_network_that_cannot_be_built_without_weights_is_left_to_the_run(load_file, right, own_registry):
    class Counted(torch.nn.Module):
        def __init__(self, *, dim: int = 4):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.linspace(0, 1, dim))
            self.largest = self.bias.max().item()

    own_registry.register(Counted)
    right["network_g"] = {"type": "Counted", "dim": 5}
    assert load_file(right).network_g.arguments() == {"dim": 5}


def test_a_mistake_of_an_override_names_the_override(load_file, right):
    right["logger"]["print_frek"] = 5
    overrides = ["train.total_iter=0", "val:metrics:psnr:crop_boarder=4", "datasets.trian.type=X", "train.ema_decay=2"]
    with pytest.raises(OptionsError) as error:
        load_file(right, *overrides)
    head, *told = str(error.value).splitlines()
    assert "6 mistakes in " in head
    assert "run.yml and its overrides; nothing was created" in head
    for override, place in zip(overrides, ("total_iter", "crop_boarder", "trian", "ema_decay"), strict=True):
        assert any(row.startswith(f"  the override {override}: ") and f"{place}: " in row for row in told), told
    assert sum(row.startswith("  line ") and "print_frek" in row for row in told) == 1


def test_the_last_override_of_a_key_is_the_one_that_is_named(load_file, right):
    with pytest.raises(OptionsError, match=r"the override train\.total_iter=-1: ") as error:
        load_file(right, "train.total_iter=0", "train.total_iter=-1")
    assert "total_iter=0" not in str(error.value)
