#!/usr/bin/env bash
# Submits the whole pipeline; each job waits for the jobs that it depends on:
#
#   bash examples/slurm/submit.sh pipeline.yaml 8 --partition=gpu --gres=gpu:1
#
# discover and bucket -> encode-text and encode-latents, arrays with the number of tasks in the second argument -> index
# -> train -> decode and report. Further arguments are passed to sbatch for all jobs. If vision.model is set (CREPA), set
# STAGES="encode-text encode-latents encode-vision". You can run it again at any time: finished work is skipped.
#
# Compute nodes share one cache of downloaded models: HF_HOME, by default next to the configuration.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
config=${1:?"usage: submit.sh CONFIG TASKS [SBATCH OPTIONS]"} tasks=${2:?"the number of tasks of each array"}
shift 2

export HF_HOME=${HF_HOME:-$(dirname "$(readlink -f "$config")")/huggingface}

submit() { sbatch --parsable --kill-on-invalid-dep=yes "$@"; }

plan=$(submit --job-name=latentpress-plan --output=slurm-%x-%j.log "$@" \
    --wrap "latentpress discover --config '$config' && latentpress bucket --config '$config'")
encoded=()
for stage in ${STAGES:-encode-text encode-latents}; do
    encoded+=("$(submit --job-name="latentpress-$stage" --array="0-$((tasks - 1))" --dependency="afterok:$plan" "$@" \
        "$here/encode.sbatch" "$stage" --config "$config")")
done
index=$(submit --job-name=latentpress-index --output=slurm-%x-%j.log --dependency="afterok:$(IFS=:; echo "${encoded[*]}")" \
    "$@" --wrap "latentpress index --config '$config'")
train=$(submit --dependency="afterok:$index" "$@" "$here/train.sbatch" --config "$config")
decode=$(submit --job-name=latentpress-decode --output=slurm-%x-%j.log --dependency="afterok:$train" "$@" \
    --wrap "latentpress decode --config '$config' && latentpress report --config '$config'")
echo "plan $plan, encode ${encoded[*]}, index $index, train $train, decode $decode"
