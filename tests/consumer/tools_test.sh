#!/bin/bash
# Each tool says how it is called.
set -euo pipefail
(($# > 0))
for tool; do
  "$PWD/$tool" --help | grep '^Usage: '
done
