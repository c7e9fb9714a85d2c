#!/bin/sh
# with_python.sh <python of @python_env> <script> <arguments>: `bazel run` starts it where the programs and scripts lie as
# bench/<name>.
python=$(realpath "$1") script=$2
shift 2
exec "$python" "bench/$script" "$@"
