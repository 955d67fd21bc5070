"""Pieces of work side by side: the results, and what must not change around them."""

import multiprocessing
import threading

import pytest
import torch

from kernels.threads import scratch, side_by_side


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_from_several_threads_with_one_of_torchs_each():
    meeting = threading.Barrier(3, timeout=20)

    def run(piece):
        meeting.wait()
        return piece, torch.get_num_threads(), threading.current_thread().name

    results = side_by_side(run, range(9))
    assert [piece for piece, _, _ in results] == list(range(9))
    assert {threads for _, threads, _ in results} == {1}
    assert len({name for _, _, name in results}) == 3
    assert torch.get_num_threads() == 3


def test_an_error_arrives_and_the_number_of_threads_stays():
    def run(piece):
        raise ZeroDivisionError(piece)

    with pytest.raises(ZeroDivisionError):
        side_by_side(run, range(4))
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("count", [1, 4])
def test_no_piece_records_gradients_and_the_mode_of_the_caller_holds(count):
    weight = torch.ones(2, requires_grad=True)
    assert not any(x.requires_grad for x in side_by_side(lambda _: weight * 2, range(count)))
    with torch.inference_mode():
        assert all(x.is_inference() for x in side_by_side(lambda _: torch.ones(2), range(count)))
    assert not any(x.is_inference() for x in side_by_side(lambda _: torch.ones(2), range(count)))


def test_callers_at_the_same_time_do_not_disturb_each_other():
    found, numbers = {}, []

    def call(name):
        found[name] = [int(x.sum()) for x in side_by_side(lambda i: torch.full((1000,), i), range(50))]
        numbers.append(torch.get_num_threads())

    callers = [threading.Thread(target=call, args=(name,)) for name in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(found[name] == [1000 * i for i in range(50)] for name in range(4))
    # those of the callers, and of a thread that never asked before
    assert numbers == [3] * 4
    assert torch.get_num_threads() == 3


def _sum_of_pieces(queue):
    queue.put(sum(side_by_side(lambda i: int(torch.tensor(i)), range(8))))


def test_a_forked_process_has_threads_of_its_own():
    side_by_side(lambda i: i, range(8))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_sum_of_pieces, args=(queue,))
    child.start()
    assert queue.get(timeout=30) == 28
    child.join(30)
    assert child.exitcode == 0


def test_each_thread_keeps_working_memory_of_its_own():
    def address(_):
        return threading.get_ident(), scratch("a", 100, torch.float32).data_ptr()

    # more rounds than threads, so that one comes twice, however busy the machine is
    found = {pair for _ in range(30) for pair in side_by_side(address, range(30))}
    assert len({pointer for _, pointer in found}) == len({thread for thread, _ in found}) == len(found)
    with torch.inference_mode():
        here = scratch("a", 50, torch.float32)
        here.zero_()
    here += 1
    assert scratch("a", 50, torch.float32).eq(1).all()
    assert scratch("b", 50, torch.float32).data_ptr() != here.data_ptr() != scratch("a", 50, torch.float64).data_ptr()
