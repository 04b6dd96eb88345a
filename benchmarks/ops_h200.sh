#!/bin/sh
# The operations wing's evidence on a GPU machine without network; see ops_h200.py.
#   ops_h200.sh prepare STAGE [HOME]      once: STAGE holds wheels/, kit/, target/ and prompts/
#   ops_h200.sh start OUT JOB[:SECONDS]... in the background, one after the other, on the GPU of CUDA_VISIBLE_DEVICES
#   ops_h200.sh wait OUT SECONDS          until all that was started is done, or the time is up; prints how steps ended
#   ops_h200.sh pack OUT FILE.tar.gz      results so far, without what can be made again
# JOB is verify, sweep-native, sweep-sglang, peer or load; OPS_FLAGS holds more flags for ops_h200.py, OPS_HOME its home.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
what=${1:-}
[ $# -ge 2 ] || { sed -n 3,7p "$0"; exit 2; }
home=${OPS_HOME:-/opt/ddtree-ops}
export OPS_FLAGS="${OPS_FLAGS:-}"
case $what in
prepare) exec python3 "$here/ops_h200.py" prepare --stage "$2" --home "${3:-$home}" ;;
start)
    mkdir -p "$2"
    out=$(cd "$2" && pwd)
    shift 2
    for job in "$@"; do : >"$out/${job%%:*}.running"; done
    # A session of its own: it goes on when the call that started it ends.
    setsid sh -c 'here=$1 home=$2 out=$3; shift 3
        for job in "$@"; do
            name=${job%%:*} seconds=${job##*:}
            [ "$seconds" = "$name" ] && seconds=500
            timeout $((seconds + 60)) python3 "$here/ops_h200.py" "$name" --home "$home" --out "$out" \
                --seconds "$seconds" $OPS_FLAGS >"$out/$name.log" 2>&1
            rm -f "$out/$name.running"
        done' sh "$here" "$home" "$out" "$@" </dev/null >/dev/null 2>&1 &
    ;;
wait)
    seconds=$3
    while [ "$seconds" -gt 0 ] && ls "$2"/*.running >/dev/null 2>&1; do sleep 2; seconds=$((seconds - 2)); done
    for log in "$2"/*.log; do echo "== $log"; grep -h '^{"step"\|steps' "$log" | cut -c -300; done
    ls "$2"/*.running 2>/dev/null || true
    ;;
pack)
    tar -C "$2" --exclude='./sweep-sglang/sglang-h200' --exclude='*.part' -czf "$3" . && ls -l "$3"
    ;;
*) sed -n 3,7p "$0"; exit 2 ;;
esac
