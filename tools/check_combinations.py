"""Is this pairing valid, and if not, why? `mk check`, straight from a checkout.

python tools/check_combinations.py --pf-type MoEPrepareAndFinalizeNoEP --experts-type TritonExperts
"""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if not entry_points(group="modular_kernel.parts"):  # not installed: write metadata beside the code
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info"], cwd=ROOT, check=True)

from modular_kernel.cli.main import run

if __name__ == "__main__":
    run(["check", *sys.argv[1:]])
