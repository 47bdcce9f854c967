"""Each group reads exactly its next records, whatever happens to the log; ``scripts/torture`` tries other seeds."""

from pathlib import Path

import pytest
from whole_log import whole_log


@pytest.mark.parametrize("seed", range(8))
def test_every_reader_is_given_what_it_has_to_read(tmp_path: Path, seed: int) -> None:
    whole_log(tmp_path, seed=seed)
