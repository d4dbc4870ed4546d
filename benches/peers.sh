#!/usr/bin/env bash
# Measures this engine and installed peers on the same models, in turn in each round, and prints medians and
# ratios. Not part of the tests: it needs the peers, the models and a quiet machine.
#
#   benches/peers.sh [ROUNDS]                       (3 rounds if not given)
#
# Environment variables select the runs; what a variable does not name is skipped.
#   MODELS         folder with NAME/{bf16,f16,q8_0,q4_0,q4_1}.gguf, and perhaps NAME/ov_{f16,int8,int4}/ for OpenVINO (needed)
#   NAMES          models below it                          (smollm2)
#   LLAMA_BIN      folder with llama-bench and llama-batched-bench of llama.cpp
#   IK_BIN         the same of ik_llama.cpp
#   OV_PYTHON      a Python with openvino_genai
#   THREADS        threads of each engine                   (2)
#   WHAT           scenarios: pp,tg,bg,load                 (pp,tg,bg)
#   BATCHES        BxP+G, several with commas               (8x128+64,32x128+64,64x64+32)
#   RESULTS        JSON lines are appended there            (target/peers.jsonl)
#
# Classes: 16-bit (bf16, OpenVINO f16), 8-bit (q8_0, int8), 4-bit (q4_0 and q4_1, int4). "best" is the fastest peer of the
# class. llama.cpp runs without flash attention, which is faster there on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${MODELS:?a folder with models, see the head of this script}"
rounds=${1:-3} names=${NAMES:-smollm2} threads=${THREADS:-2} what=${WHAT:-pp,tg,bg}
batches=${BATCHES:-8x128+64,32x128+64,64x64+32} results=${RESULTS:-target/peers.jsonl}
python=${OV_PYTHON:-python3}
mkdir -p "$(dirname "$results")"
cargo build --release --quiet -p ascend-llm-tools --bin bench

ours() { # model, weights
    target/release/bench --model "$MODELS/$1/$2.gguf" --name "$1" --threads "$threads" --what "$what" --batches "$batches" \
        --reps 1 --json --round "$round" >>"$results"
}
peer() { # name, model, weights, extra arguments of benches/peers.py
    "$python" benches/peers.py run "$@" --models "$MODELS" --threads "$threads" --what "$what" --batches "$batches" \
        --round "$round" >>"$results"
}
for round in $(seq "$rounds"); do
    for name in $names; do
        for weights in bf16 q8_0 q4_0 q4_1; do
            [ -f "$MODELS/$name/$weights.gguf" ] || continue
            echo "round $round: $name $weights" >&2
            ours "$name" "$weights"
            [ -z "${LLAMA_BIN:-}" ] || peer llama.cpp "$name" "$weights" --bin "$LLAMA_BIN"
            [ -z "${IK_BIN:-}" ] || peer ik_llama.cpp "$name" "$weights" --bin "$IK_BIN"
        done
        for weights in f16 int8 int4; do
            [ -n "${OV_PYTHON:-}" ] && [ -d "$MODELS/$name/ov_$weights" ] || continue
            peer openvino "$name" "$weights"
        done
        # Without models of its own, OpenVINO reads the same files.
        for weights in f16 q8_0 q4_0; do
            [ -n "${OV_PYTHON:-}" ] && [ ! -d "$MODELS/$name/ov_f16" ] && [ -f "$MODELS/$name/$weights.gguf" ] || continue
            peer openvino "$name" "$weights"
        done
    done
done
"$python" benches/peers.py report "$results"
