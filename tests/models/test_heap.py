"""Freed memory that stays with the process while a network runs."""

import ctypes
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from models import heap
from models.infer import restore

ROOT = Path(__file__).resolve().parents[2]
# in a process of its own: what other tests have left in the heap would be used, too
MEASURED = """
import ctypes, json, resource, torch
# pages of one size: PR_SET_THP_DISABLE
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
from models import heap

def faults(run):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def large():
    for _ in range(8):
        torch.ones(10 << 20)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

found = {"page": resource.getpagesize(), "usual": faults(large), "before": resident()}
with heap.kept():
    with heap.kept():
        large()
        found["kept"] = faults(large)
    found["after the inner block"] = faults(large)
    heap.release()
    found["released"] = faults(large)
found["after"] = resident()
print(json.dumps(found))
"""


@pytest.mark.skipif(heap._glibc() is None, reason="another C library, or the environment sets its allocator")
def test_what_is_freed_is_used_again_and_given_back_at_the_end():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if not found["usual"]:
        pytest.skip("this system does not count the pages that a process asks for")
    # 40 MB, asked for eight times
    pages = (40 << 20) // found["page"]
    assert found["usual"] > 7 * pages
    assert found["kept"] < pages / 10
    assert found["after the inner block"] < pages / 10
    assert found["released"] > 0.9 * pages
    assert found["after"] < found["before"] + (20 << 20)


@pytest.mark.skipif(heap._glibc() is None, reason="another C library, or the environment sets its allocator")
def test_a_picture_is_restored_within_the_block_and_as_without_it(monkeypatch):
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1))
    image = torch.rand(1, 3, 50, 60, generator=torch.Generator().manual_seed(0))
    inside = []
    network.register_forward_hook(lambda *_: inside.append(heap._inside))
    with torch.inference_mode():
        result = restore(network, image)
        monkeypatch.setattr(heap, "_glibc", lambda: None)
        assert torch.equal(restore(network, image), result)
    assert inside == [1, 0]


@pytest.mark.skipif(heap._glibc() is None, reason="another C library, or the environment sets its allocator")
def test_a_forked_worker_is_not_in_the_block_of_its_parent():
    with heap.kept():
        with warnings.catch_warnings():
            # the threads of PyTorch are not used in the child
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            # as the block's end does, which the worker never comes to
            os._exit(0 if heap._inside == 0 and not heap._lock.locked() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert heap._inside == 1
    assert heap._inside == 0


@pytest.mark.parametrize("setting", [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")], ids=str)
def test_an_allocator_that_the_user_has_set_is_left_alone(setting, monkeypatch):
    monkeypatch.setenv(*setting)
    assert heap._glibc.__wrapped__() is None


def test_elsewhere_nothing_happens(monkeypatch):
    def missing(name):
        raise TypeError("no library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert heap._glibc.__wrapped__() is None
    monkeypatch.setattr(heap, "_glibc", lambda: None)
    with heap.kept():
        heap.release()
        assert heap._inside == 0
