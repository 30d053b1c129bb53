"""Differences between the supported triton releases.

Kernels import renamed Gluon functions from here, and host code the encoding of a launch. All other
modules are written as if there were one triton release.
"""

import ctypes
from typing import Any

import triton
from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton has no type annotations.
TritonObject = Any

RELEASE = ".".join(triton.__version__.split(".")[:2])

# Releases whose launchers are known to match modular_kernel.replay.launch.cuda_replay: the kernel's
# parameters and two scratch pointers, in the same order, with the same attributes.
REPLAYED = ("3.6", "3.7", "3.8", "3.9")


def _first_attribute(owner: TritonObject, new: str, old: str) -> TritonObject:
    return getattr(owner, new) if hasattr(owner, new) else getattr(owner, old)


# Gluon renamed the copies to and from shared memory in 3.8; 3.9 rejects the old names.
copy_rows = _first_attribute(async_copy, "async_load", "async_copy_global_to_shared")
load_box = _first_attribute(tma, "async_load", "async_copy_global_to_shared")
store_box = _first_attribute(tma, "async_store", "async_copy_shared_to_global")
# reinterpret(memory, dtype, shape, layout): a public method since 3.9.
reinterpret = _first_attribute(shared_memory_descriptor, "reinterpret", "_reinterpret")

# Whether a lane unpacks the words of packed weights that it loads itself. Triton distributes the
# lanes of a load over the axes along which its addresses are not contiguous. Up to 3.6 it starts
# from the first axis, for which path gemv_w4 was designed; since 3.7, from the last. Words then
# pass between lanes through shared memory, and the GEMMs use up to twice as many registers.
WORDS_STAY_IN_LANES = RELEASE == "3.6"

# Releases whose register allocation (ptxas 13.4 with --regAllocOptLevel=2) may spill to allow more
# programs per multiprocessor than are ever resident.
_TOO_MANY_PROGRAMS = ("3.9",)

MAP_BYTES = 128  # size of a CUtensorMap

# Above this size, triton 3.8's launcher requests another split of shared memory and L1.
_OVERSIZED_SHARED = 228 * 1024


def for_programs(count: int) -> dict[str, str]:
    """Return launch options for a kernel of which `count` programs run on each SM.

    In triton releases that may spill to fit more programs, the options make ptxas allocate
    registers for this occupancy.
    """
    if RELEASE not in _TOO_MANY_PROGRAMS or triton.knobs.runtime.interpret:
        return {}
    user_options = triton.knobs.nvidia.ptxas_options  # PTXAS_OPTIONS, which ours would override
    return {"ptx_options": " ".join(filter(None, (user_options, f"--minnctapersm={count}")))}


def why_not_replayed(metadata: TritonObject) -> str:
    """Return why a launch cannot be replayed without triton's own code; "" if it can.

    metadata: that of the compiled kernel.
    """
    if RELEASE not in REPLAYED:
        return f"launchers of triton {triton.__version__} are unknown"
    if getattr(metadata, "instrumentation_mode", ""):
        return f"kernels are instrumented ({metadata.instrumentation_mode})"
    if metadata.target.backend != "cuda" or metadata.num_ctas != 1:
        return "it uses clusters, or does not target an NVIDIA GPU"
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return "it uses scratch memory"
    if metadata.shared > _OVERSIZED_SHARED:
        return f"it takes {metadata.shared} bytes of shared memory"
    return ""


def encoded_map(descriptor: TritonObject, meta: TritonObject) -> tuple[bytes, list[int]] | None:
    """Return the TMA map of triton's TensorDescriptor, and the sizes and strides passed with it.

    Return None if triton stores maps in a way unknown to this module.

    meta: triton's metadata of this parameter.
    """
    from triton.backends.nvidia import driver

    if RELEASE in ("3.6", "3.7"):
        encoded, *numbers = driver.make_tensordesc_arg(descriptor, meta)
    else:
        encoded, *numbers = driver.make_tensordesc_arg(descriptor, meta, None)
    if type(encoded).__basicsize__ != 2 * MAP_BYTES:  # padded to align the map to its size
        return None
    return ctypes.string_at(id(encoded) + MAP_BYTES, MAP_BYTES), numbers
