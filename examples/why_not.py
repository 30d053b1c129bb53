"""List the pairings that are valid for a layer on another machine, and why one is refused.

    python examples/why_not.py

The checks need neither the machine nor a GPU.
"""

import modular_kernel as mk


def main() -> None:
    """Check every pairing for a quantized layer on an H200."""
    problem = mk.Problem(
        tokens=256,
        hidden=2048,
        intermediate=768,
        experts=128,
        top_k=8,
        quant="fp8_w8a8_block",
        graph=True,  # calls must be capturable in a CUDA graph
    )
    h200 = mk.Machine("cuda", (9, 0), frozenset({"triton"}))
    verdicts = mk.check_all(problem, h200)

    valid = [verdict.pairing for verdict in verdicts if verdict.ok]
    print(f"{len(valid)} of {len(verdicts)} pairings are valid:")
    for pairing in valid:
        print(f"  {pairing}")

    refused = mk.check("BatchedPrepareAndFinalize", "TritonExperts", problem, h200)
    print(f"\n{refused.pairing} is refused:")
    for rejection in refused.rejections:
        print(f"  {rejection.rule}: got {rejection.got}, need {rejection.need}. {rejection.hint}")

    try:
        mk.make_kernel("BatchedPrepareAndFinalize", "TritonExperts", problem)
    except mk.IncompatibleError as error:  # lists the same reasons; no part has been constructed
        print(f"\nmake_kernel raises {type(error).__name__}")


if __name__ == "__main__":
    main()
