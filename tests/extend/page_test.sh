#!/bin/bash
# page_test.sh <program> <page>: the program of the page prints what the page says.
set -euo pipefail
program=$PWD/$1 page=$PWD/$2
cd "$TEST_TMPDIR"
"$program" >printed
sed -n '/^```text/,/^```/{//!p}' "$page" >promised
[[ -s promised ]]
diff promised printed
