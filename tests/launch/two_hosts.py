"""Runs a command on two hosts, which are network namespaces of this one: two_hosts.py PORT COMMAND."""
import os
import shutil
import subprocess
import sys

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
CLEAN = {name: value for name, value in os.environ.items() if name not in LAUNCHERS} | {"OMP_NUM_THREADS": "1"}

# Two network namespaces with an interface each, as hosts 0 and 1: sh -c ... HOSTS PORT COMMAND. The output of host 1 is
# not shown. LINK_RATE in the environment limits what each host sends, as tc writes it: 4gbit.
HOSTS = """
set -e
port=$1
shift
new_namespace() {
  unshare --net sleep 300 &
  host=$!
  until [ "$(readlink /proc/$host/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
}
new_namespace; a=$host
new_namespace; b=$host
trap 'kill $a $b' EXIT
ip link add in-a netns $a type veth peer name in-b netns $b
inside() { host=$1; shift; nsenter --net=/proc/$host/ns/net "$@"; }
inside $a ip link set lo up
inside $b ip link set lo up
inside $a ip address add 10.77.0.1/24 dev in-a
inside $b ip address add 10.77.0.2/24 dev in-b
inside $a ip link set in-a up
inside $b ip link set in-b up
if [ -n "$LINK_RATE" ]; then
  inside $a tc qdisc add dev in-a root tbf rate $LINK_RATE burst 128kb latency 100ms
  inside $b tc qdisc add dev in-b root tbf rate $LINK_RATE burst 128kb latency 100ms
fi
inside $b env NODE_RANK=1 MASTER_ADDR=10.77.0.1 MASTER_PORT=$port "$@" >/dev/null &
second=$!
inside $a env NODE_RANK=0 MASTER_ADDR=10.77.0.1 MASTER_PORT=$port "$@"
wait $second
"""


def on_two_hosts(command, port):
    """The command that runs another one on both hosts; `port` is that of the store."""
    return ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", HOSTS, "sh", str(port), *map(str, command)]


def why_no_namespaces():
    """None if this process may make network namespaces."""
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no '{tool}'"
    tried = subprocess.run(["unshare", "--user", "--map-root-user", "--net", "unshare", "--net", "ip", "link", "add",
                            "in-a", "type", "veth", "peer", "name", "in-b"], capture_output=True, text=True)
    return None if tried.returncode == 0 else tried.stderr.strip()


if __name__ == "__main__":
    sys.exit(why_no_namespaces() or subprocess.run(on_two_hosts(sys.argv[2:], sys.argv[1]), env=CLEAN).returncode)
