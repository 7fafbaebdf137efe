#!/usr/bin/env bash
# Installs the pinned torch where there is no GPU, without CUDA's gigabytes: if what pip would install brings
# NVIDIA's libraries, the CPU build of the same version is taken from PyTorch's own index instead.
# With a GPU, or when pip finds a CPU build anyway, it does nothing: the next step installs torch like the rest.
# Arguments: the environment's python, then options of pip.
set -euo pipefail
python=$1
shift
torch=$(grep '^torch==' requirements/runtime.txt)
cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
[ "$(uname)" = Linux ] || exit 0
command -v nvidia-smi >/dev/null && exit 0
report=$(mktemp)
trap 'rm -f "$report"' EXIT
"$python" -m pip install --quiet --disable-pip-version-check --dry-run --report "$report" "$torch"
if grep -q '"name": "nvidia-' "$report"; then
    echo "no GPU here: installing the CPU build of $torch"
    "$python" -m pip install "$@" --disable-pip-version-check --index-url "$cpu_index" "$torch" ||
        echo "that index cannot be reached; pip's own choice follows, with CUDA libraries"
fi
