"""What stands for a card is loaded from the cache only where this user alone could have put it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.fake_cuda.absent_library import library

# Hands out what a compiler has made; each call is a line of its log.
COMPILER = """#!{python}
import pathlib, shutil, sys
made, log = pathlib.Path("{folder}/made.so"), pathlib.Path("{folder}/log")
target = sys.argv[sys.argv.index("-o") + 1]
log.open("a").write(target + "\\n")
if pathlib.Path("{folder}/broken").exists():
    sys.exit("a.cpp:1: error: no such thing")
shutil.copy(made, target)
"""

# All of it in one process: torch is loaded once.
STORY = '''
import hashlib, os, pathlib, subprocess, sys, time
from cotrain_compile.capture.offline import absent_card
from cotrain_compile.errors import OptionError

folder = pathlib.Path(sys.argv[1])
cache, log, planted = folder / "cache", folder / "log", folder / "ran"
cards = cache / "cards"
os.umask(0o002)  # as where each user has a group
os.environ["COTRAIN_CACHE_DIR"] = str(cache)


def plant(content, mode=0o700):
    """Put it in place of the library, which this process may have loaded."""
    kept.unlink(missing_ok=True)
    kept.write_bytes(content)
    kept.chmod(mode)


def builds():
    """How often it is compiled until it is there."""
    before = len(log.read_text().splitlines()) if log.exists() else 0
    absent_card._loaded().take_over_cuda
    assert not list(cards.glob(".*")), list(cards.iterdir())
    return len(log.read_text().splitlines()) - before


assert builds() == 1
assert builds() == 0
[kept] = cards.iterdir()
whole = kept.read_bytes()

source = "#include <stdlib.h>\\n__attribute__((constructor)) static void f(void) "
source += '{system("touch %s");}' % planted
(folder / "evil.c").write_text(source)
evil = folder / "evil.so"
subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(evil), str(folder / "evil.c")], check=True)

# Junk, half a library, and another one that is whole in itself.
for content in (b"junk", b"", whole[: len(whole) // 2], evil.read_bytes()):
    plant(content)
    assert builds() == 1 and kept.read_bytes() == whole

# A file that others may write to, a link, and a folder that others may write to.
sealed = evil.read_bytes() + hashlib.sha256(evil.read_bytes()).digest()
plant(sealed, 0o720)
assert builds() == 1 and kept.read_bytes() == whole
(folder / "linked.so").write_bytes(sealed)
(folder / "linked.so").chmod(0o700)
kept.unlink()
kept.symlink_to(folder / "linked.so")
assert builds() == 1 and kept.read_bytes() == whole and not kept.is_symlink()
plant(sealed)
for mode in (0o770, 0o707):
    cards.chmod(mode)
    assert builds() == 1, "compiled once, and not into it"
    assert str(cards) not in log.read_text().splitlines()[-1]
assert kept.read_bytes() == sealed
cards.chmod(0o700)
kept.unlink()

# What was killed leaves nothing for ever.
left = cards / ".left.tmp"
left.touch()
os.utime(left, (time.time() - 1e5,) * 2)
assert builds() == 1 and not left.exists()

# Nothing is kept, nor read, without a cache.
plant(sealed)
os.environ["COTRAIN_CACHE_DIR"] = ""
assert builds() == 1 and kept.read_bytes() == sealed
assert not planted.exists(), "what was planted has run"

# An error of the compiler is one of ours, and leaves nothing.
os.environ["COTRAIN_CACHE_DIR"] = str(folder / "other")
(folder / "broken").touch()
for compiler in (os.environ["CXX"], str(folder / "no_program")):
    os.environ["CXX"] = compiler
    try:
        absent_card._loaded()
    except OptionError as error:
        print(error)
    assert not list((folder / "other/cards").iterdir())
'''


def test_only_what_this_user_alone_has_built_is_loaded(tmp_path: Path) -> None:
    compiler, no_program = tmp_path / "once", tmp_path / "no_program"
    shutil.copy(library(), tmp_path / "made.so")
    compiler.write_text(COMPILER.format(python=sys.executable, folder=tmp_path))
    no_program.write_bytes(b"\0")
    for path in (compiler, no_program):
        path.chmod(0o700)
    run = subprocess.run(
        [sys.executable, "-c", STORY, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "CXX": str(compiler)},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    broken, other = run.stdout.splitlines()
    assert "a.cpp:1: error: no such thing; take another compiler" in broken
    assert "Exec format error; take another compiler" in other
