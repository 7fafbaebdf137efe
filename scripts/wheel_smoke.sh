#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh environment beside the pinned dependencies, and asks it something.
set -euo pipefail
python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build --wheel --no-isolation --outdir "$work/dist" . >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log"; exit 1; }
"$python" -m venv "$work/venv"
# The dependencies are those of the environment that built it; only the wheel itself is new.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "$work"/dist/weft-*.whl
here=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$site" >"$here/zz_dependencies.pth"
cd "$work"
"$work/venv/bin/python" - <<'PY'
import pathlib, sys
import weft
assert pathlib.Path(weft.__file__).is_relative_to(sys.prefix), weft.__file__
from weft.ops.cpu import build
assert list(build.SOURCES.glob("*.cpp")) and list(build.SOURCES.glob("*.h")), "the C++ sources are not in the wheel"
PY
"$work/venv/bin/weft" --version
"$work/venv/bin/weft" models
answer=$("$work/venv/bin/weft" generate spool-text --temperature 0 \
    "Tom has 12 apples and buys 7 more. How many apples does he have?")
echo "$answer"
grep -q '#### 19' <<<"$answer"
echo "wheel: ok"
