"""Run transformers' own tests, and checkpoints from quantization libraries, on our parts.

    TRITON_INTERPRET=1 python tools/hf_suites classes            # transformers' experts classes
    python tools/hf_suites upstream --checkout DIR --site DIR    # transformers' own tests, with and
                                                                 # without our implementation
    python tools/hf_suites packers --site DIR... --sources DIR   # import of packed checkpoints
    ... --write RECORD.json                                      # also writes the counts

--checkout is a folder with src, tests and utils of a commit of transformers. --site are folders
installed by pip, with packers or with the dependencies of transformers' tests. --sources is a
folder with unpacked source distributions. --models are the models whose tests upstream runs.
--lines is a folder for the outcomes of upstream's cases. Models that are already in it are not run
again. No code of these projects is copied here.

Exits with 1 if one of our results is wrong, or if a call ends with an untyped exception.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[number]) for number in (1, 2)]

from hf_suites import upstream
from hf_suites.outcomes import Case, summarize

# Keeps GPTQModel from compiling an extension and its layers, and others from accessing the hub.
QUIET_ENVIRONMENT = {
    "GPTQMODEL_DISABLE_PACK_EXT": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
MODELS_PER_PROCESS = 4  # number of models whose tests run in one process
_PACKAGES = (
    *("torch", "triton", "transformers", "auto_gptq", "gptqmodel", "auto_round", "autoawq"),
    *("compressed_tensors", "torchao", "nvidia_modelopt"),
)


def main(argv: list[str] | None = None) -> int:
    """Run a suite, print the outcomes of its cases, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("suite", choices=("classes", "upstream", "packers"))
    parser.add_argument("--checkout", type=Path)
    parser.add_argument("--site", type=Path, action="append", default=[])
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--lines", type=Path)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args(argv)
    sys.path += map(str, args.site)
    run_suite = {"classes": _run_classes, "upstream": _run_upstream, "packers": _run_packers}[
        args.suite
    ]
    counts = summarize(run_suite(args))
    print(json.dumps(counts, indent=1, ensure_ascii=False))
    if args.write is not None:
        _write_record(args, counts)
    return int(bool(counts["bad"]))


def _run_classes(_args: argparse.Namespace) -> Iterator[Case]:
    from hf_suites import classes  # noqa: PLC0415 (needs transformers)

    return classes.cases()


def _run_packers(args: argparse.Namespace) -> Iterator[Case]:
    os.environ |= QUIET_ENVIRONMENT  # noqa: TID251 (packers read it when they are imported)
    sys.path += map(str, args.sources.glob("gptqmodel-*"))
    from hf_suites import pack_floats, pack_integers, packed  # noqa: PLC0415 (read those)

    yield from packed.cases(pack_integers.list_packers(args.sources))
    yield from packed.cases(pack_floats.list_packers())


def _run_upstream(args: argparse.Namespace) -> Iterator[Case]:
    files = upstream.list_test_files(args.checkout)
    if args.models:
        files = [file for file in files if file.split("/")[2] in args.models]
    (site,) = args.site
    with tempfile.TemporaryDirectory() as folder:
        results = upstream.ResultFolder(args.lines or Path(folder))
        remaining = [file for file in files if file not in results.files]
        for start in range(0, len(remaining), MODELS_PER_PROCESS):
            batch = remaining[start : start + MODELS_PER_PROCESS]
            run_batch = partial(upstream.run, args.checkout, site, batch)
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(run_batch, upstream.SIDES, map(results.get_path, upstream.SIDES)))
            results.finish(batch)
        for case in results.list_outcomes():
            yield upstream.reevaluate(case, args.checkout, site)


def _write_record(args: argparse.Namespace, counts: dict[str, Any]) -> None:
    """Write the suite's counts to the record, and keep those of other suites."""
    record = json.loads(args.write.read_text()) if args.write.exists() else {}
    versions = record.setdefault("versions", {})
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    record[args.suite] = counts
    args.write.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
