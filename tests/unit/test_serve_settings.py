"""Settings of a server that contradict one another, as the command line says them."""

import pytest

from penstock.core.errors import ServeError
from penstock.serve.settings import ModelSettings


def test_a_file_without_a_bundle_is_named() -> None:
    with pytest.raises(ServeError, match=r"^app.py is a file, and no bundle is named; give the folder that"):
        ModelSettings(chains=("app.py",))
    with pytest.raises(ServeError, match=r"^no bundle is named; give the folder of one"):
        ModelSettings()
