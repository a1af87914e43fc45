"""The overlay of docs/how-to/kubernetes.md, written out, and what a kustomization names."""

import re
import shutil
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
NAME, OVERLAY, BASE = "kustomization.yaml", "production", "../deploy/kubernetes"
_PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"


def write_overlay(root: Path) -> Path:
    """Follow the page: the overlay beside a copy of `deploy/kubernetes`; returns its folder."""
    shutil.copytree(FOLDER, root / "deploy" / "kubernetes")
    text = _PAGE.read_text()
    (content,) = re.findall(rf'```yaml title="{OVERLAY}/{NAME}"\n(.*?)```', text, re.DOTALL)
    (files,) = re.findall(rf"^cp (.*) {OVERLAY}/$", text, re.MULTILINE)
    overlay = root / OVERLAY
    overlay.mkdir()
    for file in files.split():
        shutil.copy(root / file, overlay)
    (overlay / NAME).write_text(content)
    return overlay


def named_resources(folder: Path) -> set[tuple[str, str]]:
    """Kind and name of each resource that a kustomization names, also through its bases."""
    found: set[tuple[str, str]] = set()
    listed: Any = yaml.safe_load((folder / NAME).read_text())["resources"]
    for name in listed:
        if (folder / name).is_dir():
            found |= named_resources(folder / name)
        else:
            resources = yaml.safe_load_all((folder / name).read_text())
            found |= {(one["kind"], one["metadata"]["name"]) for one in resources}
    return found
