#!/usr/bin/env bash
# Finds Chromium, in which the reports are opened, or installs Debian's package of it.
#
# The last line of output is the path of the program. Exits with 3 and a line that starts with SKIPPED if Chromium is
# missing and cannot be installed: on a system other than Debian, or without root.
set -euo pipefail

find_browser() {
    command -v chromium || command -v chromium-browser || command -v google-chrome
}

if find_browser; then
    exit 0
fi
if ! command -v apt-get >/dev/null || ((EUID != 0)); then
    echo "SKIPPED: opening the reports requires Chromium, which this script can install only as root, on Debian"
    exit 3
fi
SECONDS=0
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null
# Without a font, pages show no text.
apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
echo "chromium installed in ${SECONDS} s" >&2
find_browser
