"""Rank shares of a checkpoint: the outputs of all ranks sum to the output of the layer, and the
bytes and the peak memory of a rank are bounded.
"""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_checkpoint_values import FAMILY_BY_FORMAT, REFERENCE_PARTS, dequantize_w1_w2

import modular_kernel as mk
from modular_kernel.catalog import this_machine
from modular_kernel.checkpoints import loading
from modular_kernel.checkpoints.loading import LoadedExperts
from modular_kernel.checkpoints.safetensors_files import TensorFiles
from modular_kernel.spec.placement import Placement
from modular_kernel.testing.checkpoints.formats import fp8_block
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import Sample, write

EP_TP_SIZES = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))  # numbers of (EP ranks, TP ranks)
# In these schemes, a rank computes activation scales only from its share, so the sum of outputs
# differs from the output of a single rank by quantization errors. In per-channel schemes, an
# activation scale covers a row, but each TP rank has only a part of the row in GEMM 2. In the
# per-tensor scheme, an activation scale covers all rows of a rank.
PER_CHANNEL_SCHEMES = ("fp8_w8a8_channel", "int8_w8a8_channel")
PER_TENSOR_SCHEME = "fp8_w8a8_tensor"


def load_all_ranks(
    sample: Sample, ep_tp_sizes: tuple[int, int], dtype: str | None = None
) -> list[LoadedExperts]:
    ep, tp = ep_tp_sizes
    return [
        mk.load_experts(sample.folder, 0, ep=(e, ep), tp=(t, tp), dtype=dtype)
        for e, t in product(range(ep), range(tp))
    ]


def sum_rank_outputs(sample: Sample, loaded: list[LoadedExperts], tokens: int = 16) -> torch.Tensor:
    """Return the sum of the ranks' outputs. Every rank gets all tokens and skips remote experts."""
    x, weights, ids = sample.inputs(tokens)
    total = torch.zeros(tokens, sample.w2.shape[1], dtype=torch.float64)
    for rank in loaded:
        problem, local_weights = rank.partial(tokens)
        kernel = mk.make_kernel(*REFERENCE_PARTS, problem, machine=this_machine(device="cpu"))
        total += kernel(x.to(problem.dtype), local_weights, mk.Routing(weights, ids)).double()
    return total


def count_expert_bytes(sample: Sample) -> int:
    """Return the bytes of the layer's experts in the files, without the redundant weight_shape."""
    total = 0
    for path in sample.folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if not name.endswith(("weight_shape", "layernorm.weight")):
                    total += file.get_tensor(name).nbytes
    return total


@pytest.mark.share(3)  # each run selects about a third of the parameters
@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_rank_outputs_sum_to_the_layer_and_shares_concatenate(kind: str, tmp_path: Path) -> None:
    sample = write(
        tmp_path, FAMILY_BY_FORMAT.get(kind, "mixtral"), kind, intermediate=512, shards=2
    )
    one_rank_output = sum_rank_outputs(sample, load_all_ranks(sample, (1, 1), "float32"))
    expected, scheme = sample.expected_output(*sample.inputs(16)), CHECKPOINT_FORMATS[kind].scheme
    w1, w2 = dequantize_w1_w2(mk.load_experts(tmp_path, 0))
    total_bytes = count_expert_bytes(sample)
    for ep, tp in EP_TP_SIZES:
        loaded = load_all_ranks(sample, (ep, tp), "float32")
        y = sum_rank_outputs(sample, loaded)
        if scheme == PER_TENSOR_SCHEME or (tp > 1 and scheme in PER_CHANNEL_SCHEMES):
            assert float((y - expected).norm() / expected.norm()) <= CHECKPOINT_FORMATS[kind].bound
        else:
            assert float((y - one_rank_output).norm() / one_rank_output.norm()) <= 1e-5
        assert len({str(vars(rank.weights)["a2_scale"]) for rank in loaded}) == 1
        for rank in loaded:
            assert rank.bytes_read <= 1.05 * total_bytes / (ep * tp)
            assert (rank.ep[1], rank.tp[1]) == (ep, tp)
        # The concatenated shares equal all weights bit for bit.
        shares = [dequantize_w1_w2(rank) for rank in loaded]
        first_ranks = range(0, ep * tp, tp)  # of each EP rank
        gate_up = [
            torch.cat([w1.unflatten(1, (2, -1)) for w1, _ in shares[rank : rank + tp]], 2)
            for rank in first_ranks
        ]
        down = [torch.cat([w2 for _, w2 in shares[rank : rank + tp]], 2) for rank in first_ranks]
        assert torch.equal(torch.cat(gate_up).flatten(1, 2), w1)
        assert torch.equal(torch.cat(down), w2)


def test_bytes_read_counts_actual_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = write(tmp_path, "mixtral", "bf16")
    reads, original_read = [], TensorFiles.read

    def read_and_count(self: TensorFiles, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        tensor = original_read(self, name, box)
        reads.append((name, tensor.nbytes))
        return tensor

    monkeypatch.setattr(TensorFiles, "read", read_and_count)
    loaded = mk.load_experts(tmp_path, 0, ep=(1, 4))
    assert {name.split(".")[5] for name, _ in reads} == {"1"}
    summary = f"1 of 4 experts in none, ep=(1, 4), tp=(0, 1), bytes_read={loaded.bytes_read}"
    assert repr(loaded) == f"LoadedExperts({summary})"
    assert loaded.bytes_read == sum(n for _, n in reads) == count_expert_bytes(sample) // 4


@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_reading_in_pieces_gives_equal_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = "step3p5" if kind == "deepseek fp8" else FAMILY_BY_FORMAT.get(kind, "mixtral")
    sample = write(tmp_path, family, kind, intermediate=512)
    in_one_read = mk.load_experts(tmp_path, 0, tp=(1, 2))
    monkeypatch.setattr(loading, "_VALUES_PER_STEP", 1 << 12)
    in_pieces = mk.load_experts(tmp_path, 0, tp=(1, 2))
    for name, tensor in vars(in_one_read.weights).items():
        tensor_in_pieces = getattr(in_pieces.weights, name)
        assert (tensor_in_pieces is None) == (tensor is None)
        assert tensor is None or torch.equal(tensor_in_pieces.float(), tensor.float())
    assert in_pieces.bytes_read <= 1.05 * count_expert_bytes(sample) / 2


@pytest.mark.parametrize("family", ["gpt_oss", "openai_privacy_filter"])
def test_b2_is_nonzero_on_one_tp_rank_only(family: str, tmp_path: Path) -> None:
    sample = write(tmp_path, family, "bf16")
    loaded = load_all_ranks(sample, (1, 4), "float32")
    assert [bool(rank.weights.b2.any()) for rank in loaded] == [True, False, False, False]
    x, weights, ids = sample.inputs(16)
    torch.testing.assert_close(
        sum_rank_outputs(sample, loaded),
        sample.expected_output(x, weights, ids),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("kind", "intermediate", "tp", "scheme"),
    [
        ("deepseek fp8", 192, 1, "fp8_w8a8_block:block=64x128"),
        ("deepseek fp8", 192, 2, "fp8_w8a8_block:block=32x32"),
        ("deepseek fp8", 384, 2, "fp8_w8a8_block:block=64x64"),
        ("deepseek fp8", 512, 2, "fp8_w8a8_block"),
        ("deepseek fp8, UE8M0", 192, 3, "fp8_w8a8_block:block=64x64"),
        ("awq", 192, 2, "int4_w4a16_group:group=32,zero_points=true"),
        ("gptq, zero points", 192, 2, "int4_w4a16_group:group=32,zero_points=true"),
        ("gptq int8", 192, 6, "int8_w8a16_group:group=32"),
        ("compressed int4, zero points", 576, 2, "int4_w4a16_group:group=32,zero_points=true"),
        ("mxfp4", 192, 3, "mxfp4_w4a16"),
    ],
)
def test_scale_tiles_are_split_to_fit_a_share(
    kind: str, intermediate: int, tp: int, scheme: str, tmp_path: Path
) -> None:
    sample = write(tmp_path, FAMILY_BY_FORMAT.get(kind, "mixtral"), kind, intermediate=intermediate)
    loaded = load_all_ranks(sample, (1, tp))
    assert {rank.problem_fields["quant"] for rank in loaded} == {scheme}
    shares = [dequantize_w1_w2(rank) for rank in loaded]
    w1 = torch.cat([w1.unflatten(1, (2, -1)) for w1, _ in shares], 2).flatten(1, 2)
    torch.testing.assert_close(w1, sample.w1, rtol=1e-6, atol=1e-12)
    w2 = torch.cat([w2 for _, w2 in shares], 2)
    torch.testing.assert_close(w2, sample.w2, rtol=1e-6, atol=1e-12)


def test_scale_tile_across_gate_and_up_is_split(tmp_path: Path) -> None:
    """In this format, gate and up are fused into 2I rows before they are divided into fp8 blocks.
    If I is not a multiple of the block size, one block has rows of both gate and up.
    """
    generator = torch.Generator().manual_seed(0)
    sample = write(tmp_path, "mistral4", "bf16", intermediate=192)
    prefix, quantize_random = "model.layers.0.mlp.experts", fp8_block(torch.float32)
    gate_up = [quantize_random(384, 128, generator, 1.0) for _ in range(4)]
    down = [quantize_random(128, 192, generator, 1.0) for _ in range(4)]
    tensors = {}
    for name, matrices in (("gate_up_proj", gate_up), ("down_proj", down)):
        tensors[f"{prefix}.{name}"] = torch.stack([m.tensors["weight"] for m in matrices])
        scales = torch.stack([m.tensors["weight_scale_inv"] for m in matrices])
        tensors[f"{prefix}.{name}_scale_inv"] = scales
    save_file(tensors, tmp_path / "model.safetensors")
    config = sample.config | {"quantization_config": CHECKPOINT_FORMATS["deepseek fp8"].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for tp in (1, 2, 3):
        shares = [dequantize_w1_w2(rank) for rank in load_all_ranks(sample, (1, tp))]
        w1 = torch.cat([w1.unflatten(1, (2, -1)) for w1, _ in shares], 2).flatten(1, 2)
        torch.testing.assert_close(w1, torch.stack([m.values for m in gate_up]), rtol=1e-6, atol=0)


def test_placements_select_the_experts_of_a_rank(tmp_path: Path) -> None:
    sample = write(tmp_path, "qwen3_moe", "awq")
    placement = Placement.round_robin(4, 2).with_copies({3: (0,)})
    loaded = [mk.load_experts(tmp_path, 0, ep=(r, 2), placement=placement) for r in range(2)]
    assert [len(rank.weights.w1) for rank in loaded] == [3, 2]
    torch.testing.assert_close(
        dequantize_w1_w2(loaded[0])[1], sample.w2[[0, 2, 3]], rtol=1e-6, atol=1e-12
    )
    assert loaded[1].problem(8).parallel.placement == placement
    assert loaded[1].partial(8)[1].expert_map.tolist() == [-1, 0, -1, 1]


# Loads one rank's share with limited memory. The data segment is limited to its current size, plus
# the size of the mapped checkpoint files, plus sys.argv[2] bytes.
_LOAD_SHARE = """
import resource, sys
from pathlib import Path
import torch
import modular_kernel as mk
folder, allowance, tp = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
mk.load_experts(folder / "warm", 0)
(data,) = (l.split()[1] for l in open("/proc/self/status") if l.startswith("VmData"))
mapped = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
limit = int(data) * 1024 + mapped + allowance
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
loaded = mk.load_experts(folder, 0, tp=(0, tp))
print(sum(t.nbytes for t in vars(loaded.weights).values() if t is not None))
"""


@pytest.mark.share(3)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["bf16", "awq"])
def test_peak_memory_is_at_most_the_share_plus_one_matrix(kind: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", kind, experts=4, hidden=1024, intermediate=2048)
    write(tmp_path / "warm", "mixtral", kind)

    def load_with(allowance: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _LOAD_SHARE, str(tmp_path), str(allowance), "2"]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    bits = {"bf16": 16, "awq": 4}[kind]
    share_bytes = 4 * 3 * 1024 * 2048 * bits // 8 // 2
    # Loading unpacks one matrix to int32 and makes a reordered copy of it.
    matrix_bytes = 1024 * 2048 * 2 * 4
    loaded = load_with(share_bytes + share_bytes // 8 + matrix_bytes)
    assert loaded.returncode == 0, loaded.stderr[-500:]
    assert share_bytes <= int(loaded.stdout) <= 1.2 * share_bytes
    assert load_with(share_bytes // 2).returncode != 0
