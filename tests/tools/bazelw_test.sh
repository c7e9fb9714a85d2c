#!/bin/bash
# Without root and without sudo, a missing package is named with the command that installs it, and nothing is run.
set -uo pipefail
folder=$(mktemp -d)  # where nobody may look, unlike $TEST_TMPDIR
trap 'rm -rf "$folder"' EXIT
cd "$folder"
mkdir -p "a tree/tools" bin
printf '#!/bin/sh\nexit 1\n' > bin/sudo
chmod +x bin/sudo
cp "$TEST_SRCDIR/fulgur/bazelw" "a tree/"
{ cat "$TEST_SRCDIR/fulgur/tools/apt_packages.txt"; echo no-such-package; } > "a tree/tools/apt_packages.txt"
chmod -R a+rX .

as_nobody=(env)
if ((EUID == 0)); then
  as_nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups)
fi
"${as_nobody[@]}" env PATH="$folder/bin:/usr/bin:/bin" "a tree/bazelw" version > out 2> err
exit_code=$?
cat out err

[[ $exit_code == 1 && ! -s out ]] &&
  grep -q '^bazelw: missing Debian packages; run this once:$' err &&
  grep -q '^  sudo apt-get update && sudo apt-get install .* no-such-package$' err
