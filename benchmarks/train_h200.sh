#!/bin/sh
# Pieces of train_h200.py in the background, one a GPU, each with a log in $WORK/logs; they outlive the shell.
#
#   WORK=... TARGET=... OLD=... PROMPTS=... sh benchmarks/train_h200.sh data GPU NAME SEED TOKENS SECONDS [FLAGS]
#   ... sh benchmarks/train_h200.sh main GPU,... SECONDS [FLAGS]     train on these GPUs, then measure old and new
#   ... sh benchmarks/train_h200.sh ablate GPU SECONDS VARIANT,... [FLAGS]
#   ... sh benchmarks/train_h200.sh state                                              what runs, and the logs' ends
set -eu
here=$(cd "$(dirname "$0")" && pwd)
script="python3 $here/train_h200.py"
pair="--work $WORK --target $TARGET --prompts $PROMPTS"
mkdir -p "$WORK/logs"

background() { # GPU NAME COMMAND
  CUDA_VISIBLE_DEVICES=$1 setsid sh -c "$3" >"$WORK/logs/$2.log" 2>&1 </dev/null &
  echo "$!" >"$WORK/logs/$2.pid"
  echo "$2 runs on GPU $1, log in $WORK/logs/$2.log"
}

piece=$1
shift
case $piece in
data)
  gpu=$1 name=$2 seed=$3 tokens=$4 seconds=$5
  shift 5
  background "$gpu" "data-$name" \
    "$script data $pair --name $name --seed $seed --tokens $tokens --stop-after $seconds -- $*"
  ;;
main)
  gpus=$1 seconds=$2
  shift 2
  count=$(echo "$gpus" | tr , '\n' | wc -l)
  background "$gpus" main "$script train $pair --name main --seconds $seconds --processes $count -- $* &&
    $script evaluate $pair --draft $OLD --name old &&
    $script evaluate $pair --draft $WORK/runs/main/drafter --name main && $script table $pair"
  ;;
ablate)
  gpu=$1 seconds=$2 variants=$3
  shift 3
  background "$gpu" "ablate-$gpu" "$script ablate $pair --old $OLD --seconds $seconds --variants $variants \
    --sets gsm8k_test100,humaneval --count 50 --budgets chain,16,64 -- $*"
  ;;
state)
  for log in "$WORK"/logs/*.log; do
    pid=$(cat "${log%.log}.pid")
    kill -0 "$pid" 2>/dev/null && state=running || state=ended
    echo "== $(basename "$log" .log): $state"
    tail -n "${LINES_EACH:-3}" "$log"
  done
  ;;
*)
  echo "no piece $piece: see the top of this script" >&2
  exit 2
  ;;
esac
