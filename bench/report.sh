#!/bin/bash
# `bazel run` starts it where the programs and scripts lie as bench/<name>.
exec python3 bench/report.py "$@"
