#!/bin/bash
# The program trains, validates, and leaves a checkpoint in the folder where it ran.
set -euo pipefail
program=$PWD/$1
cd "$TEST_TMPDIR"
"$program" | tee output
grep -q '^Epoch 10/10 .* val_acc 0\.[789]' output
[[ -s runs/version_0/checkpoints/best/model.safetensors ]]
