"""Entry point of `python -m modular_kernel VERB`, which is equivalent to `mk VERB`."""

from modular_kernel.cli.main import run

if __name__ == "__main__":
    run()
