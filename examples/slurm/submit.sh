#!/usr/bin/env bash
# Submits the whole pipeline; each job waits for those that it needs:
#
#   bash examples/slurm/submit.sh pipeline.yaml 8 --partition=gpu --gres=gpu:1
#
# discover and bucket -> encode-text and encode-latents, arrays of as many tasks as the second argument says -> index
# -> train. Further arguments are sbatch's, for all jobs. Run it again at any time: what is done is not done again.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
config=${1:?"usage: submit.sh CONFIG TASKS [SBATCH OPTIONS]"} tasks=${2:?"the number of tasks of each array"}
shift 2

submit() { sbatch --parsable --kill-on-invalid-dep=yes "$@"; }

plan=$(submit --job-name=latentpress-plan --output=slurm-%x-%j.log "$@" \
    --wrap "latentpress discover --config '$config' && latentpress bucket --config '$config'")
encoded=()
for stage in encode-text encode-latents; do
    encoded+=("$(submit --job-name="latentpress-$stage" --array="0-$((tasks - 1))" --dependency="afterok:$plan" "$@" \
        "$here/encode.sbatch" "$stage" --config "$config")")
done
index=$(submit --job-name=latentpress-index --output=slurm-%x-%j.log --dependency="afterok:${encoded[0]}:${encoded[1]}" \
    "$@" --wrap "latentpress index --config '$config'")
train=$(submit --dependency="afterok:$index" "$@" "$here/train.sbatch" --config "$config")
echo "plan $plan, encode-text ${encoded[0]}, encode-latents ${encoded[1]}, index $index, train $train"
