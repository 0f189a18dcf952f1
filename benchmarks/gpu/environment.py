"""Where this runs: device, versions, commit, clocks, and how fast its memory is."""

import hashlib
import importlib
import importlib.metadata
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

import sparsesel
from sparsesel.eval import provenance
from sparsesel.registry import registry

PACKAGES = ("torch", "triton", "transformers", "pydantic", "pytest", "hypothesis")
NO_DEVICE = "not run: no CUDA device"
COPIED = 2 << 30  # bytes, far more than a cache of any device holds


def describe(device: str) -> dict[str, Any]:
    """What there is; the bandwidth and what concerns a GPU only where there is one."""
    folders = package_folders()
    return {
        "device": provenance.device_name(torch.device(device)),
        "versions": {"sparsesel": sparsesel.__version__, "python": platform.python_version(), **_versions()},
        "commit": provenance.commit(),
        "in_checkout": (folders[0].parent / ".git").exists(),
        "sources": sources(folders),
        "folders": [str(folder) for folder in folders],
        "cpus": len(os.sched_getaffinity(0)),
        "gpu": _gpu() if device == "cuda" else NO_DEVICE,
        "bandwidth": measured_bandwidth() if device == "cuda" else NO_DEVICE,
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def package_folders() -> list[Path]:
    """Where the code that runs lies: sparsesel, then its selectors. It may be an installed copy of this checkout."""
    ours = [found.plugin.factory for found in registry().selectors.values() if found.distribution == "sparsesel"]
    names = sorted({factory.partition(":")[0].partition(".")[0] for factory in ours})
    modules = [sparsesel, *(importlib.import_module(name) for name in names)]
    return [Path(module.__file__).parent for module in modules if module.__file__]


def sources(folders: list[Path]) -> str:
    """A hash of the sources of packages, the same wherever they lie, for a copy that is no git checkout."""
    digest = hashlib.sha256()
    for folder in sorted(folders, key=lambda folder: folder.name):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_cache": properties.L2_cache_size,
        "cuda": torch.version.cuda or torch.version.hip,
        "clocks": clocks(),
    }


def clocks() -> dict[str, str]:
    """Clocks and driver as nvidia-smi tells them at the moment; why not, where it does not."""
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"unknown": str(error)}
    return dict(zip(fields.split(","), (part.strip() for part in done.stdout.split(",")), strict=False))


def measured_bandwidth() -> dict[str, float]:
    """Bytes per second of copies within the device's memory, read and written bytes both counted: the median of 20."""
    count = min(COPIED, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(count, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for turn in range(25):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        target.copy_(source)
        after.record()
        after.synchronize()
        if turn >= 5:
            times.append(before.elapsed_time(after) / 1e3)
    return {"bytes_per_second": 2 * count / statistics.median(times), "copied": count}
