"""All metadata of the package: name, version, packages, requirements and entry points."""

import re
from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="modular-kernel",
    version="0.2.0",
    description="Compose fused mixture-of-experts layers from interchangeable, verified parts.",
    # Package indexes show the README without the files that it links to. Links to files are reduced
    # to their text, and pictures are removed.
    long_description=re.sub(
        r"!\[[^\]]*\]\((?!https://)[^)]*\)|\[([^\]]*)\]\((?!https://)[^)]*\)",
        r"\1",
        Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    ),
    long_description_content_type="text/markdown",
    author="The modular_kernel authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["mixture-of-experts", "MoE", "expert parallelism", "triton", "torch", "GPU kernels"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    # Only these four packages and their subpackages are installed, without tests, tools and docs.
    packages=find_packages(
        include=[
            "modular_kernel",
            "modular_kernel.*",
            "prepare_finalize",
            "prepare_finalize.*",
            "experts",
            "experts.*",
            "topk_reduce",
            "topk_reduce.*",
        ],
    ),
    package_data={
        "modular_kernel": [
            "checkpoints/*.c",
            "checkpoints/data/*.json",
            "cli/templates/**/*.j2",
            "perf_model/data/*.json",
            "py.typed",
            "replay/launch/*.c",
            "report/pages/*.html",
            "report/pages/*.md",
            "report/pages/*.css",
            "report/pages/*.js",
            "select/*.json",
            "select/data/*.json",
            "testing/mutation/*.json",
            "testing/verify/*.json",
        ],
        "prepare_finalize": ["py.typed"],
        "experts": ["py.typed", "triton/configs/data/**/*.json"],
        "topk_reduce": ["py.typed"],
    },
    include_package_data=False,
    zip_safe=False,
    # torch pins the version of triton that it was built with. docs/versions.md describes which
    # versions in this range were tested, and how. There is no triton for macOS and Windows, where
    # only the plain torch parts run.
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "triton>=3.6,<3.10; platform_system == 'Linux'",
        "safetensors>=0.6.1",  # the first release with E8M0
        "click>=8.4.2",
        "rich>=13.7",
        "jinja2>=3.1",  # also required by torch
    ],
    # Only packages that can be installed from the package index by name. DeepEP (deep_ep) and
    # pplx-kernels (pplx_kernels) are built from source against the installed torch. Their names on
    # the index could belong to unrelated packages. A source URL would make every resolver that
    # considers all extras build them. The parts that wrap them report missing packages.
    extras_require={
        # The minimum of modular_kernel.integrations.transformers.
        "transformers": ["transformers>=5.23"],
        # The plugin also supports 0.26, which is not installed by this extra. With another version,
        # it does nothing.
        "vllm": ["vllm>=0.33,<0.34"],
        # 330 MB, with NVIDIA's license. The package named cutlass on the index is unrelated.
        "cutlass": ["nvidia-cutlass-dsl>=4.8.1,<4.9", "apache-tvm-ffi>=0.1.15"],
        "bench": ["matplotlib>=3.8"],
        "sglang": ["sglang==0.5.23"],  # pins torch and transformers
        "interpreter": ["ml_dtypes>=0.5"],
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.7",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ml_dtypes>=0.5",
            "peft>=0.21",
            "setuptools>=70.1",
        ],
        "dev": [
            "codespell>=2.4",
            "pre-commit>=4.0",
            "ruff>=0.17",
            "mypy>=2.4",
            "import-linter>=2.16",
        ],
    },
    entry_points={
        "console_scripts": ["mk = modular_kernel.cli.main:run"],
        # vLLM calls this in each of its processes.
        "vllm.general_plugins": ["modular_kernel = modular_kernel.integrations.vllm:register"],
        # Third parties register their parts in the same group, with other names.
        "modular_kernel.parts": [
            "prepare_finalize = prepare_finalize:COMPONENTS",
            "experts = experts:COMPONENTS",
            "topk_reduce = topk_reduce:COMPONENTS",
        ],
        "sglang.srt.plugins": ["modular_kernel = modular_kernel.integrations.sglang:register"],
        # Parts that `mk list` lists as planned.
        "modular_kernel.planned": [
            "prepare_finalize = prepare_finalize:PLANNED",
            "experts = experts:PLANNED",
        ],
    },
)
