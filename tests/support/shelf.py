"""A driver of objects on a directory: the one of docs/drivers.md, as a test finds it there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

DOC = Path(__file__).parents[2] / "docs" / "drivers.md"


def documented(directory: Path) -> ModuleType:
    """The module that the page shows, written into a directory and imported from there."""
    found = re.search(r"```python\n(\"\"\"A driver.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert found, "docs/drivers.md shows no driver"
    place = directory / "documented_driver.py"
    place.write_text(found[1], encoding="utf-8")
    spec = importlib.util.spec_from_file_location(place.stem, place)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
