#!/bin/sh
# Gets a program if it is missing and we may install it; otherwise says how. Never fails: what needs it says so.
#     sh scripts/get.sh PACKAGE WHAT_IT_DOES ADDRESS COMMAND...     any of the commands will do
package=$1 missing="$1, which $2, is missing" address=$3
shift 3
for command in "$@"; do
    command -v "$command" >/dev/null && exit 0
done
for get in "apt-get install -y -qq --no-install-recommends" "dnf install -y -q" "apk add -q"; do
    command -v "${get%% *}" >/dev/null || continue
    if [ "$(id -u)" = 0 ]; then
        case $get in apt-get*) apt-get update -qq || true ;; esac
        DEBIAN_FRONTEND=noninteractive $get "$package" >/dev/null && exit 0
    fi
    echo "$missing. Install it: sudo $get $package" >&2
    exit 0
done
echo "$missing: see $address" >&2
