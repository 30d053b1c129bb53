"""Compile every kernel in CuTe DSL ahead of time, and say where its object is kept."""

import sys

from experts.cutlass import fp4_product, product


def main() -> None:
    for kernel in (*product.KERNELS.values(), fp4_product.KERNEL):
        sys.stdout.write(f"{kernel.name} for {kernel.arch}: {kernel.keep()}\n")


if __name__ == "__main__":
    main()
