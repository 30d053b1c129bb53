"""fused_experts and fused_moe, called with the flags and tensors of vLLM and SGLang."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_experts_calls import (
    BASE,
    DEVICES,
    E,
    H,
    I,
    K,
    T,
    assert_close,
    call_fused_experts,
    make_layer,
)

from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    LayoutError,
    ModularKernelError,
    ShapeError,
    UnsupportedError,
    WeightsError,
)
from modular_kernel.integrations.fused_moe import (
    MoeRunnerConfig,
    fused_experts,
    fused_moe,
    inplace_fused_experts,
    outplace_fused_experts,
    quant_of,
)
from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import Combine
from modular_kernel.tensors import ExpertWeights, Routing

# Flags of vLLM and SGLang, and the scheme that they select.
FLAGS_AND_SCHEMES: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "none"),
    ({"use_fp8_w8a8": True}, "fp8_w8a8_tensor"),
    ({"use_fp8_w8a8": True}, "fp8_w8a8_tensor:static=true"),
    ({"use_fp8_w8a8": True, "per_channel_quant": True}, "fp8_w8a8_channel"),
    ({"use_fp8_w8a8": True, "block_shape": [32, 32]}, "fp8_w8a8_block:block=32x32"),
    ({"use_int8_w8a8": True, "per_channel_quant": True}, "int8_w8a8_channel"),
    ({"use_int8_w8a8": True, "block_shape": [128, 128]}, "int8_w8a8_block"),
    ({"use_int8_w8a16": True}, "int8_w8a16_channel"),
    ({"use_int8_w8a16": True, "block_shape": [0, 32]}, "int8_w8a16_group:group=32"),
    ({"use_int8_w8a16": True, "block_shape": [0, 32]},
     "int8_w8a16_group:group=32,zero_points=true"),
    ({"use_int4_w4a16": True, "block_shape": [0, 32]}, "int4_w4a16_group:group=32"),
    ({"use_int4_w4a16": True, "block_shape": [0, 32]},
     "int4_w4a16_group:group=32,zero_points=true"),
)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("flags", "quant"), FLAGS_AND_SCHEMES, ids=[quant for _, quant in FLAGS_AND_SCHEMES]
)
def test_flags_select_a_scheme(flags: dict[str, Any], quant: str, device: str) -> None:
    """The call runs on the device of the tensors, also on the CPU of a machine with a GPU."""
    problem = replace(BASE, quant=quant)
    x_TH, weights, routing = make_layer(problem, device)
    x_before = x_TH.clone()
    got = call_fused_experts(x_TH, weights, routing, **flags)
    assert_close(
        got, float64_reference(x_TH, weights, routing, problem), 0.1 if "w8a8" in quant else 1e-5
    )
    assert torch.equal(x_TH, x_before)


def test_scales_may_have_the_shapes_of_other_libraries() -> None:
    problem = replace(BASE, quant="fp8_w8a8_channel")
    x_TH, weights, routing = make_layer(problem)
    flags = {"use_fp8_w8a8": True, "per_channel_quant": True}
    scales_with_extra_dim = {
        "w1_scale": weights.w1_scale[..., None],
        "w2_scale": weights.w2_scale[..., None],
    }
    assert torch.equal(
        call_fused_experts(x_TH, weights, routing, **flags, **scales_with_extra_dim),
        call_fused_experts(x_TH, weights, routing, **flags),
    )
    x_TH, weights, routing = make_layer(replace(BASE, quant="fp8_w8a8_tensor:static=true"))
    scalars = {"a1_scale": torch.tensor(0.01), "a2_scale": torch.tensor(0.02)}
    assert torch.equal(
        call_fused_experts(x_TH, weights, routing, use_fp8_w8a8=True, **scalars),
        call_fused_experts(x_TH, weights, routing, use_fp8_w8a8=True),
    )


CONFIGS: tuple[tuple[MoeRunnerConfig, dict[str, Any]], ...] = (
    (MoeRunnerConfig(num_experts=E, top_k=K), {}),
    (MoeRunnerConfig(activation="gelu"), {"activation": "gelu"}),
    (MoeRunnerConfig(activation="gelu_tanh"), {"activation": "gelu_tanh"}),
    (MoeRunnerConfig(activation="relu2"), {"activation": "relu2"}),
    (MoeRunnerConfig(gemm1_alpha=1.5, gemm1_clamp_limit=0.5),
     {"activation": "swiglu_oai:alpha=1.5,limit=0.5,interleaved=true"}),
    (MoeRunnerConfig(gemm1_clamp_limit=0.5), {"activation": "swiglu_clamp_after:limit=0.5"}),
    (MoeRunnerConfig(routed_scaling_factor=2.5), {"routed_scaling_factor": 2.5}),
    (MoeRunnerConfig(apply_router_weight_on_input=True), {"apply_router_weight_on_input": True}),
    (MoeRunnerConfig(no_combine=True), {"combine": Combine.TOPK_UNWEIGHTED}),
    (MoeRunnerConfig(no_combine=True, no_combine_keep_router_weight=True),
     {"combine": Combine.TOPK_WEIGHTED}),
)  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("config", "fields"), CONFIGS, ids=lambda value: str(value)[:60])
def test_every_field_of_the_config_has_an_effect(
    config: MoeRunnerConfig, fields: dict[str, Any], bias: bool
) -> None:
    problem = replace(BASE, bias=bias, **fields)
    x_TH, weights, routing = make_layer(problem)
    got = call_fused_experts(x_TH, weights, routing, config, inplace=False)
    assert_close(got, float64_reference(x_TH, weights, routing, problem), 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1, 16, 17])
def test_outputs_are_right_for_any_number_of_tokens(tokens: int, device: str) -> None:
    problem = BASE.with_tokens(tokens)
    x_TH, weights, routing = make_layer(problem, device)
    got = call_fused_experts(x_TH, weights, routing)
    assert got.device == x_TH.device
    assert got.shape == (tokens, H)
    if tokens:
        assert_close(got, float64_reference(x_TH, weights, routing, problem), 1e-5)


def test_inplace_returns_the_input_tensor() -> None:
    x_TH, weights, routing = make_layer(BASE)
    expected, address = call_fused_experts(x_TH, weights, routing), x_TH.data_ptr()
    got = call_fused_experts(x_TH, weights, routing, MoeRunnerConfig(inplace=True))
    assert got is x_TH
    assert got.data_ptr() == address
    assert torch.equal(got, expected)


def test_experts_of_other_ranks_are_skipped() -> None:
    problem = replace(BASE, local_experts=2, expert_map=True)
    x_TH, weights, routing = make_layer(BASE)
    expert_map = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    local_weights = replace(
        weights, w1=weights.w1[[3, 1]], w2=weights.w2[[3, 1]], expert_map=expert_map
    )
    got = call_fused_experts(
        x_TH, local_weights, routing, MoeRunnerConfig(num_experts=E), inplace=False
    )
    assert_close(got, float64_reference(x_TH, local_weights, routing, problem), 1e-5)


@pytest.mark.parametrize("renormalize", [False, True])
def test_fused_moe_routes_by_softmax(renormalize: bool) -> None:
    x_TH, weights, _ = make_layer(BASE)
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(4))
    config = MoeRunnerConfig(top_k=K, inplace=False)
    got = fused_moe(x_TH, weights.w1, weights.w2, logits, config, renormalize=renormalize)
    scores = logits.double().softmax(-1)
    values, ids = scores.topk(K)
    values = values / values.sum(-1, keepdim=True) if renormalize else values
    assert_close(got, float64_reference(x_TH, weights, Routing(values.float(), ids), BASE), 1e-5)
    for top_k in (None, 0, E + 1):
        with pytest.raises(ConfigurationError, match=f"top_k: got {top_k}, need 1 to {E}"):
            fused_moe(x_TH, weights.w1, weights.w2, logits, MoeRunnerConfig(top_k=top_k))


@pytest.mark.parametrize("top_k", [1, 16, 22, 32])
def test_fused_moe_selects_up_to_32_experts(top_k: int) -> None:
    problem = replace(BASE, experts=40, top_k=top_k)
    x_TH, weights, _ = make_layer(problem)
    logits = torch.randn(T, 40, generator=torch.Generator().manual_seed(4))
    config = MoeRunnerConfig(top_k=top_k, inplace=False)
    got = fused_moe(x_TH, weights.w1, weights.w2, logits, config, renormalize=True)
    values, ids = logits.double().softmax(-1).topk(top_k)
    routing = Routing((values / values.sum(-1, keepdim=True)).float(), ids)
    assert_close(got, float64_reference(x_TH, weights, routing, problem), 1e-5)


def test_fused_moe_refuses_more_than_32_experts_per_token() -> None:
    x_TH, weights, _ = make_layer(replace(BASE, experts=40))
    with pytest.raises(ConfigurationError, match=r"got 33, need .*32"):
        fused_moe(x_TH, weights.w1, weights.w2, torch.randn(T, 40), MoeRunnerConfig(top_k=33))


def test_torch_compile_does_not_break_the_graph() -> None:
    x_TH, weights, routing = make_layer(BASE)
    expected = call_fused_experts(x_TH, weights, routing) * 2

    def double(x_TH: torch.Tensor, inplace: bool, no_combine: bool) -> torch.Tensor:
        config = MoeRunnerConfig(inplace=inplace, no_combine=no_combine)
        topk = (routing.topk_weights_TK, routing.topk_ids_TK, None)
        return fused_experts(x_TH, weights.w1, weights.w2, topk, config) * 2

    compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x_TH, False, False), expected)
    assert compiled(x_TH, False, True).shape == (T, K, H)
    overwritten = x_TH.clone()
    assert torch.equal(compiled(overwritten, True, False), expected)
    assert torch.equal(overwritten, expected / 2)


@pytest.mark.parametrize("combine", [combine.value for combine in Combine])
def test_operators_agree_with_their_schemas(combine: str) -> None:
    x_TH, weights, routing = make_layer(BASE)
    tensors = (x_TH, weights.w1, weights.w2, routing.topk_weights_TK, routing.topk_ids_TK)
    arguments = (*tensors, [None] * 9, "none", "silu", False, 1.0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(outplace_fused_experts, (*arguments, combine), test_utils=checks)
    torch.library.opcheck(inplace_fused_experts, arguments, test_utils=checks)


# ------------------------------------------------------------------------------------ bad input

BAD_FLAGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"use_fp8_w8a8": True, "use_int8_w8a8": True}, "got fp8_w8a8 and int8_w8a8, need one use_"),
    ({"block_shape": [128, 128]}, "got block_shape, need a use_"),
    ({"per_channel_quant": True}, "got per_channel_quant, need a use_"),
    ({"use_int8_w8a8": True}, "int8_w8a8: got one scale per tensor, need per_channel_quant"),
    ({"use_int4_w4a16": True}, "int4_w4a16: got no block_shape, need block_shape=.0, group."),
    ({"use_int4_w4a16": True, "block_shape": [128, 128]}, "got .128, 128., need .0, group."),
    ({"use_fp8_w8a8": True, "block_shape": [0, 128]}, "got .0, 128., need .bn, bk., both"),
    ({"use_fp8_w8a8": True, "block_shape": [128]}, "got .128., need .bn, bk., or"),
    ({"use_fp8_w8a8": True, "block_shape": []}, r"block_shape: got \[\], need \[bn, bk\], or"),
    ({"use_int8_w8a16": True, "block_shape": ()}, r"block_shape: got \[\], need \[bn, bk\], or"),
    ({"block_shape": []}, r"block_shape: got \[\], need \[bn, bk\], or"),
    ({"use_fp8_w8a8": True, "block_shape": [-128, 128]}, "got block=-128x128"),
    ({"use_fp8_w8a8": True, "block_shape": [64, 64], "per_channel_quant": True}, "only one of"),
)


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_invalid_flags_are_refused(flags: dict[str, Any], message: str) -> None:
    x_TH, weights, routing = make_layer(BASE)
    with pytest.raises(ConfigurationError, match=message):
        call_fused_experts(x_TH, weights, routing, **flags)


BAD_CONFIGS = (
    (MoeRunnerConfig(gemm1_alpha=1.7), ConfigurationError, "swiglu_oai limit: got None"),
    (MoeRunnerConfig(activation="gelu", gemm1_clamp_limit=7.0), ConfigurationError, "need silu"),
    (
        MoeRunnerConfig(inplace=True, no_combine=True),
        ConfigurationError,
        "inplace: got True with no_comb",
    ),
    (MoeRunnerConfig(num_experts=E + 1), ShapeError, "w1: got 4 experts, need num_experts = 5"),
    (MoeRunnerConfig(top_k=3), ShapeError, r"topk_ids: got \(5, 2\), need .* = 3"),
    (MoeRunnerConfig(activation="tanh"), ConfigurationError, "activation: got tanh"),
)


@pytest.mark.parametrize(("config", "error", "message"), BAD_CONFIGS)
def test_invalid_configs_are_refused(
    config: MoeRunnerConfig, error: type[Exception], message: str
) -> None:
    x_TH, weights, routing = make_layer(BASE)
    with pytest.raises(error, match=message):
        call_fused_experts(x_TH, weights, routing, config)


def test_invalid_tensors_are_refused() -> None:
    x_TH, weights, routing = make_layer(BASE)
    cases: tuple[tuple[Any, ...], ...] = (
        ((x_TH[:, :63], weights, routing), ShapeError, r"x: got \(5, 63\), need .* = 64, as in"),
        ((x_TH[0], weights, routing), ShapeError, r"x: got \(64,\)"),
        ((x_TH, replace(weights, w1=weights.w1[0]), routing), ShapeError, "w1: got .*need 3 dim"),
        ((x_TH, replace(weights, w2=weights.w2.mT), routing), ShapeError, r"w2: got \(4, 32, 64"),
        ((x_TH, replace(weights, w2=weights.w2[:3]), routing), ShapeError, "w2: got .* E = 4"),
        ((x_TH, replace(weights, w2=weights.w2[..., :30]), routing), ShapeError,
         "w1 and w2: got .* N = 64 and I = 30, need N = 2I"),
        ((x_TH, replace(weights, w1=weights.w1[..., :60]), routing), ShapeError,
         r"w1: got \(4, 64, 60\), need .* H = 64, as in x"),
        ((x_TH.to(torch.int8), weights, routing), ModularKernelError, "int8"),
        ((x_TH, weights, replace(routing, topk_weights_TK=routing.topk_weights_TK.double())),
         DtypeError, "topk_weights: got float64"),
        ((x_TH, replace(weights, w1_scale=torch.ones(E)), routing), WeightsError, "quant=none"),
        ((x_TH, replace(weights, b1=torch.ones(E, 2 * I)), routing), WeightsError, "b2: got None"),
    )  # fmt: skip
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            call_fused_experts(*arguments)
    ids_TK = routing.topk_ids_TK
    for invalid_topk in (None, 5, (), (None, ids_TK), (ids_TK,), (1, 2), "ab", ids_TK):
        with pytest.raises(ConfigurationError, match=r"topk_output: got .*need \(weights"):
            fused_experts(x_TH, weights.w1, weights.w2, invalid_topk)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="w2: got NoneType, need a tensor"):
        fused_experts(x_TH, weights.w1, None, (ids_TK.float(), ids_TK))  # type: ignore[arg-type]


def test_flags_are_read_without_tensors() -> None:
    assert quant_of({"use_int4_w4a16": True, "block_shape": (0, 64)}) == "int4_w4a16_group:group=64"


@pytest.mark.parametrize("argument", ["x", "w1", "w2", "topk_weights", "b1"])
def test_gradients_are_refused_before_a_call(argument: str) -> None:
    """The operator has no backward. An error in the backward pass would be too late for a caller to
    use another implementation.
    """
    x_TH, weights, routing = make_layer(replace(BASE, bias=True))
    topk = (routing.topk_weights_TK, routing.topk_ids_TK, None)
    tensors = {"x": x_TH, "w1": weights.w1, "w2": weights.w2, "topk_weights": topk[0]}
    tensors |= {"b1": weights.b1, "b2": weights.b2}
    tensors[argument].requires_grad_()

    def call() -> torch.Tensor:
        return fused_experts(x_TH, weights.w1, weights.w2, topk, b1=weights.b1, b2=weights.b2)

    with pytest.raises(UnsupportedError, match=f"gradients: got {argument} that require grad"):
        call()
    with torch.no_grad():
        call()
    with torch.inference_mode():
        call()


@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"no_combine": True}], ids=str)
def test_meta_tensors_return_a_meta_output(options: dict[str, Any]) -> None:
    x, w1, w2 = (torch.empty(s, device="meta") for s in ((4, 64), (4, 64, 64), (4, 64, 32)))
    topk = torch.empty(4, 2, device="meta"), torch.empty(4, 2, dtype=torch.int32, device="meta")
    output = fused_experts(x, w1, w2, topk, **options)
    assert output.is_meta
    assert output.shape == ((4, 2, 64) if "no_combine" in options else (4, 64))


# Flags of calls without scales, with copied scales, and with scales that are read in place.
FLAGS_BY_SCALE_USE = [FLAGS_AND_SCHEMES[0], FLAGS_AND_SCHEMES[3], FLAGS_AND_SCHEMES[10]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_inference", [False, True], ids=["tracked", "inference tensors"])
@pytest.mark.parametrize(
    ("flags", "quant"), FLAGS_BY_SCALE_USE, ids=[quant for _, quant in FLAGS_BY_SCALE_USE]
)
def test_calls_use_written_and_replaced_weights(
    flags: dict[str, Any], quant: str, is_inference: bool, device: str
) -> None:
    """A call must not use cached checks of old weights, nor old copies of scales."""
    with torch.inference_mode(is_inference):
        x_TH, weights, routing = make_layer(replace(BASE, quant=quant), device)
        if weights.w1_scale is not None and quant.endswith("_channel"):
            weights = replace(weights, w1_scale=weights.w1_scale[..., None])
        names = [name for name, tensor in vars(weights).items() if tensor is not None]

        def equals_call_with_copies() -> bool:
            copies = {name: getattr(weights, name).clone() for name in names}
            expected = call_fused_experts(x_TH, replace(weights, **copies), routing, **flags)
            return torch.equal(call_fused_experts(x_TH, weights, routing, **flags), expected)

        output_before = call_fused_experts(x_TH, weights, routing, **flags)
        for name in names:
            tensor = getattr(weights, name)
            tensor.copy_(tensor.flip(0).clone())
            assert equals_call_with_copies(), f"{name} written"
            weights = replace(weights, **{name: tensor.roll(1, 0)})
            assert equals_call_with_copies(), f"{name} replaced"
        assert not torch.equal(call_fused_experts(x_TH, weights, routing, **flags), output_before)


def test_calls_use_writes_that_torch_does_not_track() -> None:
    """Writes through `.data` are not tracked. The scale is expanded, so kernels get a copy."""
    problem = replace(BASE, quant="fp8_w8a8_channel")
    x_TH, weights, routing = make_layer(problem)
    scale = torch.full((E, 1), 0.01)
    weights = replace(weights, w1_scale=scale.expand(weights.w1_scale.shape))
    flags = {"use_fp8_w8a8": True, "per_channel_quant": True}
    output_before = call_fused_experts(x_TH, weights, routing, **flags)
    scale.data.mul_(2)
    after = call_fused_experts(x_TH, weights, routing, **flags)
    assert not torch.equal(after, output_before)
    assert_close(after, float64_reference(x_TH, weights, routing, problem), 0.1)


def test_calls_keep_no_memory_alive() -> None:
    x_TH, weights, routing = make_layer(replace(BASE, quant="int8_w8a8_channel"))
    call_fused_experts(x_TH, weights, routing, use_int8_w8a8=True, per_channel_quant=True)
    storages = [weakref.ref(t.untyped_storage()) for t in vars(weights).values() if t is not None]
    w1 = weights.w1
    del weights
    gc.collect()
    assert [storage() is None for storage in storages] == [False, True, True, True]
    assert w1.numel()


def test_parameters_of_a_call_can_be_swapped() -> None:
    """torch.utils.swap_tensors refuses tensors with weak references."""
    x_TH, weights, routing = make_layer(BASE)
    module = torch.nn.Module()
    module.w1 = torch.nn.Parameter(weights.w1, requires_grad=False)
    module.w2 = torch.nn.Parameter(weights.w2, requires_grad=False)
    call_fused_experts(x_TH, ExpertWeights(module.w1, module.w2), routing)
    doubled = {name: parameter * 2 for name, parameter in module.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.load_state_dict(doubled)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    expected = call_fused_experts(x_TH, ExpertWeights(doubled["w1"], doubled["w2"]), routing)
    assert torch.equal(
        call_fused_experts(x_TH, ExpertWeights(module.w1, module.w2), routing), expected
    )


def copy_and_free(tensor: torch.Tensor) -> torch.Tensor:
    freed = tensor.clone()
    freed.untyped_storage().resize_(0)
    return freed


BAD_TENSORS = {
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "sparse": lambda t: t.float().to_sparse(),
    "csr": lambda t: torch.ones(t.shape).to_sparse_csr(),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "negated": lambda t: torch.complex(torch.zeros(t.shape), t.float()).conj().imag,
    "freed": copy_and_free,
}


@pytest.mark.parametrize("field", ["w1", "w2", "w1_scale", "w2_scale"])
@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_weights_that_are_not_dense_are_refused(kind: str, field: str) -> None:
    """They are refused also after a call with dense weights, whose checks are cached."""
    x_TH, weights, routing = make_layer(replace(BASE, quant="int8_w8a8_channel"))
    scales_with_extra_dim = {n: getattr(weights, n)[..., None] for n in ("w1_scale", "w2_scale")}
    weights = replace(weights, **scales_with_extra_dim)
    flags = {"use_int8_w8a8": True, "per_channel_quant": True}
    call_fused_experts(x_TH, weights, routing, **flags)
    invalid = replace(weights, **{field: BAD_TENSORS[kind](getattr(weights, field))})
    with pytest.raises(LayoutError, match=field):
        call_fused_experts(x_TH, invalid, routing, **flags)


@pytest.mark.parametrize("field", ["topk_weights_TK", "topk_ids_TK"])
def test_routing_on_the_meta_device_is_refused(field: str) -> None:
    x_TH, weights, routing = make_layer(BASE)
    routing = replace(routing, **{field: getattr(routing, field).to("meta")})
    with pytest.raises(DeviceError, match=field.removesuffix("_TK")):
        call_fused_experts(x_TH, weights, routing)


class TensorSubclass(torch.Tensor):
    """A tensor subclass whose operations return the subclass."""


def test_function_modes_do_not_change_the_class_of_the_output() -> None:
    x_TH, weights, routing = make_layer(BASE)
    expected = call_fused_experts(x_TH.as_subclass(TensorSubclass), weights, routing)
    with torch.device("cpu"):
        got = call_fused_experts(x_TH.as_subclass(TensorSubclass), weights, routing)
    assert type(got) is type(expected) is TensorSubclass
    assert torch.equal(got, expected)


def test_function_transforms_of_the_operator_do_not_return_zero_gradients() -> None:
    """Inside vmap, grad and jvp, the operator refuses only the tensors that they wrap."""
    x_TH, weights, routing = make_layer(BASE)
    tensors = (weights.w1, weights.w2, routing.topk_weights_TK, routing.topk_ids_TK)

    def operator(x_TH: torch.Tensor) -> torch.Tensor:
        return outplace_fused_experts(x_TH, *tensors, [None] * 9, "none", "silu", False, 1.0, "sum")

    for call in (
        lambda: torch.func.grad(lambda x: operator(x).sum())(x_TH),
        lambda: torch.func.jvp(operator, (x_TH,), (x_TH,)),
        lambda: torch.vmap(operator)(x_TH[None]),
        lambda: torch.vmap(torch.func.grad(lambda y: operator(y).sum()))(x_TH[None]),
    ):
        with pytest.raises(LayoutError, match="outplace_fused_experts"):
            call()
    expected = operator(x_TH)
    assert torch.equal(torch.vmap(lambda y: y * operator(x_TH))(torch.ones(1))[0], expected)
    assert torch.equal(torch.func.grad(lambda y: (y * operator(x_TH)).sum())(x_TH), expected)
    assert torch.equal(torch.func.functionalize(operator)(x_TH), expected)
