"""A host (a network namespace) loses its network in the middle of a training, without a word: what it has sent is answered by
nobody. Each host then ends with the name of the rank that it no longer hears, long before the timeout of a collective."""
import pathlib
import subprocess
import tempfile
import unittest

from two_hosts import CLEAN, on_two_hosts, why_no_namespaces

PROGRAM = pathlib.Path("tests/failure/fault_program").absolute()
LOSES_ITS_NETWORK = """
folder=$1
shift
if [ $NODE_RANK = 1 ]; then
  (until [ -e $folder/0.trains ] && [ -e $folder/1.trains ]; do sleep 0.1; done; ip link set in-b down) &
fi
"$@" 2>$folder/$NODE_RANK.err
echo $? >$folder/$NODE_RANK.code
"""


class LostHostTest(unittest.TestCase):

    def test_each_host_names_the_other(self):
        if why := why_no_namespaces():
            self.skipTest(f"no network namespaces here: {why}")
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            command = ["sh", "-c", LOSES_ITS_NETWORK, "sh", name, PROGRAM, "--strategy=ddp", "--devices=1", "--num_nodes=2",
                       "--max_epochs=-1", "--strategy.timeout_s=1000", "--strategy.heartbeat_timeout_s=3", f"--folder={name}"]
            subprocess.run(on_two_hosts(command, 29512), env=CLEAN, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                           timeout=100, check=True)
            said = [(folder / f"{host}.err").read_text() for host in range(2)]
            self.assertEqual([(folder / f"{host}.code").read_text() for host in range(2)], ["1\n", "1\n"], said)
        self.assertIn("rank 1 gives no sign of life (its host has gone, or it hangs); last seen at step", said[0])
        self.assertIn("rank 0, which keeps the store, does not answer", said[1])


if __name__ == "__main__":
    unittest.main()
