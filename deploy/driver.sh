#!/usr/bin/env bash
# A machine for drivers: a Ray node, started by the arguments, and a Prefect worker, whose flow runs use that node.
# Both end together; the machine's supervisor (Compose, Kubernetes) then starts both again.
set -euo pipefail
set -m # otherwise bash has them ignore SIGINT, by which Prefect's worker ends itself at SIGTERM

"$@" &
prefect worker start --type process --pool "${SLUICE_WORK_POOL:-sluice}" &
# The Prefect worker ends its flow runs, which save a checkpoint, free their workers and can be resumed. Should it, or
# Ray, not end in time, the machine must end all the same.
end() {
  local leaders
  leaders=$(jobs -p)
  kill $leaders 2>/dev/null || true
  { sleep "${SLUICE_STOP_SECONDS:-110}"; for leader in $leaders; do kill -KILL -- "-$leader"; done; } 2>/dev/null &
  local killer=$!
  wait $leaders 2>/dev/null || true
  kill -KILL -- "-$killer" 2>/dev/null || true
}
trap end EXIT
trap 'exit 143' TERM INT
wait -n || true
echo "driver: Ray or the Prefect worker has ended" >&2
exit 1
