"""Models that transformers splits over ranks, by tensor and by both kinds of expert parallelism."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from modular_kernel.cli.demo_models import build_small_model

PROGRAM = Path(__file__).parents[1] / "helpers" / "transformers_rank_program.py"
# The experts, top-k and I of the kernels on a rank, by model and kind of parallelism. All-to-all
# has one row for each (token, expert) pair. The tensor-parallel plan of gpt-oss does not split I.
KERNELS = {
    ("mixtral", "tp"): (8, 2, 48),
    ("mixtral", "ep all_reduce"): (4, 2, 96),
    ("mixtral", "ep all_to_all"): (4, 1, 96),
    ("gpt_oss", "tp"): (8, 2, 80),
    ("gpt_oss", "ep all_reduce"): (4, 2, 80),
    ("gpt_oss", "ep all_to_all"): (4, 1, 80),
}


@pytest.mark.cpu
def test_two_ranks_equal_one_process(tmp_path) -> None:
    for name in ("mixtral", "gpt_oss"):
        build_small_model(name, "float32", "cpu").save_pretrained(tmp_path / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("found ")]
    assert result.returncode == 0, result.stderr[-3000:]
    ranks = json.loads(lines[0].removeprefix("found "))
    assert len(ranks) == 2
    for row in (row for rank in ranks for row in rank):
        case = row["model"], row["kind"]
        assert row["difference"] <= 1e-5, row
        assert row["tokens"], row
        assert row["kernels"] == [list(KERNELS[case])], row
        assert row.get("compiled", 0.0) <= 1e-6, row
    assert {(row["model"], row["kind"]) for row in ranks[0]} == KERNELS.keys()
