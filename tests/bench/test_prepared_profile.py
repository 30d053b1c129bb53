"""`mk profile --prepared` profiles calls with prepared weights."""

from dataclasses import replace
from pathlib import Path

import pytest
from grouped_gemm_stand_in import MXFP4
from prepared_weights_samples import NO_GPU, PAIR, make_launched_fixture
from run_mk import Mk, make_mk_fixture

from modular_kernel.catalog import this_machine
from modular_kernel.cli.profile import _OutputFiles
from modular_kernel.measure.prepared_weights import prepared_tensor_bytes

pytestmark = NO_GPU
launched = make_launched_fixture()
mk = make_mk_fixture("profile", "--prepared")
SIZES = {"tokens": 26, "hidden": 32, "intermediate": 32, "experts": 2, "top_k": 1}
OPTIONS = tuple(
    word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))
)
TORCH = ("--pf-type", PAIR[0], "--experts-type", "TorchExperts")


def test_report_has_the_bytes_of_prepared_weights(
    mk: Mk, tmp_path: Path, launched: list[int]
) -> None:
    if not this_machine().interpreter:
        pytest.skip("no Triton here")
    pair_options = (
        "--pf-type",
        PAIR[0],
        "--experts-type",
        PAIR[1],
        "--quant",
        "mxfp4_w4a16",
        *OPTIONS,
    )
    against = ("--against", PAIR[0], "TorchExperts")
    result = mk(*pair_options, *against, "--out", str(tmp_path), "--json")
    assert result.code == 0, result.err
    assert set(launched) == {32}, "with 13 rows per expert, this path needs prepared weights"
    assert "profiled without prepared weights: TorchExperts mxfp4_w4a16" in result.err
    first, second = (pair["ranks"][0] for pair in result.json["pairs"])
    problem = replace(MXFP4, **SIZES)
    assert first["prepared_bytes"] == prepared_tensor_bytes(PAIR[1], problem) > 0
    assert second["prepared_bytes"] == 0
    assert result.json["output_difference"] < 0.05
    (page,) = tmp_path.glob("*.profile.html")
    assert "MiB of prepared weights" in page.read_text(encoding="utf-8")
    assert len(list(tmp_path.glob("*.trace.json"))) == 2


def test_files_without_prepared_weights_are_not_overwritten(mk: Mk, tmp_path: Path) -> None:
    unprepared, prepared = (
        _OutputFiles((PAIR,), MXFP4, tmp_path, is_prepared) for is_prepared in (False, True)
    )
    assert unprepared.get_stem(PAIR) != prepared.get_stem(PAIR)
    assert unprepared.get_report_path("json") != prepared.get_report_path("json")


@pytest.mark.parametrize("quant", ["none", "mxfp4_w4a16"])
def test_schemes_without_prepared_weights_are_refused(mk: Mk, quant: str, tmp_path: Path) -> None:
    result = mk(*TORCH, *OPTIONS, "--quant", quant, "--out", str(tmp_path / "new"))
    assert (result.code, result.out) == (2, "")
    assert f"--prepared: got {quant}, not prepared by TorchExperts" in result.err
    assert not (tmp_path / "new").exists()
