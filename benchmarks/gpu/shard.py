"""A plugin of pytest: runs a share of the tests, and writes down each as it begins and ends.

What an earlier process of this share has done or died in is left out. After a fault of the device, which nothing in a
process survives, the process ends.
"""

import json
import os
from pathlib import Path

import pytest
from gpu.conformance import read

_PATH = Path(os.environ["GPU_CHECK_LINES"])
_INDEX, _COUNT = (int(part) for part in os.environ["GPU_CHECK_SHARD"].split("/"))
_ONLY = os.environ["GPU_CHECK_ONLY"].lower()  # names of classes have capitals where those of selectors have none
DEVICE_FAULT = 70
"""Exit code of a process that ended because of one."""


def _write(**record: object) -> None:
    with _PATH.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    share = [item for item in items if _ONLY in item.nodeid.partition("::")[2].lower()][_INDEX::_COUNT]
    done, _ = read(_PATH)
    _write(total=len(share))
    items[:] = [item for item in share if item.nodeid not in done]


def pytest_runtest_logstart(nodeid):
    _write(test=nodeid)


def pytest_runtest_logreport(report):
    if report.failed:
        lines = str(report.longrepr).strip().splitlines()
        errors = [line[2:].strip() for line in lines if line.startswith("E ")] or lines[-3:]
        _write(test=report.nodeid, outcome="failed", error=" ".join(errors)[:1500])
        if "CUDA error" in str(report.longrepr) or "AcceleratorError" in str(report.longrepr):
            os._exit(DEVICE_FAULT)
    elif report.when == "call" or report.skipped:
        _write(test=report.nodeid, outcome=report.outcome)
