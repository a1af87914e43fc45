"""The other project on the Python index whose distribution is named `penstock`."""

import os
import warnings


def warn_of_same_name(search_path: list[str]) -> None:
    """Warn if the distribution `penstock` of another project installed modules of the same names.

    Folders are listed, because `importlib.metadata` takes longer to import than all of `import penstock`.

    Args:
        search_path: The folders of `sys.path`.
    """
    for folder in search_path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.startswith("penstock-") and name.endswith(".dist-info") and _has_modules(folder, name):
                warnings.warn(
                    f"another project's distribution, {name.removesuffix('.dist-info')}, is installed in {folder} "
                    f"beside penstock-nn, and their files overwrite one another: pip uninstall penstock penstock-nn, "
                    f"and install penstock-nn again.",
                    stacklevel=2,
                )
                return


def _has_modules(folder: str, name: str) -> bool:
    """Tell whether a distribution has files in the folder `penstock`, unlike an editable one."""
    try:
        with open(os.path.join(folder, name, "RECORD"), encoding="utf-8", errors="replace") as record:
            return any(line.startswith("penstock/") for line in record)
    except OSError:
        return False
