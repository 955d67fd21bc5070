"""What a network states about itself, and whether that can be meant."""

from typing import Any

# fact -> (least value, whether None is one); a network may leave out any of them
FACTS = {
    "scale": (1, False),
    "multiple_of": (1, False),
    "minimum": (1, False),
    "halo": (0, True),
    "tile_multiple": (1, False),
    "in_channels": (1, True),
}
_MEANING = {
    "scale": "by how much the network enlarges",
    "multiple_of": "what the sides of its input must be multiples of",
    "minimum": "the smallest side that it takes",
    "halo": "how far an output pixel looks, in input pixels, or None for the whole picture",
    "tile_multiple": "which multiples tiles start at",
    "in_channels": "how many channels its input has",
}


def wrong_facts(network: Any) -> list[str]:
    """A sentence for each attribute that has the name of a fact and cannot be one.

    Args:
        network: any object; of ``scale``, ``multiple_of``, ``minimum``, ``halo``, ``tile_multiple`` and ``in_channels``
            those that it has are looked at.
    """
    told = []
    for fact, (least, optional) in FACTS.items():
        value = getattr(network, fact, least)
        if (value is None and optional) or (type(value) is int and value >= least):
            continue
        kind = repr(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
        told.append(
            f"the attribute {fact} of {type(network).__name__} is {kind}, but it must say {_MEANING[fact]}: "
            f"a whole number from {least}; give what it holds another name"
        )
    return told
