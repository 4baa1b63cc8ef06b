#!/usr/bin/env bash
# Every check and measurement that needs a GPU, on a bare machine: no network, no Ray, nothing installed.
#
#   benchmarks/gpu/run.sh [--out FOLDER] [--parts a,b] [--seconds N] [--device cpu --sizes toy]
#
# PYTHON chooses the interpreter. Packages in build/gpu-site, or packed in build/gpu-site.tar.xz, are used if they are
# there (docs/gpu-measurements.md).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
python="${PYTHON:-python3}"
site="$root/build/gpu-site"
names="$root/build/gpu-path"
if [ -f "$site.tar.xz" ] && [ ! -d "$site" ]; then mkdir -p "$site" && tar -xJf "$site.tar.xz" -C "$site"; fi
if [ -d "$site" ]; then export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$site"; fi
"$python" "$here/build.py"
mkdir -p "$names"
ln -sfn "$root" "$names/tiermoe"  # the clone under the name of its package
export PYTHONPATH="$names${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
cd "$root"
exec "$python" -m tiermoe.benchmarks.gpu --spent "$SECONDS" "$@"
