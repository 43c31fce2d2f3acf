"""The libraries of the stub card: built once for a source and a torch, then found in a cache.

Three of them: the CUDA runtime of `cudart.cpp`, with all that torch links of the real one; a driver
of which torch asks one thing; and the ops of `kernels.cpp`. No torch is imported here: the first
two are to be loaded before it.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.fake_cuda.library import built, compile_to, torch_flags, torch_folder

HERE = Path(__file__).parent
STREAMS, RUNTIME, KERNELS = (HERE / n for n in ("streams.h", "cudart.cpp", "kernels.cpp"))
# What functions that are not written here answer: cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED.
NOT_SUPPORTED = 801
_CALLED = re.compile(r" U ((?:__cuda|cuda[A-Z]|cu[A-Z])\w*)(?:@(\S+))?")


def runtime() -> Path:
    """The CUDA runtime, by the name under which torch's libraries look for it."""
    soname = next(version for _, version in _called() if version)
    told = [STREAMS.read_text(), RUNTIME.read_text(), soname]
    return built(soname, told, functools.partial(_build_runtime, soname))


def driver() -> Path:
    """A driver that has a context and nothing else."""
    return built("libcuda.so.1", [_driver_source()], _build_driver)


def kernels() -> Path:
    """The ops, to be loaded after torch."""
    return built("kernels.so", [KERNELS.read_text()], _build_kernels)


@functools.cache
def _called() -> set[tuple[str, str]]:
    """Functions of runtime and driver that torch links, each with the library it is looked for."""
    found: set[tuple[str, str]] = set()
    for path in (torch_folder() / "lib").glob("*.so"):
        said = subprocess.run(
            ["nm", "-D", "--undefined-only", path], capture_output=True, text=True
        )
        found.update(_CALLED.findall(said.stdout))
    return found


def _headers() -> Iterator[str]:
    packages = torch_folder().parent
    # Triton brings the headers of the compiler, which the runtime's include.
    for path in (*packages.glob("nvidia/cu*/include"), packages / "nvidia/cuda_runtime/include"):
        if path.is_dir():
            yield f"-I{path}"
    yield f"-I{packages / 'triton/backends/nvidia/include'}"


def _build_runtime(soname: str, target: Path) -> None:
    text = RUNTIME.read_text()
    written = set(re.findall(r"\b((?:__)?cuda[A-Z]\w*)\(", text))
    missing = sorted(name for name, version in _called() if version and name not in written)
    rest = target.with_name("rest.cpp")
    rest.write_text(_not_supported(missing))
    versions = target.with_name("versions")
    versions.write_text(f"{soname} {{ *; }};\n")
    flags = (f"-Wl,-soname,{soname}", f"-Wl,--version-script={versions}")
    compile_to(target, [RUNTIME, rest], *_headers(), f"-I{HERE}", *flags)


def _driver_source() -> str:
    names = sorted(n for n, version in _called() if re.match(r"cu[A-Z]", n) and not version)
    context = "cuDevicePrimaryCtxGetState"
    # It says that there is a context: the runtime's calls need none.
    active = f"int {context}(int, unsigned* flags, int* on) {{ *flags = 0; *on = 1; return 0; }}"
    others = _not_supported([name for name in names if name != context])
    return f'{others}extern "C" {active}\n'


def _build_driver(target: Path) -> None:
    source = target.with_name("driver.cpp")
    source.write_text(_driver_source())
    compile_to(target, [source], "-Wl,-soname,libcuda.so.1")


def _not_supported(names: list[str]) -> str:
    lines = [f"int {name}() {{ return {NOT_SUPPORTED}; }}" for name in names]
    return "\n".join(['extern "C" {', *lines, "}", ""])


def _build_kernels(target: Path) -> None:
    linked = torch_flags("torch_cuda", "c10_cuda")
    compile_to(
        target, [KERNELS], *_headers(), *linked, f"-L{runtime().parent}", f"-l:{runtime().name}"
    )
