#!/usr/bin/env bash
# Runs the recipe of docs/guide/jobs.md on a Slurm cluster of three nodes, one of which is killed. See check.py.
#
# The nodes are processes of this machine. Slurm's packages are unpacked under target/slurm and not installed. The
# program must have been built: `cargo build -p quant-cli`. Without Debian's packages, this only prints a line that
# starts with SKIPPED.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins)
# Libraries that are often missing.
libraries=(libmunge2 libhwloc15 libjson-c5 liblua5.1-0 liblz4-1 libnuma1 libyaml-0-2 libdbus-1-3 libreadline8)
slurm=${QUANT_SLURM:-target/slurm}

if [[ ! -f $slurm/complete ]]; then
    for tool in apt-get dpkg-deb; do
        command -v "$tool" >/dev/null || { echo "SKIPPED: Slurm comes from Debian's packages, and there is no $tool"; exit 0; }
    done
    rm -rf "$slurm"
    mkdir -p "$slurm/debs" "$slurm/root"
    if ! (cd "$slurm/debs" && apt-get download "${packages[@]}" "${libraries[@]}" >log 2>&1); then
        cat "$slurm/debs/log"
        echo "SKIPPED: Slurm's packages cannot be downloaded"
        exit 0
    fi
    for package in "$slurm"/debs/*.deb; do
        dpkg-deb -x "$package" "$slurm/root"
    done
    touch "$slurm/complete"
fi
quant=${1:-${CARGO_TARGET_DIR:-target}/debug/quant}
exec python3 tests/slurm/check.py "$quant" "$slurm/root"
