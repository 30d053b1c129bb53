"""Models loaded from quantized files run on packed experts with the values of the checkpoint."""

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers_samples import OURS

from modular_kernel.checkpoints.loading import load_experts
from modular_kernel.cli.demo_models import build_small_model
from modular_kernel.errors import ConfigurationError, InputError, UnsupportedError
from modular_kernel.integrations.transformers import from_pretrained, register, registration
from modular_kernel.integrations.transformers.modules import is_dispatched, read_tensors
from modular_kernel.operators.experts import EXPERTS
from modular_kernel.testing.checkpoints import samples as checkpoint_samples
from modular_kernel.testing.checkpoints.formats import StoredMatrix
from modular_kernel.testing.checkpoints.published_formats import (
    ACT_ORDER_FORMATS,
    BLOCK_FORMATS,
    CHECKPOINT_FORMATS,
    FUSED_FORMATS,
)
from modular_kernel.testing.checkpoints.torchao import TORCHAO_FORMATS, metadata_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, INTERMEDIATE = 128, 256
# The number of experts, and the layers that have experts, by model.
MODELS = {
    "mixtral": (8, (0, 1)),
    "qwen3_moe": (12, (0, 1)),
    "deepseek_v3": (16, (1,)),
    "gpt_oss": (8, (0, 1)),
}
_DENSE = ("mixtral", "qwen3_moe", "deepseek_v3")
ALL_KINDS = CHECKPOINT_FORMATS | ACT_ORDER_FORMATS | BLOCK_FORMATS | FUSED_FORMATS
ALL_KINDS |= TORCHAO_FORMATS
CASES = [
    *(
        ("mixtral", kind)
        for kind in CHECKPOINT_FORMATS
        if kind not in ("bf16", "fp16", "fp32", "mxfp4", "mxfp4, E8M0 dtype", "deepseek fp4")
    ),
    ("qwen3_moe", "qwen3 fp8"),
    ("deepseek_v3", "deepseek fp8, UE8M0"),
    ("gpt_oss", "mxfp4"),
    ("gpt_oss", "mxfp4, E8M0 dtype"),
    *(("mixtral", kind) for kind in (*ACT_ORDER_FORMATS, *BLOCK_FORMATS)),
    *(("qwen3_moe", kind) for kind in TORCHAO_FORMATS),
    ("gpt_oss", "compressed fp8 channel"),
    ("gpt_oss", "compressed int4"),
    ("gpt_oss", "modelopt nvfp4, fused"),
]


PACKERS = ("kernels", "accelerate", "compressed_tensors", "gptqmodel", "optimum", "modelopt")


@pytest.fixture(autouse=True)
def block_packers(monkeypatch) -> None:
    import transformers.modeling_utils  # noqa: F401  # imports accelerate if PEFT is installed

    for name in PACKERS:
        monkeypatch.setitem(sys.modules, name, None)


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A checkpoint, a float64 model with its dequantized values, and a bound of the error."""

    folder: Path
    exact: torch.nn.Module
    bound: float


def write(folder: Path, name: str, kind: str, change=None) -> WrittenCheckpoint:
    """Write a small model with quantized experts and attention.

    Args:
        folder: where to write the checkpoint.
        name: a key of MODELS.
        kind: a key of ALL_KINDS.
        change: changes the tensors of the file in place.
    """
    experts, layers = MODELS[name]
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    if name in ("qwen3_moe", "deepseek_v3"):
        sizes["moe_intermediate_size"] = INTERMEDIATE
    model = build_small_model(name, "bfloat16", "cpu", **sizes)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
    exact = dict(tensors)
    family, checkpoint_format = checkpoint_samples.FAMILIES[name], ALL_KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        shape = (experts, HIDDEN, INTERMEDIATE)
        stored = checkpoint_samples.matrices(checkpoint_format, family, shape, generator)
        tensors |= family.names(f"model.layers.{layer}.", stored)
        matrices = {name: [dequantize(matrix) for matrix in getattr(stored, name)]
                    for name in ("gate", "up", "down")}  # fmt: skip
        matrices |= {"b1": stored.b1, "b2": stored.b2}
        exact |= family.names(
            f"model.layers.{layer}.", checkpoint_samples.LayerMatrices(**matrices)
        )
    if name in _DENSE:
        for key in [key for key in tensors if key.endswith("o_proj.weight")]:
            rows, depth = tensors.pop(key).shape
            matrix = checkpoint_format.make(rows, depth, generator, 1.0)
            prefix = key.removesuffix("weight")
            tensors |= {prefix + suffix: tensor for suffix, tensor in matrix.tensors.items()}
            exact[key] = matrix.values.float()
    if change is not None:
        change(tensors)
    metadata = {"format": "pt"}
    if kind in TORCHAO_FORMATS:
        metadata = metadata_of(checkpoint_format.config or {}, tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()},
              folder / "model.safetensors", metadata)  # fmt: skip
    exact_folder = folder / "truth"
    config = json.loads((folder / "config.json").read_text())
    exact_folder.mkdir()
    (exact_folder / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.contiguous() for key, tensor in exact.items()},
              exact_folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    config["quantization_config"] = checkpoint_format.config
    if checkpoint_format.config is not None and "ignore" in checkpoint_format.config:
        # o_proj is quantized, so it must not be ignored.
        config["quantization_config"] = checkpoint_format.config | {"ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(exact_folder, dtype=torch.float32).double().eval()
    model.set_experts_implementation("batched_mm")
    return WrittenCheckpoint(folder, model.to(DEVICE), checkpoint_format.bound)


def dequantize(stored: StoredMatrix) -> StoredMatrix:
    return StoredMatrix({"weight": stored.values.float()}, stored.values)


def list_experts_modules(model: torch.nn.Module) -> "list[torch.nn.Module]":
    return [module for module in model.modules() if is_dispatched(module)]


def measure_largest_error(model: torch.nn.Module, exact: torch.nn.Module) -> float:
    """Return the largest relative error of the experts modules, for the same input and routing."""
    errors = []
    for experts, exact_experts in zip(
        list_experts_modules(model), list_experts_modules(exact), strict=True
    ):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(13, HIDDEN, generator=generator).to(DEVICE, torch.bfloat16)
        values, ids = torch.randn(13, exact_experts.num_experts, generator=generator).topk(3)
        scores, ids = values.softmax(-1).to(DEVICE), ids.to(DEVICE)
        with torch.no_grad():
            got = experts(x, ids, scores)
            expected = exact_experts(x.double(), ids, scores.double())
        errors.append(float((got.double() - expected).norm() / expected.norm()))
    return max(errors)


@pytest.mark.share(6)
@pytest.mark.parametrize(("name", "kind"), CASES, ids=lambda word: word)
def test_experts_equal_the_checkpoint(name, kind, tmp_path) -> None:
    checkpoint = write(tmp_path, name, kind)
    model = from_pretrained(tmp_path, experts_implementation=register(*OURS), device=DEVICE)
    assert measure_largest_error(model, checkpoint.exact) <= checkpoint.bound
    quant = list_experts_modules(model)[0]._mk_quant
    assert quant.partition(":")[0] == ALL_KINDS[kind].scheme.partition(":")[0]
    packed_bytes = sum(p.nbytes for m in list_experts_modules(model) for p in m.parameters())
    bf16_bytes = sum(
        2 * p.numel() for m in list_experts_modules(checkpoint.exact) for p in m.parameters()
    )
    limit = 1.01 if quant == "none" else 0.35 if "w4a16" in quant else 0.6
    assert packed_bytes < limit * bf16_bytes
    o_projs = [(n, p) for n, p in model.named_parameters() if n.endswith("o_proj.weight")]
    exact = dict(checkpoint.exact.named_parameters())
    for parameter_name, parameter in o_projs:
        error = (parameter.double() - exact[parameter_name]).norm() / exact[parameter_name].norm()
        assert error <= 3e-3


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_unquantized_experts_equal_the_checkpoint(kind, tmp_path) -> None:
    checkpoint = write(tmp_path, "mixtral", kind)
    model = from_pretrained(tmp_path, experts_implementation=register(*OURS), device=DEVICE)
    assert measure_largest_error(model, checkpoint.exact) <= checkpoint.bound


# The checkpoint formats of a family in bf16, fp8, int4 and mxfp4.
FORMATS_BY_FAMILY = {
    "mixtral": ("bf16", "qwen3 fp8", "awq", "compressed mxfp4"),
    "qwen3_moe": ("bf16", "qwen3 fp8", "gptq", "compressed mxfp4"),
    "deepseek_v3": ("bf16", "deepseek fp8, UE8M0", "compressed int4", "compressed mxfp4"),
    "gpt_oss": ("bf16", "compressed fp8 channel", "compressed int4", "mxfp4"),
}
WHOLE_MODELS = [(name, kind) for name, kinds in FORMATS_BY_FAMILY.items() for kind in kinds]


def load_model(
    folder: Path, name: str, kind: str
) -> "tuple[torch.nn.Module, WrittenCheckpoint | None]":
    """Return a model on our experts, and the float64 model of its checkpoint."""
    if kind == "bf16":
        model = build_small_model(name, "bfloat16", DEVICE)
        model.set_experts_implementation(register(*OURS))
        return model, None
    checkpoint = write(folder, name, kind)
    return from_pretrained(
        folder, experts_implementation=register(*OURS), device=DEVICE
    ), checkpoint


@pytest.mark.share(3)
@pytest.mark.parametrize(("name", "kind"), WHOLE_MODELS)
def test_whole_models_are_one_graph_and_pass_opcheck(name, kind, tmp_path) -> None:
    """Compiled models have no graph break, and the same logits as eager calls."""
    torch.compiler.reset()
    model, checkpoint = load_model(tmp_path, name, kind)
    graphs = []

    def record_graph(graph, inputs):
        graphs.append(graph)
        return graph

    ids = torch.arange(9, device=DEVICE)[None]
    with torch.no_grad():
        eager = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend=record_graph)
        assert torch.equal(compiled(input_ids=ids, use_cache=False).logits, eager)
    operators = [n for g in graphs for n in g.graph.nodes if "modular_kernel" in str(n.target)]
    assert (len(graphs), len(operators)) == (1, len(list_experts_modules(model)))
    if checkpoint is not None:
        with torch.no_grad():
            exact = checkpoint.exact(input_ids=ids, use_cache=False).logits
        assert (eager.double() - exact).norm() / exact.norm() <= 0.1
    module = list_experts_modules(model)[0]
    tensors = tuple(tensor.detach() for tensor in read_tensors(module))
    x = torch.randn(5, model.config.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    values, expert_ids = torch.randn(5, 8, device=DEVICE).topk(3)
    run = registration()
    fields, layer = run.compute_constants(module, tensors, x.dtype, 3)
    arguments = (x, expert_ids, values.softmax(-1), list(tensors), fields, layer, str(run.pairing))
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks.append("test_aot_dispatch_dynamic")
    if any(tensor.dtype.itemsize == 1 and tensor.is_floating_point() for tensor in tensors):
        checks.remove("test_schema")  # uses torch.allclose, which does not support float8
        before = [tensor.view(torch.uint8).clone() for tensor in tensors]
        EXPERTS(*arguments)
        for tensor, original in zip(tensors, before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), original)
    torch.library.opcheck(EXPERTS, arguments, test_utils=checks)


@pytest.mark.parametrize("kind", ["qwen3 fp8", "awq"])
def test_fused_rows_of_gpt_oss_in_other_formats_are_refused_by_name(kind, tmp_path) -> None:
    write(tmp_path, "gpt_oss", "mxfp4")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = CHECKPOINT_FORMATS[kind].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"gate_up_proj"):
        from_pretrained(tmp_path, experts_implementation=register(*OURS))


@pytest.mark.parametrize(("name", "kind"), [("mixtral", "awq"), ("gpt_oss", "mxfp4")])
def test_whole_models_generate(name, kind, tmp_path) -> None:
    model, _ = load_model(tmp_path, name, kind)
    ids = torch.arange(9, device=DEVICE)[None]
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 13)


def exchange_scales(tensors) -> None:
    for key in [key for key in tensors if ".w1.weight_scale_inv" in key]:
        other = key.replace(".w1.", ".w3.")
        tensors[key], tensors[other] = tensors[other], tensors[key]


def shift_zero_points(tensors) -> None:
    for key in [key for key in tensors if key.endswith("qzeros") and ".experts." in key]:
        tensors[key] = tensors[key] ^ 0x11111111


def clear_scales_of_a_tile(tensors) -> None:
    for key in [key for key in tensors if key.endswith("w2.weight_scale_inv")]:
        tensors[key] = tensors[key].clone()
        tensors[key][:, -1] = 0


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("deepseek fp8", exchange_scales),
        ("awq", shift_zero_points),
        ("deepseek fp8", clear_scales_of_a_tile),
    ],
)
def test_the_bound_detects_errors_of_a_loader(kind, change, tmp_path) -> None:
    checkpoint = write(tmp_path, "mixtral", kind, change)
    model = from_pretrained(tmp_path, experts_implementation=register(*OURS), device=DEVICE)
    assert measure_largest_error(model, checkpoint.exact) > checkpoint.bound


def test_no_quantization_package_is_needed(tmp_path) -> None:
    """The process that loads the model cannot import such packages."""
    write(tmp_path, "mixtral", "awq")
    program = (
        "import sys",
        "blocked = 'kernels accelerate compressed_tensors gptqmodel optimum modelopt autoawq awq'",
        "sys.modules.update(dict.fromkeys(blocked.split()))",
        "from modular_kernel.integrations.transformers import from_pretrained, register",
        "register()",
        "model = from_pretrained(sys.argv[1])",
        "assert model.model.layers[0].mlp.experts.gate_up_proj.element_size() == 1",
    )
    command = [sys.executable, "-c", "\n".join(program), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_gradients_pass_through_packed_experts(tmp_path) -> None:
    """Inputs, router weights and biases get the same gradients as in the float64 model."""
    checkpoint = write(tmp_path, "gpt_oss", "mxfp4")
    model = from_pretrained(
        tmp_path, experts_implementation=register(*OURS), dtype=torch.float32, device=DEVICE
    )
    experts = list_experts_modules(model)[0]
    exact_experts = list_experts_modules(checkpoint.exact)[0]
    for module in (experts, exact_experts):
        module.gate_up_proj_bias.requires_grad_()
        module.down_proj_bias.requires_grad_()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(13, HIDDEN, generator=generator).to(DEVICE)
    values, ids = torch.randn(13, 8, generator=generator).topk(3)
    scores, ids, gradients = values.softmax(-1).to(DEVICE), ids.to(DEVICE), []
    for module, dtype in ((experts, torch.float32), (exact_experts, torch.float64)):
        arguments = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, scores)]
        module(arguments[0], ids, arguments[1]).square().sum().backward()
        biases = [module.gate_up_proj_bias.grad, module.down_proj_bias.grad]
        gradients.append([*(tensor.grad for tensor in arguments), *biases])
    for got, expected in zip(*gradients, strict=True):
        assert (got.double() - expected).norm() / expected.norm() <= 1e-4


def test_other_implementations_and_saving_are_refused(tmp_path) -> None:
    write(tmp_path, "mixtral", "awq")
    model = from_pretrained(tmp_path, experts_implementation=register(*OURS), device=DEVICE)
    ids = torch.arange(4, device=DEVICE)[None]
    model.set_experts_implementation("eager")
    with torch.no_grad(), pytest.raises(UnsupportedError, match="eager"):
        model(input_ids=ids)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "again")
    model_copy = copy.deepcopy(model)
    model_copy.set_experts_implementation(register(*OURS))
    with torch.no_grad():
        model_copy(input_ids=ids)


def test_incomplete_checkpoints_are_refused(tmp_path) -> None:
    def remove_weight(tensors) -> None:
        del tensors["model.layers.1.block_sparse_moe.experts.3.w2.qweight"]

    write(tmp_path, "mixtral", "awq", remove_weight)
    with pytest.raises(InputError, match=r"experts.3.w2.qweight"):
        from_pretrained(tmp_path, experts_implementation=register(*OURS))
    with pytest.raises(UnsupportedError, match="tp_plan"):
        from_pretrained(tmp_path, tp_plan="auto")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "no such"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="no such"):
        from_pretrained(tmp_path)


def test_arguments_of_the_caller_are_used_and_not_changed(tmp_path) -> None:
    write(tmp_path, "mixtral", "awq")
    config = AutoConfig.from_pretrained(tmp_path)
    before = copy.deepcopy(config.to_dict())
    model = from_pretrained(
        tmp_path, experts_implementation=register(*OURS), config=config, torch_dtype="float32"
    )
    assert config.to_dict() == before
    assert model.dtype is torch.float32
    with pytest.raises(ConfigurationError, match="torch_dtype: got float16, need dtype=bfloat16"):
        from_pretrained(tmp_path, dtype="bfloat16", torch_dtype="float16")
    for option in ({"quantization_config": {"bits": 4}}, {"output_loading_info": True}):
        with pytest.raises(UnsupportedError, match=next(iter(option))):
            from_pretrained(tmp_path, **option)
    for name in (None, 3, b"model", torch.zeros(2)):
        with pytest.raises(ConfigurationError, match=r"^name: "):
            from_pretrained(name)  # type: ignore[arg-type]
    for auto_class in (None, "AutoModel", object()):
        with pytest.raises(ConfigurationError, match=r"^auto_class: .*need a class with"):
            from_pretrained("model", auto_class=auto_class)
    with pytest.raises(ConfigurationError, match="need a folder, or the name of a model"):
        from_pretrained(tmp_path / "no folder here")
    missing = r"got no-such-name \(LocalEntryNotFoundError\), need a folder, a model in the cache"
    with pytest.raises(ConfigurationError, match=missing):
        from_pretrained("no-such-name", local_files_only=True)
    unpickled = pickle.loads(pickle.dumps(model))
    assert type(list_experts_modules(unpickled)[0]) is type(list_experts_modules(model)[0])
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(unpickled(ids).logits, model(ids).logits)


def test_unquantized_models_use_the_config_argument(tmp_path) -> None:
    build_small_model("mixtral", "float32", "cpu").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_experts_per_tok = 1
    model = from_pretrained(tmp_path, experts_implementation=register(*OURS), config=config)
    assert model.config.num_experts_per_tok == 1


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_of_unquantized_files_are_quantized(name: str, tmp_path: Path) -> None:
    """The packed experts equal those of `load_experts`, and the other weights do not change."""
    register()
    build_small_model(
        name, "bfloat16", "cpu", hidden_size=HIDDEN, intermediate_size=INTERMEDIATE
    ).save_pretrained(tmp_path)
    unquantized_model = from_pretrained(tmp_path, dtype=torch.float32)
    scheme = "int8_w8a16_group:group=32"
    model = from_pretrained(tmp_path, dtype=torch.float32, quantize=scheme)
    for number, module in enumerate(m for m in model.modules() if is_dispatched(m)):
        expected = load_experts(tmp_path, number, quantize=scheme).weights
        assert torch.equal(module.down_proj, expected.w2)
        assert module.down_proj.dtype is torch.uint8
    other_tensors = {
        key: tensor
        for key, tensor in unquantized_model.state_dict().items()
        if ".experts." not in key
    }
    assert all(
        torch.equal(model.state_dict()[key], tensor) for key, tensor in other_tensors.items()
    )
    ids = torch.arange(8)[None]
    with torch.no_grad():
        got, expected = (m(input_ids=ids).logits.double() for m in (model, unquantized_model))
    assert not torch.equal(got, expected)
    assert float((got - expected).norm() / expected.norm()) <= CHECKPOINT_FORMATS["gptq int8"].bound


def test_quantized_files_are_not_quantized_again(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "awq")
    with pytest.raises(ConfigurationError, match="quantize=fp8_w8a8_block: got int4_w4a16_group"):
        from_pretrained(tmp_path, quantize="fp8_w8a8_block")
    with pytest.raises(ConfigurationError, match="need no static activation scales"):
        from_pretrained(tmp_path, quantize="nvfp4_w4a4")


def test_error_about_gguf_files_names_a_supported_reader(tmp_path) -> None:
    register()
    with pytest.raises(
        UnsupportedError, match=r"a GGUF file, need a folder of safetensors files.*FusedMoE"
    ):
        from_pretrained(tmp_path / "model-Q4_0.gguf")
