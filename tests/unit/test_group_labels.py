"""What control groups are called: two kernels never take each other's for their own."""

from __future__ import annotations

from pathlib import Path

from ringfence.sandbox.native.cgroups import label


def test_two_directories_at_one_path_have_labels_of_their_own(tmp_path: Path) -> None:
    """As in two containers that share control groups, each with a data directory at the same place."""
    place = tmp_path / "sandboxes"
    place.mkdir()
    first = label(str(place), "name")
    assert label(str(place), "name") == first
    place.rename(tmp_path / "kept")
    place.mkdir()
    assert label(str(place), "name") != first
