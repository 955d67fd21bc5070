"""Options from a file, as a user gives them."""

import pytest
import yaml

import archs  # noqa: F401  the components register themselves
import data  # noqa: F401
import models  # noqa: F401
from options import load


@pytest.fixture
def load_file(tmp_path):
    """Write options to a file and load them."""

    def load_options(options, *overrides, **settings):
        file = tmp_path / "run.yml"
        file.write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
        return load.load(file, overrides, **settings)

    return load_options
