"""FusedMoE.from_config takes sizes, scheme and router from the checkpoint. FusedMoE.load refuses a
checkpoint that contradicts the layer.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from modular_kernel.checkpoints.loading import load_experts
from modular_kernel.errors import ConfigurationError, StateError, UnsupportedError
from modular_kernel.layers.ep_moe import EPMoE
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.router import Router, RouterSpec
from modular_kernel.models.router_config import RULES
from modular_kernel.ops.route import RouterTensors, route
from modular_kernel.testing.checkpoints.samples import FAMILIES, Sample, write

E, H, I, K, T = 4, 128, 256, 2, 6  # noqa: E741 (intermediate)
MAX_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
FAMILIES_WITH_ROUTERS = sorted(FAMILIES.keys() & RULES.keys())


def add_config_entries(folder: Path, **entries: Any) -> None:
    """Add entries to the section of config.json that describes the layer."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    section = config.get("text_config", config)
    section.update(entries)
    path.write_text(json.dumps(config))


def compute_exact_output(
    sample: Sample, x: torch.Tensor, spec: RouterSpec, logits: torch.Tensor, bias
) -> Any:
    routing = route(logits, spec, RouterTensors(bias)).routing
    return sample.expected_output(x, routing.topk_weights_TK, routing.topk_ids_TK.long())


def is_close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((got.double() - expected).norm() / expected.norm()) < MAX_RELATIVE_ERROR[got.dtype]


@pytest.mark.parametrize("has_only_config", [False, True])
@pytest.mark.parametrize("family", FAMILIES_WITH_ROUTERS)
def test_from_config_takes_sizes_and_router_from_the_checkpoint(
    family: str, has_only_config: bool, tmp_path
) -> None:
    sample = write(tmp_path / "whole", family, "fp32", intermediate=I, layers=(1,))
    add_config_entries(tmp_path / "whole", n_group=2, topk_group=1)
    source = tmp_path / "whole"
    if has_only_config:
        source = tmp_path / "config_only"
        source.mkdir()
        shutil.copy(tmp_path / "whole" / "config.json", source)
    layer = FusedMoE.from_config(source, 1, params_dtype="float32", experts="TorchExperts")
    assert (layer.num_experts, layer.problem.hidden, layer.problem.top_k) == (E, H, K)
    assert (layer.layer_id, layer.problem.routed_scaling_factor) == (1, sample.scaling)
    logits, bias = torch.randn(T, E, generator=torch.Generator().manual_seed(3)), None
    x = sample.inputs(T)[0]
    with pytest.raises(StateError, match="nothing loaded into"):
        layer(x.float(), logits)
    layer.load(tmp_path / "whole")
    if layer.router.selection_bias:
        with pytest.raises(StateError, match="nothing loaded into selection_bias"):
            layer(x.float(), logits)
        bias = torch.linspace(-0.2, 0.2, E)
        layer.selection_bias.copy_(bias)
    loaded = load_experts(tmp_path / "whole", 1)
    assert layer.router == loaded.router
    assert is_close(
        layer(x.float(), logits), compute_exact_output(sample, x, loaded.router, logits, bias)
    )


def test_rank_outputs_of_a_quantized_checkpoint_sum_to_the_layer(tmp_path) -> None:
    sample = write(tmp_path, "qwen3_moe", "deepseek fp8", intermediate=I)
    add_config_entries(tmp_path, norm_topk_prob=True)
    logits, (x, *_) = torch.randn(T, E), sample.inputs(T)
    total = torch.zeros(T, H, dtype=torch.float64)
    for ep in range(2):
        for tp in range(2):
            parallel = LayerParallel(ep=(ep, 2), tp=(tp, 2))
            layer = FusedMoE.from_config(tmp_path, 0, parallel=parallel)
            layer.load(tmp_path)
            total += layer(x.bfloat16(), logits).double()
    expected = compute_exact_output(sample, x, RouterSpec(K, renormalize=True), logits, None)
    assert float((total - expected).norm() / expected.norm()) < 8e-2


def test_from_config_accepts_a_router_or_top_k(tmp_path) -> None:
    write(tmp_path, "deepseek_v4", "fp32", intermediate=I)
    with pytest.raises(ConfigurationError, match="router: got model_type 'deepseek_v4', whose"):
        FusedMoE.from_config(tmp_path)
    router = Router(RouterSpec(K), H, E)
    assert FusedMoE.from_config(tmp_path, router=router).router is router
    layer = FusedMoE.from_config(tmp_path, top_k=K)
    assert layer.router is None
    assert layer.layer_id is None


def test_options_that_the_checkpoint_determines_are_refused(tmp_path) -> None:
    write(tmp_path, "mixtral", "fp32", intermediate=I)
    for option in ({"activation": "gelu"}, {"routed_scaling_factor": 1.0}, {"hidden_size": H}):
        with pytest.raises(ConfigurationError, match=r"option of from_config: got .*=.*, need"):
            FusedMoE.from_config(tmp_path, **option)
    with pytest.raises(UnsupportedError, match="from_config of EPMoE"):
        EPMoE.from_config(tmp_path)
    add_config_entries(tmp_path, model_type="no_such_model")
    with pytest.raises(ConfigurationError, match="no_such_model"):
        FusedMoE.from_config(tmp_path)
    with pytest.raises(ConfigurationError, match="checkpoint: got 3"):
        FusedMoE.from_config(3)


# ------------------------------------------------------------------------------------------ load


def make_layer(router: RouterSpec | Router | None, **options: Any) -> FusedMoE:
    defaults = {"top_k": K if router is None else None, "params_dtype": torch.float32}
    return FusedMoE(E, H, I, 0, router=router, **defaults | options)


def test_load_refuses_a_router_that_differs_from_the_checkpoint(tmp_path) -> None:
    write(tmp_path, "qwen3_moe", "fp32", intermediate=I)
    add_config_entries(tmp_path, norm_topk_prob=False)
    renormalized = RouterSpec(K, renormalize=True)
    match = "router of the checkpoint: got renormalize=False, need renormalize=True, as in"
    for router in (renormalized, Router(renormalized, H, E)):
        layer = make_layer(router)
        with pytest.raises(ConfigurationError, match=match):
            layer.load(tmp_path)
        assert bool(layer.w13_weight.isnan().all())  # nothing was loaded
    for router in (RouterSpec(K), None):
        make_layer(router).load(tmp_path)
    add_config_entries(tmp_path, norm_topk_prob=True)
    make_layer(renormalized).load(tmp_path)


def test_load_compares_the_options_of_deepseek_routers(tmp_path) -> None:
    sample = write(tmp_path, "deepseek_v3", "fp32", intermediate=I)
    add_config_entries(tmp_path, n_group=2, topk_group=1)
    router_options = {"groups": 2, "topk_groups": 1, "selection_bias": True, "renormalize": True}
    options = {"selection_bias": torch.zeros(E), "routed_scaling_factor": sample.scaling}
    # The checkpoint has eps=1e-20, which `load` does not compare.
    make_layer(RouterSpec(K, "sigmoid", **router_options), **options).load(tmp_path)
    for changed_options, match in (
        ({"group_score": "max"}, "got group_score='top2', need group_score='max'"),
        ({"topk_groups": 2}, "got groups=2, topk_groups=1, need groups=2, topk_groups=2"),
        ({"renormalize": False}, "renormalize=True, need renormalize=False"),
    ):
        layer = make_layer(RouterSpec(K, "sigmoid", **router_options | changed_options), **options)
        with pytest.raises(ConfigurationError, match=f"router of the checkpoint: .*{match}"):
            layer.load(tmp_path)
    layer = make_layer(RouterSpec(K, "sigmoid", **router_options), selection_bias=torch.zeros(E))
    with pytest.raises(ConfigurationError, match=r"routed_scaling_factor of .*: got 2\.5"):
        layer.load(tmp_path)


def test_load_does_not_compare_unknown_routers(tmp_path) -> None:
    sample = write(tmp_path, "deepseek_v4", "fp32", intermediate=I)
    options = {"activation": load_experts(tmp_path, 0).problem_fields["activation"]}
    options |= {"routed_scaling_factor": sample.scaling}
    make_layer(RouterSpec(K, "sqrtsoftplus"), **options).load(tmp_path)
    assert load_experts(tmp_path, 0).router is None
