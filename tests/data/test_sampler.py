"""The order of samples: the same for any number of ranks and from any start."""

from itertools import islice

import pytest

from data.sampler import EndlessSampler, ShardSampler


def take(count, size=7, **arguments):
    return list(islice(EndlessSampler(size, **arguments), count))


@pytest.mark.parametrize("ratio", [1, 3])
def test_each_turn_visits_every_picture_equally_often(ratio):
    keys = take(3 * 7 * ratio, ratio=ratio)
    for turn in range(3):
        indices = [index for _, index in keys[turn * 7 * ratio : (turn + 1) * 7 * ratio]]
        assert sorted(indices) == sorted(list(range(7)) * ratio)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ratio", [1, 3])
def test_no_key_comes_twice(shuffle, ratio):
    keys = take(200, shuffle=shuffle, ratio=ratio)
    assert len(set(keys)) == 200


def test_the_order_depends_on_seed_and_turn_only():
    assert take(50, seed=3) == take(50, seed=3)
    assert take(50, seed=3) != take(50, seed=4)
    indices = [index for _, index in take(14)]
    assert indices[:7] != indices[7:]


def test_without_shuffle_pictures_come_in_order():
    assert take(9, shuffle=False) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (1, 0), (1, 1)]


@pytest.mark.parametrize("start", [1, 7, 20, 1000])
def test_starting_later_equals_going_on(start):
    assert take(30, start=start) == take(start + 30)[start:]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_stream_and_their_joint_batches_are_contiguous(world):
    batch, start = 4, 10
    stream = take(start + 3 * batch * world)[start:]
    ranks = [take(3 * batch, rank=rank, world=world, start=start) for rank in range(world)]
    for step in range(3):
        joint = [key for keys in ranks for key in keys[step * batch : (step + 1) * batch]]
        assert sorted(joint) == sorted(stream[step * batch * world : (step + 1) * batch * world])


@pytest.mark.parametrize("wrong", [{"size": 0}, {"ratio": 0}, {"start": -1}, {"rank": 2, "world": 2}])
def test_an_impossible_stream_is_refused(wrong):
    with pytest.raises(ValueError, match="no stream of"):
        EndlessSampler(**{"size": 3, **wrong})


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shards_cover_every_picture_exactly_once_in_order(world):
    shards = [list(ShardSampler(4, rank=rank, world=world)) for rank in range(world)]
    assert sorted(index for shard in shards for index in shard) == [0, 1, 2, 3]
    assert all(index % world == rank for rank, shard in enumerate(shards) for index in shard)
