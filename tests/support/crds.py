"""Definitions of custom resources (CRDs): kept small for the tests, and as strict schemas.

python -m tests.support.crds FILE.yaml > tests/data/crds/NAME.json
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "data" / "crds"


def reduced(definition: dict[str, Any]) -> dict[str, Any]:
    """What decides whether a resource is valid: all but descriptions."""
    spec = definition["spec"]
    versions = [
        {"name": each["name"], "schema": {"openAPIV3Schema": _undescribed(each["schema"]["openAPIV3Schema"])}}
        for each in spec["versions"]
    ]
    return {"spec": {"group": spec["group"], "names": {"kind": spec["names"]["kind"]}, "versions": versions}}


def _undescribed(schema: Any, names: bool = False) -> Any:
    """Leave out descriptions; the keys of `properties` are names of fields, which may be `description` too."""
    if isinstance(schema, list):
        return [_undescribed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _undescribed(each, names=name == "properties" and not names)
        for name, each in schema.items()
        if names or name != "description"
    }


def strict(schema: Any) -> Any:
    """A schema of a custom resource that takes no field it does not name, as `kubectl --validate=strict`."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(each) for name, each in schema.items()}
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


def schemas_of(resource: dict[str, Any], folder: Path = FOLDER) -> Iterator[dict[str, Any]]:
    """The strict schemas of a resource's version and kind in a folder of definitions, in YAML or JSON."""
    wanted = resource["apiVersion"], resource["kind"]
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.json")]):
        spec = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            if (f"{spec['group']}/{version['name']}", spec["names"]["kind"]) == wanted:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                yield schema


if __name__ == "__main__":
    print(json.dumps(reduced(yaml.safe_load(Path(sys.argv[1]).read_text())), separators=(",", ":")))
