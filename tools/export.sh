#!/bin/sh
# export.sh <python of @python_env> <export.py> <predict> <arguments>: see export.py.
python=$(realpath "$1") script=$(realpath "$2") FULGUR_PREDICT=$(realpath "$3")
export FULGUR_PREDICT
shift 3
exec "$python" "$script" "$@"
