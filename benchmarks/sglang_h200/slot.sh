#!/bin/sh
# One stay on a GPU machine: SGLang 0.5.16 in full, then 0.5.17 in what time is left.
#   slot.sh STAGE OUT [SECONDS]      STAGE holds kit/, target/ and prompts/
stage=$1 out=$2 seconds=${3:-228} begun=$(date +%s)
run() { python3 benchmarks/sglang_h200/run.py --kit "$stage/kit" --target "$stage/target" --drafter src/ddtree/demo/drafter \
    --prompts "$stage/prompts" --site "$stage/site" "$@" 2>&1; }
run --out "$out" --seconds $((seconds - 55)) --auto --only ar dflash chain tree32 tree64 tree16 ar-exact tree32-exact \
    ar-triton triton16-page64 ar-flashinfer flashinfer16 fa3-page64 sync16 small-pool
wheel=$(ls "$stage"/kit/sglang-0.5.17-*.whl 2>/dev/null)
left=$((seconds - $(date +%s) + begun - 6))
if [ -n "$wheel" ] && [ "$left" -ge 40 ]; then
    run --out "$out/v0517" --overlay "$wheel" --seconds "$left" --repeats 1 --only ar dflash chain tree32
else
    echo "0.5.17 left out: wheel '$wheel', $left s left"
fi
