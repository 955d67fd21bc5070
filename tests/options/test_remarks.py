"""Schedules that do not end with the run are remarked, once."""

import logging

import pytest

COSINE = "train.scheduler={type: CosineAnnealingRestartLR, periods: [10]}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.warmup_iter=4"], "train.total_iter is 4: the warm-up of 4 never ends"),
        (["train.scheduler.milestones=[2, 4, 9]"], "train.total_iter is 4: the milestones 4, 9 never act"),
        ([COSINE], "train.total_iter is 4: the periods go on to 10"),
        ([COSINE, "train.warmup_iter=9"], "the warm-up of 9 never ends; the periods go on to 10"),
    ],
)
def test_a_schedule_that_does_not_end_with_the_run_is_remarked_in_one_line(load_file, right, caplog, overrides, said):
    load_file(right, *overrides)
    (record,) = [record for record in caplog.records if "total_iter" in record.getMessage()]
    assert said in record.getMessage()
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize("overrides", [[], [COSINE, "train.total_iter=10"], ["train.scheduler=~"]])
def test_a_schedule_that_fits_is_not_remarked(load_file, right, caplog, overrides):
    load_file(right, *overrides)
    assert "total_iter" not in caplog.text
