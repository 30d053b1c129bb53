"""The parts that use vendor libraries, on a CPU and with stand-ins for the libraries."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from experts import (
    BatchedCutlassExpertsFP4,
    BatchedCutlassExpertsFP8,
    BatchedDeepGemmExperts,
    BatchedTritonOrDeepGemmExperts,
    CutlassExpertsFP4,
    CutlassExpertsFP8,
    CutlassRowwiseExpertsFP8,
    DeepGemmExperts,
    FlashInferExperts,
    TritonKernelsExperts,
    TritonOrDeepGemmExperts,
)
from experts.cutlass.block_gemm import TILE_M
from experts.cutlass.path import CutlassPath
from experts.triton.grouped_tma import grouped_tma_config as grouped_tma
from experts.triton.standard import _CallGroup
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.spec.problem import Machine
from modular_kernel.testing import Case, prove
from modular_kernel.utils.package_probes import unload

FOLDER = Path(__file__).parent / "stand_ins"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

import deep_gemm_2  # noqa: E402
import flashinfer_0_7  # noqa: E402
import fp4_gemm  # noqa: E402
import triton_kernels_3_5  # noqa: E402
from scaled_grouped_mm import scaled_grouped_mm  # noqa: E402

CPU = Machine("cpu", None, frozenset({"triton", "ml_dtypes"}), interpreter=True)
NO_EP, BATCHED = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"


def without_device_limits(requires, **changes):
    """Return the requirements without limits on devices and packages."""
    cpu_fields = {"devices": frozenset({"cpu"}), "packages": (), "providers": (), "triton": False}
    return replace(requires, min_arch=None, archs=None, **cpu_fields, **changes)


class CutlassRowwise(CutlassRowwiseExpertsFP8):
    requires = without_device_limits(CutlassRowwiseExpertsFP8.requires)


class BatchedCutlass(BatchedCutlassExpertsFP8):
    requires = without_device_limits(BatchedCutlassExpertsFP8.requires)


class CutlassBlock(CutlassExpertsFP8):
    """Uses the torch reference of the CUTLASS kernel in every call that the kernel supports.

    The reference checks the kernel's requirements. The part itself would not launch the kernel for
    few tokens.
    """

    requires = without_device_limits(CutlassExpertsFP8.requires)

    def __init__(self, problem):
        super().__init__(problem)
        self._paths[grouped_tma.NAME] = CutlassPath(problem)

    def takes_unquantized(self, shape):
        return False

    def _list_call_groups(self, tokens):
        path = self._paths[grouped_tma.NAME]
        return (
            *super()._list_call_groups(tokens),
            _CallGroup(path, TILE_M, tokens, prepared=False),
        )

    def _choose_config(self, x_TH, weights):
        if self._paths[grouped_tma.NAME].supports_tensors(weights, x_TH):
            return grouped_tma.default_config(self.problem)
        return super()._choose_config(x_TH, weights)


class CutlassFP4(CutlassExpertsFP4):
    requires = without_device_limits(CutlassExpertsFP4.requires)
    gemm = staticmethod(fp4_gemm.fp4_gemm)


class BatchedCutlassFP4(BatchedCutlassExpertsFP4):
    requires = without_device_limits(BatchedCutlassExpertsFP4.requires)
    gemm = staticmethod(fp4_gemm.fp4_gemm)


class DeepGemm(DeepGemmExperts):
    requires = without_device_limits(DeepGemmExperts.requires)
    load_library = staticmethod(lambda: deep_gemm_2)


class BatchedDeepGemm(BatchedDeepGemmExperts):
    requires = without_device_limits(BatchedDeepGemmExperts.requires)
    load_library = staticmethod(lambda: deep_gemm_2)


class TritonOrDeepGemm(TritonOrDeepGemmExperts):
    requires = without_device_limits(TritonOrDeepGemmExperts.requires)
    deepgemm_part = DeepGemm

    @classmethod
    def min_rows(cls, problem):
        """Return the limit of large layers, because the layers of tests are small."""
        return super().min_rows(replace(problem, hidden=4096, intermediate=4096))


class BatchedTritonOrDeepGemm(BatchedTritonOrDeepGemmExperts):
    requires = without_device_limits(BatchedTritonOrDeepGemmExperts.requires)
    deepgemm_part = BatchedDeepGemm


class TritonKernels(TritonKernelsExperts):
    requires = without_device_limits(TritonKernelsExperts.requires)
    load_library = staticmethod(lambda: triton_kernels_3_5)


class FlashInfer(FlashInferExperts):
    requires = without_device_limits(FlashInferExperts.requires)
    load_library = staticmethod(lambda: flashinfer_0_7)


@contextmanager
def stand_in_libraries():
    """Replace the libraries by the stand-ins, and run the package's operations in torch."""
    with (
        mock.patch.object(torch, "_scaled_grouped_mm", scaled_grouped_mm),
        prefer_torch_reference(),
    ):
        yield


@contextmanager
def library_site(
    folder: Path, monkeypatch: pytest.MonkeyPatch, library: ModuleType, *names: str
) -> Iterator[Path]:
    """Prepend `folder` to the import path; afterwards reset `library.load` and unload `names`."""
    monkeypatch.syspath_prepend(str(folder))
    library.load.cache_clear()
    yield folder
    library.load.cache_clear()
    for name in names:
        unload(name)


def local_prepare_finalize(part):
    """Return the local PrepareAndFinalize of a part's activation format."""
    return BATCHED if part.requires.activation_format.value == "batched_experts" else NO_EP


def prove_part(part, problem, routing="uniform", **case_options):
    """Prove one case of a part."""
    with stand_in_libraries():
        return prove(
            Case(local_prepare_finalize(part), part, problem, routing, **case_options), CPU
        )


PARTS = (
    "CutlassRowwise",
    "BatchedCutlass",
    "CutlassBlock",
    "CutlassFP4",
    "BatchedCutlassFP4",
    "DeepGemm",
    "BatchedDeepGemm",
    "TritonOrDeepGemm",
    "BatchedTritonOrDeepGemm",
    "TritonKernels",
    "FlashInfer",
)
