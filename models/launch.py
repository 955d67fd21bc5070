"""Who started this process as one of how many: torchrun, slurm, or nobody."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from options.errors import OptionsError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """One process among those of a run.

    Attributes:
        rank: its number, 0 for the one that writes and speaks.
        world: how many there are.
        local_rank: its number on its machine, which is its GPU.
        environment: what torch needs to find the others, where the launcher did not set it.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    environment: tuple[tuple[str, str], ...] = ()


def find(launcher: str, environment: Mapping[str, str], *, local_rank: int = 0, script: str = "train.py") -> Place:
    """The place of this process, from the environment that its launcher has set.

    Args:
        launcher: ``none`` takes what torchrun has set, if it has; ``pytorch`` insists on it; ``slurm``.
        local_rank: where the environment does not say it.
        script: what was started and its arguments, for the message.

    Raises:
        OptionsError: the environment lacks something, or what it holds is no place.
    """
    if launcher == "slurm":
        return _of_slurm(environment, script)
    if launcher == "none" and environment.get("WORLD_SIZE", "") in ("", "1"):
        return Place()
    lacking = [name for name in _NEEDED if not environment.get(name)]
    if lacking:
        raise OptionsError(
            f"this process is to be one of several, but {', '.join(lacking)} is not set; start all of them, one for "
            f"each GPU, with: torchrun --nproc_per_node=2 {script}"
        )
    return _checked(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", local_rank)


def _of_slurm(environment: Mapping[str, str], script: str) -> Place:
    lacking = [name for name in ("SLURM_PROCID", "SLURM_NTASKS") if not environment.get(name)]
    if lacking:
        text = f"--launcher slurm, but {', '.join(lacking)} is not set; start the tasks, one for each GPU, with"
        raise OptionsError(f"{text}: srun --ntasks-per-node=2 python {script}")
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or "localhost"
    place = _checked(environment, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", 0)
    several = "," in hosts or "[" in hosts
    found = {"MASTER_ADDR": first_host(hosts) if several else "127.0.0.1"}
    found |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.world), "LOCAL_RANK": str(place.local_rank)}
    return Place(place.rank, place.world, place.local_rank, tuple(found.items()))


def _checked(environment: Mapping[str, str], rank: str, world: str, local: str, default: int) -> Place:
    try:
        place = Place(int(environment[rank]), int(environment[world]), int(environment.get(local, default)))
    except ValueError as error:
        raise OptionsError(f"the environment does not say which process this is: {error}") from error
    if not (0 <= place.rank < place.world and place.local_rank >= 0):
        given = f"{rank}={place.rank}, {world}={place.world}, {local}={place.local_rank}"
        raise OptionsError(f"the environment does not say which process this is: {given}")
    return place


def first_host(hosts: str) -> str:
    """``gpu[03-05,9],other`` -> ``gpu03``."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", hosts)
    return "".join(part or "" for part in match.groups())
