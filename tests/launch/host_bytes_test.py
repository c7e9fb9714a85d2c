"""Two hosts (network namespaces) of four ranks train with ddp_sharded: what a host sends is what it must send, whatever the
number of its ranks: half of the gradients in each step, and half of the new parameters. A rank is connected to the one rank
of its number on the other host."""
import pathlib
import re
import subprocess
import unittest

from two_hosts import CLEAN, on_two_hosts, why_no_namespaces

PROGRAM = pathlib.Path("bench/ddp_step").absolute()
PORT = 29511  # of the store
# Counts the bytes that a host sends, and the most connections to the other host, 10.77.0.2, but for those of the store.
COUNTED = f"""
sent() {{ awk '/in-/ {{ print $10 }}' /proc/self/net/dev; }}
connections() {{
  awk '$4 == "01" && $3 ~ /02004D0A:/ && $2 !~ /:{PORT:04X}$/ {{ n++ }} END {{ print n + 0 }}' /proc/self/net/tcp /proc/self/net/tcp6
}}
before=$(sent)
"$@" &
program=$!
most=0
while kill -0 $program 2>/dev/null; do
  now=$(connections)
  if [ $now -gt $most ]; then most=$now; fi
  sleep 0.1
done
wait $program
echo sent: $(($(sent) - before)), connections: $most
"""
GROUPS = 2  # of ranks: for gradients and parameters, and for control
WIDTH = 576
PARAMETERS = 3 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH + 2


def sent_by_a_host(ddp_step, steps):
    """The bytes that the first host sends in a whole run, and the most connections that it has to the other one."""
    command = ["sh", "-c", COUNTED, "sh", ddp_step, f"--width={WIDTH}", f"--steps={steps}", "--strategy=ddp_sharded", "--devices=4",
               "--num_nodes=2"]
    said = subprocess.run(on_two_hosts(command, PORT), env=CLEAN, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280)
    if said.returncode != 0:
        raise RuntimeError(said.stderr)
    return [int(number) for number in re.search(r"^sent: (\d+), connections: (\d+)$", said.stdout, re.M).groups()]


class HostBytesTest(unittest.TestCase):

    def test_a_host_sends_what_one_rank_would(self):
        if why := why_no_namespaces():
            self.skipTest(f"no network namespaces here: {why}")
        (few, _), (many, connections) = (sent_by_a_host(PROGRAM, steps) for steps in (5, 45))
        must = 40 * PARAMETERS * 4  # reduce_scatter and all_gather, each half of the model
        print(f"a host of 4 ranks sends {(many - few) / must:.3f} of what it must in a step")
        self.assertLess((many - few) / must, 1.02)
        self.assertGreater((many - few) / must, 1.0)
        self.assertEqual(connections, 4 * GROUPS)


if __name__ == "__main__":
    unittest.main()
