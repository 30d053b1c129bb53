"""The PTX that unpacks 4-bit weights, in an emulator, because the interpreter cannot run PTX."""

import numpy as np
import pytest

from experts.triton.kernels import unpack_w4

_WORDS = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _run_ptx(code: str, words: np.ndarray) -> list[np.ndarray]:
    """Run inline assembly, and return its eight 16-bit results, the halves of four registers."""
    registers: dict[str, np.ndarray] = {"$4": words}

    def read_operand(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for instruction in code.strip("{} ").split(";"):
        operation, _, operands = instruction.strip().partition(" ")
        if operation in ("", ".reg"):
            continue
        target, *names = operands.split(", ")
        assert target != "$4"
        registers[target] = _compute(operation, names, [read_operand(name) for name in names])
    outputs = [registers[f"${j}"] for j in range(4)]
    return [(output >> shift).astype(np.uint16) for shift in (0, 16) for output in outputs]


def _compute(operation: str, names: list[str], operands: list[np.ndarray]) -> np.ndarray:
    match operation:
        case "mov.b32":
            return operands[0]
        case "and.b32":
            return operands[0] & operands[1]
        case "shr.b32":
            return operands[0] >> operands[1]
        case "shl.b32":
            return operands[0] << operands[1]
        case "mul.lo.u32":
            return operands[0] * operands[1]
        case "lop3.b32":
            assert names[3] == "0xEA"
            return (operands[0] & operands[1]) | operands[2]
        case "fma.rn.f16x2":
            a, b, c = (np.reshape(np.uint32(x), (-1, 1)).view(np.float16) for x in operands)
            return (a * b + c).view(np.uint32)[:, 0]
    raise AssertionError(operation)


def _bf16_to_float64(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _fp16_to_float64(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float64)


@pytest.mark.parametrize("j", range(8))
def test_every_nibble_is_unpacked(j: int) -> None:
    code = (_WORDS >> np.uint32(4 * j)) & 15
    e2m1 = np.where(code < 8, 1, -1) * _E2M1[code & 7]
    for assembly, to_float64, expected in (
        (unpack_w4._INTEGER_BF16, _bf16_to_float64, code * 2.0 ** (4 * (j % 2) - 133)),
        (unpack_w4._INTEGER_FP16, _fp16_to_float64, code - 8.0),
        (unpack_w4._E2M1_BF16, _bf16_to_float64, e2m1 * 2.0**-126),
        (unpack_w4._E2M1_FP16, _fp16_to_float64, e2m1 * 2.0**-14),
    ):
        actual = to_float64(_run_ptx(assembly.value, _WORDS)[j])
        np.testing.assert_array_equal(actual, expected)
