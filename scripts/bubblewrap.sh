#!/bin/sh
# Gets bubblewrap if it is missing and we may install it; otherwise says how. Never fails: what needs it says so.
command -v bwrap >/dev/null && exit 0
[ "$(uname)" = Linux ] || exit 0
for get in "apt-get install -y -qq bubblewrap" "dnf install -y -q bubblewrap" "apk add -q bubblewrap"; do
    command -v "${get%% *}" >/dev/null || continue
    if [ "$(id -u)" = 0 ]; then
        case $get in apt-get*) apt-get update -qq || true ;; esac
        DEBIAN_FRONTEND=noninteractive $get >/dev/null && exit 0
    fi
    echo "bubblewrap is missing, which runs model-written code safely. Install it: sudo $get" >&2
    exit 0
done
echo "bubblewrap is missing, which runs model-written code safely: see https://github.com/containers/bubblewrap" >&2
