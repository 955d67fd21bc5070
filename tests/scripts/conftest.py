"""What tests of several commands share."""

import pytest

from models import runtime
from scripts import prepare_data


@pytest.fixture
def archive(tmp_path, capfd, monkeypatch):
    """archive(name, *arguments) -> exit code and what was printed; from down/ to out/, small sub-images."""
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))

    def call(name, *arguments, down=tmp_path / "down", partial=True):
        capfd.readouterr()
        given = ["archive", name, str(down), "-o", str(tmp_path / "out"), "--workers", "1", "--subimages", "48", "48"]
        code = runtime.run(prepare_data.main, [*given, *["--partial"] * partial, *map(str, arguments)])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return call
