#!/bin/sh
# python_tool.sh <python of @python_env> <script> <arguments>: runs a script of this folder.
python=$(realpath "$1") script=$(realpath "$2")
shift 2
exec "$python" "$script" "$@"
