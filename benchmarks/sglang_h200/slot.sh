#!/bin/sh
# Pieces of work on a GPU machine, side by side on the GPUs of CUDA_VISIBLE_DEVICES:
#   slot.sh "NAME ..." STAGE OUT [SECONDS]      STAGE holds kit/, target/ and prompts/; all is ended after SECONDS
# NAME is one of texts draws pool v0517 flashinfer moe moe2 (untimed), speeds auto (a GPU of its own each).
# Results and logs of all come to OUT/NAME-NAME.tar.gz, renewed while they run; exit code 0 only where nothing failed.
here=$(dirname "$0") names=$1 stage=$2 out=$3 seconds=${4:-560}
joined=$(echo $names | tr ' ' '-') && work=$stage/work/$joined && mkdir -p "$work" "$out" || exit 2
slot() {
    case $1 in
    texts) echo --pieces texts prefix tau info --only ar dflash chain off tree16 tree32 tree64 ar-triton triton16 \
        triton16-page64 fa3-page64 eager16 sync16 window ar-exact tree32-exact window-exact ;;
    draws) echo --pieces draws --only ar-exact tree32-exact --draws 960 ;;
    pool) echo --pieces retraction abort soak --only tree32 small-pool retract16 ;;
    v0517) echo --pieces texts info grammar --only ar dflash chain tree16 tree32 triton16-page64 ar-triton \
        ar-grammar grammar16 --start-seconds 380 --overlay "$stage"/kit/sglang-0.5.17-*.whl ;;
    flashinfer) echo --pieces texts --only ar-fa2 fa2-16 fa2-16-page64 $(test ! -f "$stage/kit/flashinfer_headers.tar.xz" \
        || echo ar-flashinfer flashinfer16) ;;
    moe) echo --pieces texts experts --only moe-ar moe-16 moe-count moe-ar-triton moe-16-triton moe-ar-exact \
        moe-16-exact ;;
    moe2) echo --pieces texts ranks --together 2 --start-seconds 120 --only tp2-ar tp2-16 ep2-ar ep2-16 \
        tp2-ar-triton tp2-16-triton tp2-ar-exact tp2-16-exact ;;
    speeds) echo --pieces speeds info --only ar dflash tree8 tree16 tree32 tree64 tree32-split chain ;;
    auto) echo --pieces texts info auto --only ar dflash tree8 tree16 tree32 tree64 tree32-mask fa3-page64 ;;
    *) return 2 ;;
    esac
}
for name in $names; do slot "$name" >/dev/null || { sed -n 2,5p "$0"; exit 2; }; done
pack() {
    tar -C "$work/.." -czf "$work.part" "$joined" 2>/dev/null # a log that grows meanwhile is no fault
    cp "$work.part" "$out/$joined.part" && mv "$out/$joined.part" "$out/$joined.tar.gz"
}
for name in $names; do
    python3 "$here/run.py" --slot "$name" --kit "$stage/kit" --sites "$stage/sites" --target "$stage/target" \
        --drafter "$here/../../src/ddtree/demo/drafter" --prompts "$stage/prompts" --out "$work/$name" \
        --seconds "$seconds" $(slot "$name") >"$work/$name.log" 2>&1 &
    pids="$pids $!"
done
(while sleep 20; do pack; done) & packer=$!
trap 'kill $packer' EXIT
worst=0
for pid in $pids; do wait "$pid" || worst=1; done
kill $packer; wait $packer 2>/dev/null; trap - EXIT
pack
for name in $names; do grep '^== ' "$work/$name.log" || echo "== $name: no summary, see $joined.tar.gz"; done
exit $worst
