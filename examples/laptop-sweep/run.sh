#!/bin/sh
# The whole path on a laptop: deploy, verify, sweep, grade, report. Ends with what it found, and with the service stopped.
#
#   sh run.sh [OUT]      OUT: folder for the results, default ./results; what is there already is not measured again
set -eu

here=$(cd "$(dirname "$0")" && pwd)
out=${1:-results}
url=http://127.0.0.1:8123
ddtree=${DDTREE:-ddtree}

trap '$ddtree deploy stop "$here/deployment.toml" >/dev/null' EXIT

$ddtree deploy apply "$here/deployment.toml" --note "laptop sweep"
$ddtree verify "$here/deployment.toml" --long-tokens 0
$ddtree sweep "$here/sweep.toml" --out "$out/sweep" --resume
$ddtree grade --problems "$here/problems.jsonl" --base-url $url --variant ar,tree:16 --max-tokens 160 --out "$out/grade" --resume
$ddtree report "$out/sweep" "$out/grade" --out "$out/report" --title "SmolLM2-135M on a laptop"
