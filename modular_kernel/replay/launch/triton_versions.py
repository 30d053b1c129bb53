"""compat: what differs between the releases of triton that setup.py admits, and nothing else.

Kernels take renamed functions of Gluon from here; host code asks here how a launch is encoded.
Every other module is written as if there were one triton.
"""

import ctypes
from typing import Any

import triton
from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton ships no annotations.
Foreign = Any

RELEASE = ".".join(triton.__version__.split(".")[:2])

# Releases whose launchers are known to do what modular_kernel.replay.launch.cuda_replay does: as
# many
# parameters as the kernel has and two pointers to scratch, in the same order, with the same
# attributes.
REPLAYED = ("3.6", "3.7", "3.8", "3.9")


def _either(owner: Foreign, new: str, old: str) -> Foreign:
    return getattr(owner, new) if hasattr(owner, new) else getattr(owner, old)


# Gluon's copies to and from shared memory got their names with 3.8; 3.9 refuses the old ones.
copy_rows = _either(async_copy, "async_load", "async_copy_global_to_shared")
load_box = _either(tma, "async_load", "async_copy_global_to_shared")
store_box = _either(tma, "async_store", "async_copy_shared_to_global")
# reinterpret(memory, dtype, shape, layout): a public method since 3.9.
reinterpret = _either(shared_memory_descriptor, "reinterpret", "_reinterpret")

# Lanes share out the axes along which nothing is contiguous from the first on up to 3.6, from the
# last on since 3.7. The packed path was laid out for the former: elsewhere its words go from lane
# to lane through shared memory, and its products take up to twice as many registers.
WORDS_STAY_IN_LANES = RELEASE == "3.6"

# Releases that have registers allocated so (ptxas 13.4 with --regAllocOptLevel=2) that a kernel may
# spill for the sake of more programs than there ever are.
_TOO_MANY_PROGRAMS = ("3.9",)

MAP_BYTES = 128  # of a CUtensorMap

# From here on triton 3.8 asks a driver for another division of shared memory and L1 (its launcher).
_OVERSIZED_SHARED = 228 * 1024


def for_programs(count: int) -> dict[str, str]:
    """Return launch options of a kernel of which `count` programs share a multiprocessor.

    Registers are allocated for so many and no more, where the release does not see to it by itself.
    """
    if RELEASE not in _TOO_MANY_PROGRAMS or triton.knobs.runtime.interpret:
        return {}
    asked = triton.knobs.nvidia.ptxas_options  # PTXAS_OPTIONS, which ours would replace
    return {"ptx_options": " ".join(filter(None, (asked, f"--minnctapersm={count}")))}


def unreplayed(metadata: Foreign) -> str:
    """Say why a launch cannot be done again without triton's own code; "" if it can.

    metadata: that of a compiled kernel.
    """
    if RELEASE not in REPLAYED:
        return f"launchers of triton {triton.__version__} are unknown"
    if getattr(metadata, "instrumentation_mode", ""):
        return f"kernels are instrumented ({metadata.instrumentation_mode})"
    if metadata.target.backend != "cuda" or metadata.num_ctas != 1:
        return "it is for clusters, or for no GPU of NVIDIA's"
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return "it takes scratch memory"
    if metadata.shared > _OVERSIZED_SHARED:
        return f"it takes {metadata.shared} bytes of shared memory"
    return ""


def encoded_map(descriptor: Foreign, meta: Foreign) -> tuple[bytes, list[int]] | None:
    """Return a TMA map of triton's TensorDescriptor, and the numbers that go beside it.

    A kernel takes sizes and strides beside the map. None if triton keeps maps in another way than
    this module knows.

    meta: triton's, of this parameter.
    """
    from triton.backends.nvidia import driver

    if RELEASE in ("3.6", "3.7"):
        encoded, *numbers = driver.make_tensordesc_arg(descriptor, meta)
    else:
        encoded, *numbers = driver.make_tensordesc_arg(descriptor, meta, None)
    if type(encoded).__basicsize__ != 2 * MAP_BYTES:  # aligned to as many as it has
        return None
    return ctypes.string_at(id(encoded) + MAP_BYTES, MAP_BYTES), numbers
