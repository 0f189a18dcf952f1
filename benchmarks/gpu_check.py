"""Check and time everything on a CUDA machine, in one command and within minutes.

    python benchmarks/gpu_check.py                        # all of it, within 8 minutes
    python benchmarks/gpu_check.py --sections environment,latency --minutes 4
    python benchmarks/gpu_check.py --tiny --device cpu    # the same code in Triton's interpreter, without a GPU

See README.md beside this file. Results are written as they come, to `--output`; a table is printed at the end.
Sections run in the order in which `--sections` lists them below; `environment` always does, and in the end `kernels`,
which says what all of them together launched.
Exit code: 0 all passed, 1 a check failed, 2 it cannot run here or no check has such a name, 3 none failed but time ran
out before all were done, 130 interrupted.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECTIONS = ("environment", "operations", "selectors", "graphs", "latency", "conformance")
"""In the order in which they run; after them it is said which kernels were launched in all."""


def main() -> int:
    """Run what is asked for."""
    options = parsed()
    # Read when triton is loaded, here and in the processes that are started.
    os.environ["TRITON_INTERPRET"] = "1" if options.device == "cpu" else "0"
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [path for path in (str(ROOT / "benchmarks"), str(ROOT / "tools")) if path not in sys.path]
    try:
        from gpu.check import Check, nothing_named, offers
    except ImportError as error:
        print(f"Something is not installed ({error}): see benchmarks/README.md", file=sys.stderr)
        return 2
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("torch sees no CUDA device; to try the script without one: --tiny --device cpu", file=sys.stderr)
            return 2
    if not offers(options):
        print(nothing_named(options.only), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    return Check(options).run()


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, a few of each kind of check")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for all of it [7.5]")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"comma-separated [{','.join(SECTIONS)}]")
    parser.add_argument("--only", default="", help="checks and selectors whose names contain this")
    parser.add_argument("--workers", type=int, help="processes that check at the same time [by cores and memory]")
    parser.add_argument("--output", type=Path, default=Path(".benchmarks/gpu_check.json"), help="file for the results")
    options = parser.parse_args()
    options.sections = options.sections.split(",")
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown sections: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu goes with --tiny: the interpreter is a thousand times slower than a GPU")
    if options.minutes <= 0 or (options.workers is not None and options.workers < 1):
        parser.error("--minutes and --workers are positive")
    return options


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
