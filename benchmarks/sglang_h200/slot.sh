#!/bin/sh
# One piece of work on a GPU machine, to be called once for each, so that none waits for another:
#   slot.sh speeds|texts|draws|pool|auto|soak|flashinfer|v0517 STAGE OUT [SECONDS]      STAGE holds kit/, target/ and prompts/
what=$1 stage=$2 out=$3
run() { seconds=$1; shift; python3 benchmarks/sglang_h200/run.py --kit "$stage/kit" --target "$stage/target" \
    --drafter src/ddtree/demo/drafter --prompts "$stage/prompts" --out "$out/$what" --seconds "$seconds" "$@" 2>&1; }
case $what in
speeds) run "${4:-240}" --site "$stage/site" --pieces speeds info --only ar dflash tree32 tree64 tree16 tree8 tree32-split ;;
texts) run "${4:-200}" --site "$stage/site" --pieces texts prefix --only ar dflash chain off tree16 tree32 tree64 ar-triton \
    triton16 triton16-page64 fa3-page64 eager16 sync16 window ar-exact tree32-exact ;;
draws) run "${4:-240}" --site "$stage/site" --pieces draws --only ar-exact tree32-exact ;;
pool) run "${4:-200}" --site "$stage/site" --pieces retraction texts abort --only ar tree32 small-pool retract16 ;;
auto) run "${4:-300}" --site "$stage/site" --pieces speeds auto --repeats 1 --only ar dflash tree16 tree32 tree64 ;;
soak) run "${4:-300}" --site "$stage/site" --pieces soak --only tree32 ;;
flashinfer) run "${4:-200}" --site "$stage/site" --pieces texts --only ar-flashinfer flashinfer16 ;; # wants CUTLASS headers
v0517) run "${4:-300}" --site "$stage/site-v0517" --overlay "$(ls "$stage"/kit/sglang-0.5.17-*.whl)" --start-seconds 200 \
    --pieces speeds texts info --repeats 1 --only ar dflash chain tree32 ;;
*) sed -n 2,3p "$0"; exit 2 ;;
esac
