"""Adds a built site to a folder of versions: `python docs/publish.py out/docs out/site`.

    out/site/0.2.0/       the site, copied from out/docs
    out/site/versions.js  the versions in the folder, newest first, for the version switcher
    out/site/index.html   a list of the versions, newest first

Each release adds its folder. Pages of older versions read the same versions.js, so they also offer
newer versions.
"""

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_VERSION = re.compile(r"\d+(?:\.\d+)+\w*")


def version_of_checkout() -> str:
    """Return the version in setup.py."""
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    match = re.search(r'^    version="([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise SystemExit("setup.py states no version")
    return match[1]


def publish(built: Path, site: Path, version: str) -> list[str]:
    """Copy a built site into `site`, update its list of versions, and return that list."""
    if not (built / "index.html").is_file():
        raise SystemExit(f"{built} has no index.html: run `make docs` first")
    shutil.rmtree(site / version, ignore_errors=True)
    shutil.copytree(built, site / version)
    versions = [folder.name for folder in site.iterdir() if _VERSION.fullmatch(folder.name)]
    versions.sort(key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    text = f"window.MODULAR_KERNEL_VERSIONS = {json.dumps(versions)};\n"
    (site / "versions.js").write_text(text, encoding="utf-8")
    links = "\n".join(f'<li><a href="{name}/index.html">{name}</a></li>' for name in versions)
    (site / "index.html").write_text(_PAGE.format(links=links), encoding="utf-8")
    return versions


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>modular_kernel</title>
<style>
body {{ font: 16px/1.6 system-ui, sans-serif; margin: 3em auto; max-width: 40em; }}
body {{ padding: 0 1em; }}
</style>
</head>
<body>
<h1>modular_kernel</h1>
<p>Documentation by version, the newest first:</p>
<ul>
{links}
</ul>
</body>
</html>
"""


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python docs/publish.py BUILT_SITE FOLDER_OF_VERSIONS")
    listed = publish(Path(sys.argv[1]), Path(sys.argv[2]), version_of_checkout())
    sys.stdout.write(f"{', '.join(listed)}\n")
