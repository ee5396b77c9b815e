"""What the shell in a container does for us: start a command, end it, read and write a file.

No word of the model's stands in a script: all come as arguments.
"""

from __future__ import annotations

MARK = "TORCHRL_AGENTIC_COMMAND"
MISSING, FOLDER, REFUSED, DENIED = 40, 41, 42, 43
"""Exit codes of `READ` and `WRITE`."""

# End every process of a group, or with a mark in its environment: Docker has no call that ends an exec. No
# process can shed its group, as it has no capability and gains none from setgid files. The mark is for gVisor
# with its /proc without groups. All here is the shell's own: at the limit of processes it could not fork.
END = """
while :; do
  left=
  for folder in /proc/[0-9]*; do
    pid=${folder#/proc/} state= group= words=
    [ "$pid" = $$ ] && continue
    while read -r key value rest; do
      case $key in State:) state=$value ;; Gid:) group=$value; break ;; esac
    done < "$folder/status"
    case $state in '' | Z | X) continue ;; esac
    IFS= read -r words < "$folder/environ"
    case "$group $words" in "$1 "* | *"TORCHRL_AGENTIC_COMMAND=$2"*) kill -9 "$pid" && left=1 ;; esac
  done
  [ -z "$left" ] && break
done
"""

# Run a command, and end what it leaves behind: for Docker, an exec ends with the last process that holds its
# output. The mark comes out first: what Docker says when it cannot start an exec looks like output, too.
# `head` ends the input: not every connection can be closed by half.
SUPERVISE = (
    """
echo "$2"
exec 3>&2 2>/dev/null
group=$1 mark=$2 bytes=$3; shift 3
case $bytes in
-) "$@" 2>&3 3>&- ;;
*)
  command -v head >&2 || { echo "sh: head: not found" >&3; exit 127; }
  head -c "$bytes" | "$@" 2>&3 3>&- ;;
esac
code=$?
set -- "$group" "$mark"
"""
    + END
    + "exit $code"
)

# Set the limits of a process and become a command. The number of processes is not among them: it would count
# those of this user in all containers and on the host. A shell may take "-c" for an option of `exec`.
LIMITED = """
folder=$1 cpu=$2 memory=$3 file=$4; shift 4
{
  ulimit -c 0
  [ "$cpu" ] && ulimit -t "$cpu"
  [ "$memory" ] && ulimit -v "$memory"
  [ "$file" ] && ulimit -f "$file"
} 2>/dev/null
cd -- "$folder" || exit 126
case $1 in -*) echo "sh: $1: not found" >&2; exit 127 ;; esac
exec "$@"
"""

# What is checked may be another thing when it is opened, but only by the doing of the code inside, whose own
# files these are: nothing in the container is more than it may read anyway.
_STEPS = f"""
bytes=$1 make=$2; shift 2
while [ $# -gt 1 ]; do
  [ -L "./$1" ] && exit {REFUSED}
  [ "$make" ] && [ ! -e "./$1" ] && mkdir "./$1"
  [ -e "./$1" ] || exit {MISSING}
  [ -d "./$1" ] || exit {REFUSED}
  cd -P "./$1" || exit {DENIED}
  shift
done
[ -L "./$1" ] && exit {REFUSED}
[ -d "./$1" ] && exit {FOLDER}
[ -e "./$1" ] && [ ! -f "./$1" ] && exit {REFUSED}
"""
READ = f"""{_STEPS}
[ -e "./$1" ] || exit {MISSING}
[ -r "./$1" ] || exit {DENIED}
exec head -c "$bytes" "./$1"
"""
WRITE = f"""{_STEPS}
[ -e "./$1" ] && [ ! -w "./$1" ] && exit {DENIED}
exec cat > "./$1"
"""
