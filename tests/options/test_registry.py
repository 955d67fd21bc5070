"""The registry is strict, leaves specs alone and knows where an entry came from."""

import pytest

from options.registry import AlreadyRegistered, Registry, UnknownName, WrongArgument


class Sharpen:
    def __init__(self, *, radius: int = 1, amount: float = 0.5) -> None:
        self.radius, self.amount = radius, amount


@pytest.fixture
def filters():
    registry = Registry("filter")
    registry.register(Sharpen)
    return registry


def test_build_passes_the_arguments_and_leaves_the_spec_alone(filters):
    spec = {"type": "Sharpen", "radius": 3}
    assert filters.build(spec).radius == 3
    assert spec == {"type": "Sharpen", "radius": 3}


def test_an_unknown_name_is_told_with_the_nearest_one(filters):
    with pytest.raises(UnknownName, match=r"unknown filter Sharpn; did you mean Sharpen\?"):
        filters.build({"type": "Sharpn"})


def test_an_unknown_argument_is_told_with_the_nearest_one(filters):
    with pytest.raises(WrongArgument, match=r"raduis: unknown argument of Sharpen; did you mean radius\?"):
        filters.build({"type": "Sharpen", "raduis": 3})


def test_a_missing_argument_is_named():
    registry = Registry("filter")

    @registry.register()
    class Blur:
        def __init__(self, *, sigma: float) -> None:
            self.sigma = sigma

    with pytest.raises(WrongArgument, match="sigma: is missing; Blur needs it"):
        registry.build({"type": "Blur"})


def test_the_program_may_offer_arguments_that_the_constructor_does_not_take(filters):
    assert filters.build({"type": "Sharpen"}, radius=7, phase="train").radius == 7


def test_the_file_wins_over_what_the_program_offers(filters):
    assert filters.build({"type": "Sharpen", "radius": 2}, radius=7).radius == 2


def test_two_sources_under_one_name_are_refused_and_both_files_named(filters):
    other = type("Sharpen", (), {"__module__": "elsewhere", "__qualname__": "Sharpen"})
    with pytest.raises(AlreadyRegistered, match=r"test_registry\.py and elsewhere"):
        filters.register(other)


def test_the_same_source_again_is_a_reload(filters):
    filters.register(Sharpen)
    assert filters.names() == ["Sharpen"]


def test_an_entry_remembers_its_file(filters):
    assert filters.origin("Sharpen").endswith("test_registry.py")


def test_a_decorator_with_and_without_parentheses_and_with_a_name():
    registry = Registry("filter")
    registry.register(Sharpen, name="Unsharp")

    @registry.register
    def one() -> int:
        return 1

    @registry.register(name="two")
    def another() -> int:
        return 2

    assert registry.names() == ["Unsharp", "one", "two"]
    assert registry.build({"type": "two"}) == 2


def test_an_alias_builds_the_entry_and_says_so(filters, caplog):
    filters.alias("USM", "Sharpen", notice="USM is called Sharpen here")
    assert isinstance(filters.build({"type": "USM"}), Sharpen)
    assert "USM is called Sharpen here" in caplog.text
    assert "USM" in filters
    assert filters.names() == ["Sharpen"]


def test_a_component_written_for_an_options_dictionary_gets_one():
    registry = Registry("filter")

    @registry.register()
    class FromDict:
        def __init__(self, opt):
            self.opt = opt

    built = registry.build({"type": "FromDict", "size": 3}, phase="train")
    assert built.opt == {"type": "FromDict", "size": 3, "phase": "train"}
