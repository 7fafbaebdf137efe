#!/usr/bin/env bash
# Builds the wheel with the C++ operations for every level of CPUs into dist/, installs it into a fresh environment
# beside the pinned dependencies, where no compiler is to be found, and asks it something.
set -euo pipefail
python=$1
out=$PWD/dist
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
cp -r pyproject.toml README.md LICENSE weft "$work/source"
log=$work/build.log
echo "compiling the C++ operations for all levels of CPUs; minutes of CPU time, unless they are compiled already"
PYTHONPATH=$work/source "$python" -m weft build-ops --wheel "$work/source/weft/ops/cpu/prebuilt" >"$log" 2>&1 || { tail -n 30 "$log"; exit 1; }
tag=$(tail -n 1 "$log")
"$python" -m build --wheel --no-isolation --outdir "$work/dist" -C--build-option=--plat-name="$tag" "$work/source" \
    >"$log" 2>&1 || { tail -n 30 "$log"; exit 1; }
"$python" -m venv "$work/venv"
# The dependencies are those of the environment that built it; only the wheel itself is new.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "$work"/dist/weft-*.whl
here=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$site" >"$here/zz_dependencies.pth"
cd "$work"
unset PYTHONPATH
export WEFT_OPS_CACHE=$work/cache CXX=no-compiler
"$work/venv/bin/python" - <<'PY'
import pathlib, sys
import weft
assert pathlib.Path(weft.__file__).is_relative_to(sys.prefix), weft.__file__
from weft.ops import cpu
from weft.ops.cpu import build, prebuilt
assert list(build.SOURCES.glob("*.cpp")) and list(build.SOURCES.glob("*.h")), "the C++ sources are not in the wheel"
for level in prebuilt.levels_here():
    assert (prebuilt.FOLDER / level.name / prebuilt.LIBRARY).exists(), f"the wheel has no library for {level.name}"
if prebuilt.levels_here()[-1].needs <= prebuilt.cpu_features():
    assert cpu.load(), "the wheel's library does not load"
    print("C++ operations:", build.find().parent.name, *cpu.capabilities())
PY
"$work/venv/bin/weft" --version
"$work/venv/bin/weft" models
answer=$("$work/venv/bin/weft" generate spool-text --temperature 0 \
    "Tom has 12 apples and buys 7 more. How many apples does he have?")
echo "$answer"
grep -q '#### 19' <<<"$answer"
mkdir -p "$out"
rm -f "$out"/weft-*.whl
cp "$work"/dist/weft-*.whl "$out"
echo "wheel: ok, $(cd "$out" && ls -sh weft-*.whl)"
