"""`mk profile` on a GPU: the stages of a call add up to its time, and have launch counts."""

import json
from pathlib import Path

import pytest

from modular_kernel.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

CONTIGUOUS = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
BATCHED = ("BatchedPrepareAndFinalize", "BatchedTritonExperts")
# The layer takes milliseconds, so the microseconds between kernels are negligible.
LAYER = ("--experts", "8", "--hidden", "4096", "--intermediate", "7168", "--tokens", "1024")


def test_stages_cover_the_call_and_add_up_to_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parts = ("--pf-type", CONTIGUOUS[0], "--experts-type", CONTIGUOUS[1])
    command = ("profile", *parts, "--against", *BATCHED, *LAYER, "--out", str(tmp_path), "--json")
    with pytest.raises(SystemExit) as exit_info:
        main.run(list(command))
    assert not exit_info.value.code
    record = json.loads(capsys.readouterr().out)
    assert record["output_difference"] < 0.02
    assert record["missing"] == []
    for pair in record["pairs"]:
        (rank,) = pair["ranks"]
        assert rank["total"]["mode"] == "graph"
        assert rank["coverage"] >= 0.95
        assert rank["sum_to_span"] == pytest.approx(1, abs=0.05)
        assert rank["sum_to_total"] == pytest.approx(1, abs=0.05)
        assert rank["furthest_from_floor"] in {row["stage"] for row in rank["stages"]}
        assert rank["peak_bytes"] >= rank["workspace_bytes"] > 0
        for row in rank["stages"]:
            if row["is_stage"]:
                assert row["launches"] >= 1
            if "gemm" in row["stage"]:
                # The weights exceed the L2 cache, so a time far below the roofline is impossible.
                assert 10 < row["percent_of_floor"] < 110
