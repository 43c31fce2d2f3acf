"""What is executed from a cache is only what this user alone could have put there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotrain_compile.support.disk_cache import is_only_ours


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_what_others_may_write_to_is_not_ours(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "cards"
    folder.mkdir(mode=0o700)
    file = folder / "a.so"
    assert not is_only_ours(file)
    file.touch(0o600)
    assert is_only_ours(file)
    file.chmod(mode)
    assert not is_only_ours(file)
    file.chmod(0o600)
    folder.chmod(mode)
    assert not is_only_ours(file)
    folder.chmod(0o700)
    (link := folder / "b.so").symlink_to(file)
    assert not is_only_ours(link)
