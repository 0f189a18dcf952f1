"""Where a result came from: versions, device, commit."""

import contextlib
import datetime
import functools
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sparsesel

_PACKAGES = ("torch", "transformers", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of sparsesel, Python and the packages that results depend on."""
    packages = {name: version(name) for name in _PACKAGES}
    with contextlib.suppress(PackageNotFoundError):
        packages["triton"] = version("triton")
    return {"sparsesel": sparsesel.__version__, "python": platform.python_version(), **packages}


@functools.cache
def commit() -> str | None:
    """Commit of the sparsesel source that runs, `-dirty` if it was changed; None outside a git checkout."""
    folder = Path(sparsesel.__file__).parent
    # An installed copy may lie inside someone else's repository, which then does not track it.
    if not _git(folder, "ls-files", "__init__.py"):
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def device_name(device: Any) -> str:
    """The GPU's name, or the processor's architecture and the number of threads used."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
