#!/usr/bin/env bash
# Runs the Jobs of each step and waits for their end before the next step: submit.sh [plan] [encode] [vision] [train] [decode]
#
# Without arguments, all steps except vision, which requires vision.model. Jobs of an earlier run are deleted first, with
# their pods, because a Job can't be applied twice. Finished work is skipped.
set -euo pipefail
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- plan encode train decode
states='{range .items[*]}{.metadata.name}{" "}{.status.conditions[?(@.status=="True")].type}{"\n"}{end}'

wait_for() {  # until each Job of the step is complete or has failed; if the server does not answer, it is called again
    local found failed name
    while true; do
        sleep 15
        found=$(kubectl get jobs --selector "latentpress/step=$1" --output "jsonpath=$states") || continue
        [ -n "$found" ] || { echo "the Jobs of $1 were deleted" >&2 && exit 1; }
        grep -vqwE 'Complete|Failed' <<<"$found" || break
    done
    if failed=$(grep -w Failed <<<"$found"); then
        name=${failed%% *}
        echo "$1 failed: $name. See: kubectl logs --all-containers --prefix --selector job-name=$name" >&2
        exit 1
    fi
}

for step in "$@"; do
    case $step in plan | encode | vision | train | decode) ;; *) echo "$step: no such step; plan, encode, vision, train, decode" >&2 && exit 2 ;; esac
done
kubectl apply --kustomize . --selector '!latentpress/step'  # the volume and the configuration
for step in "$@"; do
    kubectl delete jobs --selector "latentpress/step=$step" --cascade=foreground
    kubectl apply --kustomize . --selector "latentpress/step=$step"
    wait_for "$step"
done
