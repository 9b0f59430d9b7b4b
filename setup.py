"""Packaging of torchao_blockwise: pure Python, nothing to build."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# Read, not imported: the requirements are not installed yet.
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "torchao_blockwise/__init__.py").read_text("utf-8"), re.M)

TEST = ["pytest>=8", "pytest-xdist", "expecttest", "hypothesis", "numpy", "safetensors"]
DEMO = ["matplotlib", "tqdm", "numpy"]
# Frameworks that tests run converted models in; without them those tests are skipped.
MODELS = ["transformers", "torchtitan", "accelerate", "peft", "lightning", "compressed-tensors"]
# Optimizers and loggers of other projects; without them their tests are skipped.
TRAINING = ["bitsandbytes", "prodigyopt", "schedulefree", "tensorboard", "wandb"]
# A library of products on Hopper, which builds its kernels with the machine's nvcc.
DEEP_GEMM = ["sgl-deep-gemm>=0.1.4,<0.2"]
# The site, whose tutorials run in frameworks as it is built.
DOCS = [
    *DEMO,
    *MODELS,
    "sphinx>=8.2,<9",
    "sphinx-gallery",
    "sphinx-design",
    "sphinx-copybutton",
    "pydata-sphinx-theme",
    "myst-parser",
]
DEV = [*TEST, *DEMO, "ruff", "mypy", "pre-commit"]

setup(
    name="torchao_blockwise",
    version=VERSION[1],
    description="Train transformers in blockwise FP8 (DeepSeek-V3 style) and NVFP4 with PyTorch and torchao",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    packages=find_packages(include=["torchao_blockwise", "torchao_blockwise.*"]),
    package_data={"torchao_blockwise": ["py.typed", "diagnostics/page/*"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "torchao>=0.17", "triton; platform_system == 'Linux'"],
    extras_require={
        "test": [*TEST, *DEMO],
        "demo": DEMO,
        "models": MODELS,
        "training": TRAINING,
        "deep_gemm": DEEP_GEMM,
        "docs": DOCS,
        "dev": DEV,
    },
)
