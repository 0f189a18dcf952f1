"""`sparsesel env`: what a bug report needs."""

import importlib.metadata
import platform
from typing import Annotated, Any

import typer

from sparsesel.cli.console import out, print_json, safe
from sparsesel.cli.listing import checked
from sparsesel.registry import registry

_PACKAGES = ("sparsesel", "torch", "triton", "transformers", "safetensors", "pydantic", "pluggy", "numpy")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _hardware() -> tuple[list[str], list[dict[str, Any]]]:
    """Devices that torch sees, and the backends that can run."""
    import torch

    from sparsesel.ops import backend

    devices = [f"cpu: {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"]
    for i in range(torch.cuda.device_count()):
        info = torch.cuda.get_device_properties(i)
        devices.append(f"cuda:{i}: {info.name}, capability {info.major}.{info.minor}, {info.total_memory >> 20} MiB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return devices, [{"name": b.name, "available": b.available, "why": b.why} for b in backend.available()]


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> None:
    """Show versions, devices, backends and plugins: what a bug report needs."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {package: _version(package) for package in _PACKAGES},
    }
    try:
        report["devices"], report["backends"] = _hardware()
    except (
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # a torch that does not load is worth reporting, not dying of
        report["devices"], report["backends"] = [f"torch failed: {type(error).__name__}: {error}"], []
    usable, broken = checked(registry())
    report["plugins"] = [f"{name} from {found.distribution} {found.version}" for name, found in usable.items()]
    report["broken plugins"] = [f"{b.name} from {b.distribution} {b.version}: {b.error}" for b in broken]
    if as_json:
        print_json(report)
        return
    for heading in ("python", "platform"):
        _line(heading, report[heading])
    for package, version in report["versions"].items():
        _line(package, version)
    for heading in ("devices", "plugins", "broken plugins"):
        for entry in report[heading]:
            _line(heading.removesuffix("s"), entry)
    for entry in report["backends"]:
        _line(
            "backend",
            f"{entry['name']}: {'available' if entry['available'] else 'unavailable'}, {entry['why']}",
        )


def _line(label: str, value: str) -> None:
    out.print(f"{label:<14} {safe(value)}", soft_wrap=True)
