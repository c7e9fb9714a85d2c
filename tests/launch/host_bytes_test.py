"""Two hosts (network namespaces) of four ranks train with ddp_sharded: what a host sends is what it must send, whatever the
number of its ranks: half of the gradients in each step, and half of the new parameters."""
import pathlib
import re
import subprocess
import unittest

from two_hosts import CLEAN, HOSTS, why_no_namespaces

PROGRAM = pathlib.Path("bench/ddp_step").absolute()
COUNTED = """
sent() { awk '/in-/ { print $10 }' /proc/self/net/dev; }
before=$(sent)
"$@"
echo sent: $(($(sent) - before))
"""
WIDTH = 576
PARAMETERS = 3 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH + 2


class HostBytesTest(unittest.TestCase):

    def bytes_of(self, steps):
        """That the first host sends in a whole run."""
        said = subprocess.run(["unshare", "--user", "--map-root-user", "--net", "sh", "-c", HOSTS, "sh", "29511", "sh", "-c", COUNTED,
                               "sh", PROGRAM, f"--width={WIDTH}", f"--steps={steps}", "--strategy=ddp_sharded", "--devices=4",
                               "--num_nodes=2"], env=CLEAN, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280)
        self.assertEqual(said.returncode, 0, said.stderr)
        return int(re.search(r"^sent: (\d+)$", said.stdout, re.M)[1])

    def test_a_host_sends_what_one_rank_would(self):
        if why := why_no_namespaces():
            self.skipTest(f"no network namespaces here: {why}")
        few, many = self.bytes_of(5), self.bytes_of(45)
        must = 40 * PARAMETERS * 4  # reduce_scatter and all_gather, each half of the model
        print(f"a host of 4 ranks sends {(many - few) / must:.3f} of what it must in a step")
        self.assertLess((many - few) / must, 1.02)
        self.assertGreater((many - few) / must, 1.0)


if __name__ == "__main__":
    unittest.main()
