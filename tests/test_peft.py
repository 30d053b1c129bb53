"""Adapters that PEFT wrote (tests/golden/peft) have the products that PEFT gives them; bad ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import modular_kernel as mk
from modular_kernel.adapters import Adapter
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.importers.peft import load_adapter

GOLDEN = Path(__file__).parent / "golden" / "peft"
DELTAS = load_file(GOLDEN / "deltas.safetensors")
H, I, E = 16, 12, 4  # noqa: E741
PROBLEM = mk.Problem(
    tokens=8, hidden=H, intermediate=I, experts=E, top_k=2, dtype=torch.float32,
    lora="adapters=2,rank=8",
)  # fmt: skip
OSS = replace(PROBLEM, activation="swiglu_oai:alpha=1.702,limit=7.0,interleaved=true")
PROBLEMS = {"transposed": OSS}
RANKS = {"fused": 5, "transposed": 3, "converted": 4, "down": 4, "modules": 5}
BLOCK = "base_model.model.model.layers.1.mlp.experts"
EXPERT = "base_model.model.model.layers.1.block_sparse_moe.experts"


def wanted(kind: str, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """PEFT's own delta of w1 and of w2, in float64, rows as the problem has them."""
    of = {name.partition(".")[2]: DELTAS[name].double() for name in DELTAS if name.startswith(kind)}
    if "w1" in of:
        return torch.cat([of["w1"], of["w3"]], 1), of["w2"]
    w1, w2 = of.get("gate_up_proj", torch.zeros(E, 2 * I, H).double()), of["down_proj"]
    return (w1.mT, w2.mT) if interleaved else (w1, w2)


def products(adapter: Adapter, problem: mk.Problem) -> tuple[torch.Tensor, torch.Tensor]:
    a13, b13, a2, b2 = (
        getattr(adapter, name).double() for name in ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
    )
    rank = b13.shape[2]
    rows = torch.arange(2 * I)
    up = rows % 2 if problem.act.interleaved else rows // I
    halves = a13.unflatten(1, (-1, rank)).expand(b13.shape[0], 2, rank, H)
    return torch.einsum("enr,enrh->enh", b13, halves[:, up]), b2 @ a2


@pytest.mark.parametrize("shared", ["", ",a13=shared"])
@pytest.mark.parametrize("kind", RANKS)
def test_products_are_those_of_peft(kind: str, shared: str) -> None:
    problem = PROBLEMS.get(kind, PROBLEM)
    problem = replace(problem, lora=problem.lora + shared)  # type: ignore[operator]
    adapter = load_adapter(GOLDEN / kind, 1, problem)
    # Gate, of 5 rows, and up, of 3, lie below each other where they have one A.
    assert adapter.lora_a2.shape[1] == (8 if shared and kind == "modules" else RANKS[kind])
    got, want = products(adapter, problem), wanted(kind, problem.act.interleaved)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shared", ["", ",a13=shared"])
def test_rows_of_separate_gate_and_up_alternate_where_those_of_w1_do(shared: str) -> None:
    problem = replace(OSS, lora=f"adapters=2,rank=8{shared}")
    first, _ = products(load_adapter(GOLDEN / "modules", 1, problem), problem)
    want, _ = wanted("modules", interleaved=False)
    torch.testing.assert_close(first[:, 0::2], want[:, :I], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(first[:, 1::2], want[:, I:], rtol=1e-5, atol=1e-7)


def test_rows_beyond_a_projections_rank_are_zero_and_scaling_is_in_b() -> None:
    adapter = load_adapter(GOLDEN / "modules", 1, PROBLEM)
    stored = load_file(GOLDEN / "modules" / "adapter_model.safetensors")
    assert not adapter.lora_a2[:, 2:].any()
    assert not adapter.lora_b2[:, :, 2:].any()
    assert not adapter.lora_a13[[0, 1, 3], 3:5].any()
    assert adapter.lora_a13[2, 3:5].any()
    assert torch.equal(adapter.lora_a2[3, :2], stored[f"{EXPERT}.3.w2.lora_A.weight"])
    want = stored[f"{EXPERT}.3.w2.lora_B.weight"] * 2  # alpha 4, rank 2
    assert torch.equal(adapter.lora_b2[3, :, :2], want)


def test_what_is_not_targeted_is_zero() -> None:
    adapter = load_adapter(GOLDEN / "down", 1, PROBLEM)
    assert not adapter.lora_a13.any()
    assert not adapter.lora_b13.any()
    assert adapter.lora_a2.any()


@pytest.mark.parametrize("kind", ["fused", "modules"])
def test_ranks_have_their_experts(kind: str) -> None:
    whole = load_adapter(GOLDEN / kind, 1, PROBLEM)
    share = replace(PROBLEM, parallel=mk.Parallel(2, "linear", 1))
    partial = replace(PROBLEM, local_experts=2, expert_map=True)
    for got in (
        load_adapter(GOLDEN / kind, 1, share),
        load_adapter(GOLDEN / kind, 1, partial, ep=(1, 2)),
    ):
        for mine, theirs in zip(products(got, share), products(whole, PROBLEM), strict=True):
            assert torch.equal(mine, theirs[2:])
    with pytest.raises(ConfigurationError, match="ep: got 4 experts on rank 0 of 1, need 2"):
        load_adapter(GOLDEN / kind, 1, partial)


class Folder:
    """A copy of a golden adapter, to be changed."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path / kind
        shutil.copytree(GOLDEN / kind, self.path)
        self.tensors = load_file(self.path / "adapter_model.safetensors")
        self.config: dict[str, Any] = json.loads((self.path / "adapter_config.json").read_text())

    def load(self, problem: mk.Problem = PROBLEM, layer: int = 1, **options: Any) -> Adapter:
        save_file(self.tensors, self.path / "adapter_model.safetensors")
        (self.path / "adapter_config.json").write_text(json.dumps(self.config))
        return load_adapter(self.path, layer, problem, **options)


def test_experts_with_one_a_and_b_are_one_where_the_problem_shares_them(tmp_path: Path) -> None:
    problem = replace(PROBLEM, lora="adapters=2,rank=8,outer=shared")
    folder = Folder(tmp_path, "modules")
    folder.config.update(r=3, rank_pattern={}, alpha_pattern={})
    torch.manual_seed(0)
    for name in ("w1.lora_A", "w3.lora_A", "w2.lora_B", "w1.lora_B", "w3.lora_B", "w2.lora_A"):
        shape = {"w1.lora_A": (3, H), "w3.lora_A": (3, H), "w2.lora_B": (H, 3), "w2.lora_A": (3, I)}
        for layer in (0, 1):
            one = torch.randn(shape.get(name, (I, 3)))
            for e in range(E):
                own = one if name in ("w1.lora_A", "w3.lora_A", "w2.lora_B") else one * (e + 1)
                block = EXPERT.replace("layers.1", f"layers.{layer}")
                folder.tensors[f"{block}.{e}.{name}.weight"] = own.clone()
    shared, apart = folder.load(problem), folder.load()
    assert len(shared.lora_a13) == len(shared.lora_b2) == 1
    for got, want in zip(products(shared, problem), products(apart, PROBLEM), strict=True):
        assert torch.equal(got, want)
    second = folder.load(replace(problem, parallel=mk.Parallel(2, "linear", 1)))
    assert torch.equal(second.lora_a13, shared.lora_a13)
    assert torch.equal(second.lora_b13, shared.lora_b13[2:])
    assert torch.equal(second.lora_a2, shared.lora_a2[2:])
    assert torch.equal(second.lora_b2, shared.lora_b2)
    with pytest.raises(WeightsError, match="lora_a13 that differs between experts"):
        load_adapter(GOLDEN / "modules", 1, problem)


def test_other_modules_are_named_or_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "down")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    folder.tensors[key] = torch.zeros(4, H)
    with pytest.raises(WeightsError, match=r"got .*self_attn.q_proj.lora_A.weight, need"):
        folder.load()
    for elsewhere in (("self_attn",), ["self_attn"]):
        assert folder.load(elsewhere=elsewhere).lora_a2.any()


def test_layers_that_it_leaves_out_are_zero(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "down")
    with pytest.raises(WeightsError, match="got no tensor of layer 7"):
        folder.load(layer=7)
    folder.config["layers_to_transform"] = [0, 1]
    empty = folder.load(layer=7)
    assert empty.lora_a2.shape == (E, 1, I)
    assert not empty.lora_a2.any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"), ("peft_type", None), ("use_dora", True), ("bias", "all"),
        ("modules_to_save", ["lm_head"]), ("lora_bias", True), ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2]]), ("of_a_later_release", {"a": 1}), ("use_rslora", 1),
        ("init_lora_weights", "pissa"), ("r", 0), ("r", None), ("lora_alpha", "8"),
        ("lora_alpha", None), ("lora_alpha", 1 << 2000), ("rank_pattern", {"w2": 0}),
        ("rank_pattern", ["w2"]), ("rank_pattern", {"(": 2}), ("alpha_pattern", {"(a+)+": 2}),
        ("rank_pattern", {"a*b*c*d*": 2}), ("layers_to_transform", "all"), ("peft_version", 19),
        ("rank_pattern", {"(?i)w2": 2}), ("rank_pattern", {"a)|(b": 2}),
        ("layers_to_transform", True), ("layers_to_transform", -1),
        ("layers_to_transform", [0, -1]), ("layers_to_transform", [0, "1"]),
        ("layers_to_transform", 1.0), ("layers_to_transform", {"1": 1}),
        ("target_modules", 7), ("target_modules", {"w1": 1}), ("target_modules", ["w1", 2]),
        ("target_modules", True), ("target_parameters", "experts.down_proj"),
        ("target_parameters", [None]), ("exclude_modules", [1]), ("exclude_modules", 0),
        ("init_lora_weights", 1), ("init_lora_weights", 0.0), ("init_lora_weights", []),
        ("init_lora_weights", "True"),
    ],
)  # fmt: skip
def test_a_config_of_more_than_plain_lora_is_refused(
    tmp_path: Path, field: str, value: object
) -> None:
    folder = Folder(tmp_path, "modules")
    folder.config[field] = value
    with pytest.raises(ConfigurationError, match=rf"adapter_config.json: {field}: got"):
        folder.load()


def test_fields_that_say_nothing_are_none(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "down")
    want = folder.load()
    folder.config.update(rank_pattern=None, alpha_pattern=None, exclude_modules=["lm_head"])
    assert torch.equal(folder.load().lora_b2, want.lora_b2)


def test_layers_beside_a_pattern_of_modules_are_refused(tmp_path: Path) -> None:
    """PEFT has no such adapter."""
    folder = Folder(tmp_path, "modules")
    folder.config["target_modules"] = "w[123]"
    assert folder.load().lora_a2.any()
    folder.config["layers_to_transform"] = [1]
    with pytest.raises(ConfigurationError, match=r"layers_to_transform: got \[1\], need none bes"):
        folder.load()


@pytest.mark.parametrize(("layers", "mine"), [(1, True), ([1], True), ([0], False), ([], True)])
def test_no_layers_are_all_of_them(tmp_path: Path, layers: object, mine: bool) -> None:
    """As PEFT takes a list without any."""
    folder = Folder(tmp_path, "modules")
    folder.config["layers_to_transform"] = layers
    if mine:
        assert folder.load().lora_a2.any()
        return
    with pytest.raises(WeightsError, match="layers_to_transform"):
        folder.load()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": 1, "r": 2}', None])
def test_what_is_no_config_is_refused(tmp_path: Path, text: str | None) -> None:
    folder = Folder(tmp_path, "down")
    path = folder.path / "adapter_config.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"adapter_config.json: got"):
        load_adapter(folder.path, 1, PROBLEM)


def test_a_config_of_more_than_a_mebibyte_is_not_read(tmp_path: Path) -> None:
    path = Folder(tmp_path, "down").path / "adapter_config.json"
    text = path.read_text()
    path.write_text(text + " " * ((1 << 20) - len(text)))
    assert load_adapter(path.parent, 1, PROBLEM).lora_a2.any()
    path.write_text(text + " " * ((1 << 20) + 1 - len(text)))
    with pytest.raises(ConfigurationError, match=r"adapter_config.json: got"):
        load_adapter(path.parent, 1, PROBLEM)


def test_of_many_names_that_are_nobodys_four_are_told(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "down")
    for number in range(6):
        key = f"base_model.model.model.layers.{number}.self_attn.q_proj.lora_A.weight"
        folder.tensors[key] = torch.zeros(4, H)
    with pytest.raises(WeightsError, match=r"layers\.3\.self_attn\S+ and 2 more, need") as caught:
        folder.load()
    assert "layers.4" not in str(caught.value)


def test_a_name_has_up_to_512_characters(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "down")
    longest = max(map(len, folder.tensors))
    for length, taken in ((512, True), (513, False)):
        model = "model" + "l" * (length - longest)
        tensors = {
            key.replace("model.layers", f"{model}.layers"): value
            for key, value in load_file(GOLDEN / "down" / "adapter_model.safetensors").items()
        }
        assert max(map(len, tensors)) == length
        folder.tensors = tensors
        if taken:
            assert torch.equal(
                folder.load().lora_a2, load_adapter(GOLDEN / "down", 1, PROBLEM).lora_a2
            )
        else:
            with pytest.raises(WeightsError, match="need LoRA of experts"):
                folder.load()


FIRST, LAST = f"{EXPERT}.0.w1.lora_A.weight", f"{EXPERT}.3.w2.lora_B.weight"


@pytest.mark.parametrize(
    ("key", "tensor", "error", "match"),
    [
        (FIRST, None, WeightsError, r"got .*0.w1.lora_B.weight alone, need lora_A, lora_B"),
        (FIRST, torch.zeros(4, H), ShapeError, r"0.w1.lora_A.weight: got \(4, 16\), need \(3, 1"),
        (FIRST, torch.zeros(3, H, 1), ShapeError, r"got \(3, 16, 1\), need \(3, 16\)|dimensions"),
        (FIRST, torch.zeros(3, H).int(), DtypeError, r"0.w1.lora_A.weight: got torch.int32"),
        (LAST, torch.full((H, 2), torch.inf), WeightsError, r"3.w2.lora_B.weight: got values that"),
        (f"{EXPERT}.4.w1.lora_A.weight", torch.zeros(3, H), WeightsError, "alone"),
        (f"{EXPERT}.0.w4.lora_A.weight", torch.zeros(3, H), WeightsError, r"got .*\.w4\."),
        (f"{EXPERT}.0.gate_proj.lora_A.weight", torch.zeros(3, H), WeightsError, "alone"),
        (FIRST.replace("lora_A", "lora_magnitude_vector"), torch.zeros(3), WeightsError, "magnit"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path,
    key: str,
    tensor: torch.Tensor | None,
    error: type[Exception],
    match: str,
) -> None:
    folder = Folder(tmp_path, "modules")
    folder.tensors.pop(key, None)
    if tensor is not None:
        folder.tensors[key] = tensor
    with pytest.raises(error, match=match):
        folder.load()


@pytest.mark.parametrize("number", ["01", "\N{ARABIC-INDIC DIGIT ONE}"])
def test_an_expert_is_not_written_twice(tmp_path: Path, number: str) -> None:
    folder = Folder(tmp_path, "modules")
    folder.tensors[f"{EXPERT}.{number}.w1.lora_A.weight"] = torch.ones(3, H)
    with pytest.raises(WeightsError, match=rf"experts\.{number}\.w1\.lora_A"):
        folder.load()


def test_tensors_of_a_layer_that_the_config_leaves_out_are_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "modules")
    folder.config["layers_to_transform"] = [0]
    with pytest.raises(WeightsError, match="got tensors of layer 1, need none: layers_to_tr"):
        folder.load()


@pytest.mark.parametrize("elsewhere", [None, "self_attn", (1,)])
def test_elsewhere_is_names(elsewhere: Any) -> None:
    with pytest.raises(ConfigurationError, match="elsewhere: got"):
        load_adapter(GOLDEN / "modules", 1, PROBLEM, elsewhere=elsewhere)


def test_two_blocks_of_experts_in_a_layer_are_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "down")
    for side, shape in (("A", (4 * E, H)), ("B", (2 * I, 4 * E))):
        other = BLOCK.replace("model.layers", "other.layers")
        folder.tensors[f"{other}.lora_{side}.weight"] = torch.zeros(shape)
    with pytest.raises(WeightsError, match=r"model.layers.1.mlp.experts and .*other.layers"):
        folder.load()


def test_experts_and_projections_are_whole(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "modules")
    pairs = {key: folder.tensors[key] for key in folder.tensors if f"{EXPERT}.3.w3" in key}
    for key, value in pairs.items():
        del folder.tensors[key]
        folder.tensors[key.replace(".3.w3", ".4.w3")] = value
    with pytest.raises(WeightsError, match=r"got .*\.4\.w3\..*, need experts 0 to 3"):
        folder.load()
    for key in pairs:
        del folder.tensors[key.replace(".3.w3", ".4.w3")]
    with pytest.raises(WeightsError, match=r"layer 1: got up without experts \[3\]"):
        folder.load()
    for key in [key for key in folder.tensors if ".w3." in key]:
        del folder.tensors[key]
    with pytest.raises(WeightsError, match=r"layer 1: got no w3, need what adapter_config.json"):
        folder.load()
    folder.config["target_modules"] = ["w1", "w2"]
    assert folder.load().lora_a13.any()


def test_two_layouts_at_once_are_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "fused")
    for side, shape in (("A", (3, H)), ("B", (I, 3))):
        for expert in range(E):
            folder.tensors[f"{BLOCK}.{expert}.gate_proj.lora_{side}.weight"] = torch.zeros(shape)
    with pytest.raises(WeightsError, match="gate and up fused and apart"):
        folder.load()
    twice = Folder(tmp_path / "twice", "down")
    for side in "AB":
        value = twice.tensors[f"{BLOCK}.lora_{side}.weight"]
        twice.tensors[f"{BLOCK}.base_layer.lora_{side}.weight"] = value.clone()
    with pytest.raises(WeightsError, match="down once more"):
        twice.load()


@pytest.mark.parametrize("sizes", [{"hidden": 24}, {"intermediate": 6}, {"experts": 8}])
@pytest.mark.parametrize("kind", ["fused", "modules"])
def test_another_base_models_sizes_are_refused(kind: str, sizes: dict[str, int]) -> None:
    problem = replace(PROBLEM, **sizes)  # type: ignore[arg-type]
    with pytest.raises((ShapeError, WeightsError), match="got"):
        load_adapter(GOLDEN / kind, 1, problem)


def test_fused_factors_that_may_lie_either_way_need_the_release(tmp_path: Path) -> None:
    """Up to PEFT 0.18 A had a fused weight's rows; where H = I nothing else tells."""
    problem = replace(PROBLEM, intermediate=H)
    folder = Folder(tmp_path, "down")
    for key, value in folder.tensors.items():
        folder.tensors[key] = value if "lora_B" in key else torch.ones(len(value), H)
    assert folder.load(problem).lora_a2.any()
    for version in ("0.18.1", None, "new"):
        folder.config["peft_version"] = version
        with pytest.raises(ConfigurationError, match=r"peft_version: got .*, need 0.19 or newer"):
            folder.load(problem)


def test_a_problem_without_adapters_and_values_too_large_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="lora: got none"):
        load_adapter(GOLDEN / "down", 1, replace(PROBLEM, lora="none"))
    with pytest.raises(ConfigurationError, match="problem: got None"):
        load_adapter(GOLDEN / "down", 1, None)  # type: ignore[arg-type]


def test_values_beyond_the_problems_dtype_are_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "down")
    folder.config["lora_alpha"] = 1e7
    half = replace(PROBLEM, dtype=torch.float16)
    assert folder.load().lora_b2.isfinite().all()
    with pytest.raises(WeightsError, match=r"lora_B.weight: got values .* in torch.float16"):
        folder.load(half)
    folder.config["lora_alpha"] = 8
    folder.tensors |= {k: 1e7 * a for k, a in folder.tensors.items() if "lora_A" in k}
    with pytest.raises(WeightsError, match=r"lora_A.weight: got values .* in torch.float16"):
        folder.load(half)
