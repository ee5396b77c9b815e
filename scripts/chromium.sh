#!/bin/sh
# Gets Chromium if it is missing and we may install it; otherwise says how. Never fails: what needs it says so.
command -v chromium >/dev/null && exit 0
command -v chromium-browser >/dev/null && exit 0
for get in "apt-get install -y -qq --no-install-recommends chromium" "dnf install -y -q chromium" "apk add -q chromium"; do
    command -v "${get%% *}" >/dev/null || continue
    if [ "$(id -u)" = 0 ]; then
        case $get in apt-get*) apt-get update -qq || true ;; esac
        DEBIAN_FRONTEND=noninteractive $get >/dev/null && exit 0
    fi
    echo "Chromium is missing, in which pages are tested. Install it: sudo $get" >&2
    exit 0
done
echo "Chromium is missing, in which pages are tested: see https://www.chromium.org" >&2
