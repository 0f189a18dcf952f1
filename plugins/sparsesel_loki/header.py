"""What a calibration file says of itself. Reading it loads no torch, so that configurations can be checked early."""

from pathlib import Path

from sparsesel.errors import InputError

KIND = "sparsesel loki calibration"
VERSION = "1"
REMEDY = "Write one with `sparsesel calibrate loki --model MODEL --text FILE --out FILE`."


def read_header(path: Path) -> dict[str, str]:
    """Metadata of a calibration file.

    Raises:
        InputError: It is missing, truncated, of another kind or of a version that this one does not read.
    """
    from safetensors import SafetensorError, safe_open  # listing selectors needs neither it nor numpy

    problem = ""
    header: dict[str, str] = {}
    try:
        if path.is_file():
            with safe_open(path, framework="numpy") as file:  # checks that the tensors are all there
                header = file.metadata() or {}
        else:
            problem = "a folder" if path.is_dir() else "no such file"
    except (SafetensorError, OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        problem = f"truncated or not a safetensors file: {error}"
    if not problem and header.get("kind") != KIND:
        problem = "a safetensors file, but no calibration"
    if not problem and header.get("version") != VERSION:
        problem = f"a calibration of format {header.get('version')}, this sparsesel reads {VERSION}"
    if problem:
        raise InputError("calibration", expected="a calibration file of loki", got=f"{path} ({problem})", remedy=REMEDY)
    return header
