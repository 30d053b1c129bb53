"""Differences between the supported triton releases.

Kernels import functions of Gluon, triton's low-level kernel language, that were renamed between
releases. Host code uses the functions that read triton's compiled kernels. No other module depends
on the release.
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

# Releases whose launchers pass the same parameters and attributes to a kernel as
# modular_kernel.replay.launch.cuda_replay does: the kernel's parameters, then two scratch pointers.
REPLAYABLE_RELEASES = ("3.6", "3.7", "3.8", "3.9")


def _get_first_attribute(owner: TritonObject, new_name: str, old_name: str) -> TritonObject:
    return getattr(owner, new_name) if hasattr(owner, new_name) else getattr(owner, old_name)


# Gluon renamed the copies between global and shared memory in 3.8; 3.9 rejects the old names.
async_load_rows = _get_first_attribute(async_copy, "async_load", "async_copy_global_to_shared")
tma_async_load = _get_first_attribute(tma, "async_load", "async_copy_global_to_shared")
tma_async_store = _get_first_attribute(tma, "async_store", "async_copy_shared_to_global")
# reinterpret(memory, dtype, shape, layout) is public since 3.9.
reinterpret = _get_first_attribute(shared_memory_descriptor, "reinterpret", "_reinterpret")

# Whether each lane of a warp unpacks the words of packed weights that it has loaded. Triton
# distributes the lanes of a load over the axes along which addresses are not contiguous. Triton
# 3.6, for which the path gemv_w4 was designed, starts with the first axis. Triton 3.7 and later
# start with the last axis. Lanes then exchange words through shared memory, and the GEMMs use up to
# twice as many registers.
WORDS_STAY_IN_LANES = RELEASE == "3.6"

# Releases whose register allocation (ptxas 13.4 with --regAllocOptLevel=2) may spill registers for
# a higher occupancy than a launch can reach.
_SPILLS_FOR_OCCUPANCY = ("3.9",)

MAP_BYTES = 128  # size of a CUtensorMap

# Above this number of bytes, triton 3.8's launcher requests another split of shared memory and L1.
_MAX_SHARED = 228 * 1024


def make_occupancy_options(programs_per_sm: int) -> dict[str, str]:
    """Return launch options for a kernel that runs with `programs_per_sm` programs on each SM.

    If the triton release may spill registers for a higher occupancy, the options make ptxas
    allocate registers for this number of programs.
    """
    if RELEASE not in _SPILLS_FOR_OCCUPANCY or triton.knobs.runtime.interpret:
        return {}
    # ptx_options would replace the options of the environment variable PTXAS_OPTIONS.
    user_options = triton.knobs.nvidia.ptxas_options
    occupancy_option = f"--minnctapersm={programs_per_sm}"
    return {"ptx_options": " ".join(filter(None, (user_options, occupancy_option)))}


def why_not_replayed(metadata: TritonObject) -> str:
    """Return why a launch cannot be replayed without triton's launcher; "" if it can.

    metadata: triton's metadata of the compiled kernel.
    """
    if RELEASE not in REPLAYABLE_RELEASES:
        return f"launchers of triton {triton.__version__} are unknown"
    if getattr(metadata, "instrumentation_mode", ""):
        return f"kernels are instrumented ({metadata.instrumentation_mode})"
    if metadata.target.backend != "cuda" or metadata.num_ctas != 1:
        return "it uses clusters, or does not target an NVIDIA GPU"
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return "it uses scratch memory"
    if metadata.shared > _MAX_SHARED:
        return f"it takes {metadata.shared} bytes of shared memory"
    return ""


def encode_tensor_map(
    descriptor: TritonObject, meta: TritonObject
) -> tuple[bytes, list[int]] | None:
    """Return the TMA map of a triton TensorDescriptor, and its sizes and strides.

    Returns None if triton stores maps in an unknown format.

    meta: triton's metadata of this parameter.
    """
    from triton.backends.nvidia import driver

    if RELEASE in ("3.6", "3.7"):
        encoded, *numbers = driver.make_tensordesc_arg(descriptor, meta)
    else:
        encoded, *numbers = driver.make_tensordesc_arg(descriptor, meta, None)
    # The Python object that triton returns holds the map in its second half, for alignment.
    if type(encoded).__basicsize__ != 2 * MAP_BYTES:
        return None
    return ctypes.string_at(id(encoded) + MAP_BYTES, MAP_BYTES), numbers
