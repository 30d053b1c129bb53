"""The key of every cache contains every field that determines the cached value."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experts.triton.configs import select as tiles
from experts.triton.configs.files import ConfigKey
from experts.triton.configs.lookup import triton_subfolder
from experts.triton.launch_config import Device
from modular_kernel.replay import recording
from modular_kernel.select import cache_keys
from modular_kernel.select.cache import Cache
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Combine, Machine, Parallel, Problem
from modular_kernel.tensors import ExpertWeights

BASE = Problem(tokens=4, hidden=64, intermediate=32, experts=8, top_k=2)
H200 = Machine("cuda", (9, 0), frozenset({"triton"}), name="NVIDIA H200")

# ------------------------------------------------------------------------- choices of `compose`

PROBLEM_CHANGES: dict[str, Any] = {
    "hidden": 128,
    "intermediate": 64,
    "experts": 16,
    "top_k": 1,
    "dtype": torch.float16,
    "quant": "fp8_w8a8_channel",
    "activation": "gelu",
    "local_experts": 4,
    "ids_dtype": torch.int64,
    "bias": True,
    "expert_map": True,
    "apply_router_weight_on_input": True,
    "routed_scaling_factor": 2.5,
    "combine": Combine.TOPK_WEIGHTED,
    "inplace": True,
    "fp32_precision": "tf32",
    "chunk_tokens": 2,
    "max_received": 12,
    "graph": True,
    "deterministic": True,
    "batch_invariant": True,
    "asynchronous": True,
    "lora": "adapters=2,rank=8",
    "parallel": Parallel(2),
}


def make_identity(
    problem: Problem = BASE,
    machine: Machine = H200,
    routing: str = "uniform",
    replicated: bool = False,
) -> cache_keys.KeyFields:
    return cache_keys.make_identity_fields(problem, machine, routing=routing, replicated=replicated)


def test_every_problem_field_except_tokens_has_a_change() -> None:
    """The number of tokens and the rank are not part of a key."""
    assert {field.name for field in fields(Problem)} - {"tokens"} == set(PROBLEM_CHANGES)
    assert make_identity(replace(BASE, tokens=9)) == make_identity()
    rank_0, rank_1 = (replace(BASE, parallel=Parallel(2, rank=rank)) for rank in (0, 1))
    assert make_identity(rank_0) == make_identity(rank_1)


@pytest.mark.parametrize("name", PROBLEM_CHANGES)
def test_cached_choices_depend_on_every_problem_field(name: str) -> None:
    changed = replace(BASE, **{name: PROBLEM_CHANGES[name]})
    assert cache_keys.file_stem(make_identity(changed)) != cache_keys.file_stem(make_identity())


def test_cached_choices_depend_on_gpu_routing_and_placement() -> None:
    with_copies = Parallel(2, Placement.linear(8, 2).with_copies({0: (1,)}))
    identities = [
        make_identity(),
        make_identity(machine=replace(H200, name="NVIDIA H100")),
        make_identity(machine=replace(H200, arch=(10, 0))),
        make_identity(routing="zipf"),
        make_identity(replicated=True),
        make_identity(replace(BASE, parallel=Parallel(2))),
        make_identity(replace(BASE, parallel=with_copies)),
    ]
    assert len({cache_keys.file_stem(key) for key in identities}) == len(identities)


def set_version(name: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def change(patch: pytest.MonkeyPatch, _: Path) -> None:
        get_version = cache_keys._version
        patch.setattr(cache_keys, "_version", lambda n: "9.9" if n == name else get_version(n))

    return change


def set_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "tuned.json").write_text("{}")
    patch.setattr(
        cache_keys, "read_settings", lambda: replace(read_unpatched_settings(), config_dir=folder)
    )


def read_unpatched_settings() -> Any:
    from modular_kernel.settings import read_settings

    return read_settings()


VERSION_CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Path], None]] = {
    "modular-kernel": set_version("modular-kernel"),
    "triton": set_version("triton"),
    "torch": lambda patch, _: patch.setattr(torch, "__version__", "9.9"),
    "cuda": lambda patch, _: patch.setattr(torch.version, "cuda", "99.9"),
    "parts": lambda patch, _: patch.setattr(
        cache_keys, "_get_part_versions", lambda: (("Part", "mine", "2"),)
    ),
    "packages": set_version("triton"),
    "tuned": set_folder,
}


@pytest.mark.parametrize("name", VERSION_CHANGES)
def test_every_software_version_is_part_of_the_key(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert set(VERSION_CHANGES) == set(cache_keys.version_fields(H200))
    before = cache_keys.version_fields(H200)
    VERSION_CHANGES[name](monkeypatch, tmp_path)
    after = cache_keys.version_fields(H200)
    assert after[name] != before[name]
    # Both of these fields contain the version of Triton, so they change together.
    with_triton = {"triton", "packages"}
    also_changed = with_triton - {name} if name in with_triton else set()
    assert {n for n in before if before[n] != after[n]} - also_changed == {name}


def test_packages_and_thread_counts_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    with_flashinfer = replace(H200, packages=H200.packages | {"flashinfer"})
    assert cache_keys.version_fields(with_flashinfer) != cache_keys.version_fields(H200)
    before = cache_keys.version_fields(Machine())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert cache_keys.version_fields(Machine())["threads"] == "77" != before["threads"]


def test_the_cache_file_name_depends_on_every_identity_field(tmp_path: Path) -> None:
    """Versions are not part of the name, because the records in the file contain them."""
    key = make_identity()
    paths = {Cache(tmp_path, {**key, name: "other"}, {}).path for name in key}
    assert len(paths | {Cache(tmp_path, key, {}).path}) == len(key) + 1


# --------------------------------------------------------------------------------- config files

CONFIG_KEY_CHANGES: dict[str, Any] = {
    "experts": 9,
    "intermediate": 33,
    "device": "NVIDIA_H100",
    "dtype": "int8_w8a8",
    "block_shape": (64, 128),
    "per_channel": True,
    "prepared": True,
    "down": True,
}


def test_tile_file_paths_depend_on_every_field_and_the_triton_version() -> None:
    """The architecture is not a field of the key, because the name of the device implies it."""
    assert {field.name for field in fields(ConfigKey)} == set(CONFIG_KEY_CHANGES)
    base = ConfigKey(8, 32, "NVIDIA_H200", "fp8_w8a8", (128, 128))
    names = {replace(base, **{name: value}).file_name for name, value in CONFIG_KEY_CHANGES.items()}
    assert len(names | {base.file_name}) == len(CONFIG_KEY_CHANGES) + 1
    versions = ("3.6.0", "3.6.1", "3.7.0", "4.6.0")
    assert len({triton_subfolder(version) for version in versions}) == len(versions)


def test_cached_tiles_depend_on_every_input_of_the_choice() -> None:
    """The inputs are the problem, the number of tokens, the device, the override, the paths that
    the caller supports, and whether weights are prepared.
    """
    large = replace(BASE, hidden=512, intermediate=512)
    hopper, ampere = Device("one", tma=True), Device("two", shared=101_376, warpgroups=False)
    all_paths = ("aligned", "grouped_tma")

    def choose(problem: Problem, tokens: int, paths: tuple[str, ...] = all_paths) -> Any:
        return tiles.choose_config(problem, tokens, paths)

    with tiles.on_device(hopper):
        config_4096, config_4 = choose(large, 4096), choose(large, 4)
        assert config_4096.path == "grouped_tma"
        assert config_4.path == "aligned"
        assert choose(large, 4096, ("aligned",)).path == "aligned"
        assert choose(replace(large, dtype=torch.float32), 4096) != config_4096
        with tiles.override_config(config_4):
            assert choose(large, 4096) == config_4
        assert choose(large, 4096) == config_4096
        with tiles.on_device(ampere):
            assert choose(large, 4096).path == "aligned"
        assert choose(large, 4096) == config_4096
        packed = replace(large, dtype=torch.bfloat16, quant="mxfp4_w4a16")
        tokens, paths = 20 * packed.experts // packed.top_k, ("aligned", "grouped_w4")
        chosen_paths = [
            tiles.choose_config(packed, tokens, paths, prepared=prepared).path
            for prepared in (False, True, False)
        ]
        assert chosen_paths == ["aligned", "grouped_w4", "aligned"]


# ------------------------------------------------------------------------------------- replay


def get_signature(
    x: torch.Tensor, weights: ExpertWeights, cache: recording.CheckedWeightsCache
) -> Any:
    return recording.get_signature_and_pointers((x,), cache.add(weights))[0]


def test_signatures_differ_in_every_property_of_tensors() -> None:
    """A signature has the shape, strides, dtype, device and alignment of every tensor."""
    buffer = torch.zeros(4096, dtype=torch.bfloat16)
    x, w1, w2 = buffer[:64].view(4, 16), torch.zeros(2, 8, 16), torch.zeros(2, 16, 4)
    weights = ExpertWeights(w1=w1, w2=w2)
    tensors = {
        "shape": buffer[:48].view(3, 16),
        "strides": buffer[:64].view(16, 4).t(),
        "dtype": x.view(torch.float16),
        "device": x.to("meta"),
        "alignment": buffer[1:65].view(4, 16),
    }
    changed_weights = {
        "shape of weights": ExpertWeights(w1=torch.zeros(3, 8, 16), w2=w2),
        "strides of weights": ExpertWeights(w1=torch.zeros(2, 16, 8).mT, w2=w2),
        "dtype of weights": ExpertWeights(w1=w1.to(torch.bfloat16), w2=w2),
        "one more": ExpertWeights(w1=w1, w2=w2, b1=torch.zeros(2, 8)),
        "one for two": ExpertWeights(w1=w1, w2=w1),
        "alignment of weights": ExpertWeights(w1=torch.zeros(257)[1:].view(2, 8, 16), w2=w2),
    }
    cache = recording.CheckedWeightsCache()
    copied_weights = ExpertWeights(w1=w1.clone(), w2=w2.clone())
    copied_x = buffer[64:128].view(4, 16)
    assert get_signature(x, weights, cache) == get_signature(copied_x, copied_weights, cache)
    signatures = {name: get_signature(tensor, weights, cache) for name, tensor in tensors.items()}
    signatures |= {name: get_signature(x, w, cache) for name, w in changed_weights.items()}
    signatures["unchanged"] = get_signature(x, weights, cache)
    assert len(set(signatures.values())) == len(signatures)


def make_cache_with_weights() -> tuple[recording.CheckedWeightsCache, ExpertWeights]:
    cache = recording.CheckedWeightsCache()
    weights = ExpertWeights(w1=torch.zeros(2, 8, 16), w2=torch.zeros(2, 16, 4))
    cache.add(weights)
    return cache, weights


@pytest.mark.parametrize(
    "data",
    [
        torch.ones(2, 8, 16),
        torch.zeros(2, 8, 8),
        torch.zeros(2, 16, 8).mT,
        torch.zeros(2, 8, 16, dtype=torch.bfloat16),
    ],
    ids=["memory", "shape", "strides", "dtype"],
)
def test_weights_are_recognized_while_their_memory_is_the_same(data: torch.Tensor) -> None:
    cache, weights = make_cache_with_weights()
    assert cache.lookup(weights, torch.device("cpu")) is not None
    weights.w1.data = data
    assert cache.lookup(weights, torch.device("cpu")) is None


def test_weights_are_recognized_by_memory_and_device() -> None:
    cache, weights = make_cache_with_weights()
    assert cache.lookup(weights, torch.device("meta")) is None
    assert cache.lookup(replace(weights), torch.device("meta")) is None
    assert cache.lookup(replace(weights), torch.device("cpu")) is not None
    assert cache.lookup(replace(weights, w1=weights.w1.clone()), torch.device("cpu")) is None
    assert deepcopy(cache).lookup(weights, torch.device("cpu")) is None
    weights.w2.untyped_storage().resize_(0)
    assert cache.lookup(weights, torch.device("cpu")) is None
    assert cache.lookup(replace(weights), torch.device("cpu")) is None


def test_the_replayer_is_rebuilt_for_another_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replayer includes Triton's cuda.h, whose path is the same in every version."""
    triton = pytest.importorskip("triton")
    from modular_kernel.replay.launch import build, cuda_replay

    names: list[str] = []
    monkeypatch.setattr(build, "find_cached", lambda name, _: names.append(name) or Path("cached"))
    monkeypatch.setattr(build, "_import_extension", lambda name, path: name)
    monkeypatch.setattr(cuda_replay, "_build_module", cuda_replay._build_module.__wrapped__)
    for version in ("3.6.0", "3.9.0", "3.6.0"):
        monkeypatch.setattr(triton, "__version__", version)
        assert cuda_replay.get_module() == "modular_kernel_replay"
    assert names[0] == names[2] != names[1]
