#!/usr/bin/env bash
# Sets up a compiler for AArch64 and an emulator that runs its output: setup.sh [DIR]
#
# DIR defaults to target/aarch64 under the repository root. rustup's toolchains include only the standard library of
# their own machine. Therefore everything comes from Debian's packages, which are unpacked and not installed. Nothing is
# written outside DIR except DIR.lock, and root is not needed.
#
# Exits with 3 and a line that starts with SKIPPED if this cannot work here. If the directory is finished, nothing is
# done.
set -euo pipefail

# Backports are included, because rustc in the stable suite is older than the minimum supported version.
suite=trixie
# Packages for this machine: the compiler, the emulator, and the libraries that they use.
here_packages=(
    rustc rust-clippy libstd-rust-dev qemu-user
    libc6 libgcc-s1 libstdc++6 libedit2 libbsd0 libmd0 libtinfo6 libffi8 libxml2 liblzma5 libz3-4 libzstd1 zlib1g
)
there_packages=(
    libc6 libc6-dev libgcc-s1 libgcc-14-dev
    python3.13-minimal libpython3.13-minimal libpython3.13-stdlib libbz2-1.0 libexpat1 libffi8 liblzma5 libssl3t64 libzstd1 zlib1g
)

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
directory=${1:-$(dirname "$(dirname "$here")")/target/aarch64}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

skip() {
    echo "SKIPPED: the kernels of AArch64 $1"
    exit 3
}
[[ $(uname -sm) == "Linux x86_64" ]] || skip "are compiled and emulated on Linux x86-64 only"
for tool in apt-get apt-cache dpkg-deb; do
    command -v "$tool" >/dev/null || skip "take $tool, to fetch Debian's packages with"
done
[[ -f $keyring ]] || skip "take Debian's keys, $keyring"
# Debian's archive, from the mirror that this machine uses for its own packages.
archive=$(apt-get indextargets --no-release-info --format '$(REPO_URI)' | grep -E '/debian/?$' | sort -u | head -n1 || true)
[[ -n $archive ]] || skip "take Debian's archive, and apt here knows none"
linker=$(rustc --print sysroot)/lib/rustlib/x86_64-unknown-linux-gnu/bin/rust-lld
[[ -x $linker ]] || skip "are linked by rust-lld, and there is no $linker"
stamp=$(sha256sum "$here/setup.sh" | cut -d' ' -f1)-$linker

mkdir -p "$(dirname "$directory")"
if command -v flock >/dev/null; then
    exec 9>"$directory.lock"
    flock 9
fi
if [[ -f $directory/stamp && $(<"$directory/stamp") == "$stamp" ]]; then
    echo "AArch64 ready: $directory"
    exit 0
fi

SECONDS=0
rm -rf "$directory"
mkdir -p "$directory"/apt/{lists/partial,archives/partial,sources,debs} "$directory"/{bin,host,sysroot}
directory=$(cd "$directory" && pwd)
apt=$directory/apt
touch "$apt/status"
printf 'Types: deb\nURIs: %s\nSuites: %s %s-backports testing\nComponents: main\nArchitectures: amd64 arm64\nSigned-By: %s\n' \
    "$archive" "$suite" "$suite" "$keyring" >"$apt/sources/debian.sources"
printf 'Package: *\nPin: release %s\nPin-Priority: %s\n\n' "n=$suite-backports" 600 a=testing 100 >"$apt/preferences"
options=(
    -o "Dir::State=$apt" -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt"
    -o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$apt/sources"
    -o "Dir::Etc::Preferences=$apt/preferences" -o Dir::Etc::PreferencesParts=/dev/null
    -o APT::Architecture=amd64 -o APT::Architectures=amd64,arm64 -o APT::Sandbox::User= -o Acquire::Languages=none
)
apt-get "${options[@]}" -qq update
# The names of these two packages depend on the compiler's version.
versioned=$(apt-cache "${options[@]}" depends libstd-rust-dev | sed -n 's/.*Depends: \(libstd-rust-[0-9.]*\)$/\1/p' | head -n1)
llvm=$(apt-cache "${options[@]}" depends "$versioned" | sed -n 's/.*Depends: \(libllvm[0-9]*\)$/\1/p' | head -n1)
# Both architectures need the same version of the compiler. They do not reach the backports on the same day; testing has
# the same versions.
wanted=$(apt-cache "${options[@]}" policy rustc | sed -n 's/^ *Candidate: //p')
matching=$(apt-cache "${options[@]}" madison libstd-rust-dev:arm64 | cut -d'|' -f2 | tr -d ' ' |
    grep -F "${wanted%%[+-]*}" | head -n1 || true)
if [[ -z $matching ]]; then
    echo "Debian has rustc $wanted for this machine, but no standard library of that version for AArch64 yet" >&2
    exit 1
fi
(cd "$apt/debs" && apt-get "${options[@]}" -qq download \
    "${here_packages[@]}" "$versioned" "$llvm" "${there_packages[@]/%/:arm64}" "libstd-rust-dev:arm64=$matching")
for tree in host:amd64 sysroot:arm64; do
    for package in "$apt"/debs/*_"${tree#*:}".deb; do
        dpkg-deb --extract "$package" "$directory/${tree%:*}"
    done
done
rm -rf "$apt"
# The emulators of all other processors are a third of the total size.
find "$directory/host/usr/bin" -name 'qemu-*' ! -name qemu-aarch64 -delete
ln -sfn usr/lib "$directory/sysroot/lib"
ln -sfn "$directory/sysroot/usr/lib/rustlib/aarch64-unknown-linux-gnu" "$directory/host/usr/lib/rustlib/"

# This compiler needs the libraries it came with, and they need their own loader.
host=$directory/host/usr
for program in rustc clippy-driver; do
    cat >"$directory/bin/$program" <<END
#!/bin/sh
exec "$host/lib64/ld-linux-x86-64.so.2" --library-path "$host/lib/x86_64-linux-gnu" \\
    "$host/bin/$program" --sysroot "$host" "\$@"
END
done
# Cargo passes the path of the replaced compiler as the first argument; drop it.
sed -i '2i shift' "$directory/bin/clippy-driver"
# Passes the start files and library paths that a C compiler would add when it links; rust-lld does not add them.
sysroot=$directory/sysroot
libraries=$sysroot/usr/lib/aarch64-linux-gnu
gcc=$sysroot/usr/lib/gcc/aarch64-linux-gnu/14
cat >"$directory/bin/ld" <<END
#!/bin/sh
case " \$* " in
*" -static "*" -pie "* | *" -pie "*" -static "*) start=rcrt1.o loader=--no-dynamic-linker ;;
*" -static "*) start=crt1.o loader=--no-dynamic-linker ;;
*) start=Scrt1.o loader=--dynamic-linker=/lib/ld-linux-aarch64.so.1 ;;
esac
# The start files come first: in a static program, libc has other definitions of some of their symbols.
shift 2
exec "$linker" -flavor gnu "--sysroot=$sysroot" "-L$libraries" "-L$gcc" "\$loader" \\
    "$libraries/\$start" "$libraries/crti.o" "$gcc/crtbeginS.o" "\$@" "$gcc/crtendS.o" "$libraries/crtn.o"
END
cat >"$directory/bin/run" <<END
#!/bin/sh
# For tests that start their own executable again.
export QUANT_EMULATOR="$directory/bin/run"
exec "$host/bin/qemu-aarch64" -cpu "\${QUANT_QEMU_CPU:-max}" -L "$sysroot" "\$@"
END
chmod +x "$directory"/bin/*
"$directory/bin/rustc" --version
"$host/bin/qemu-aarch64" --version | head -n1
echo "$stamp" >"$directory/stamp"
echo "AArch64 made in ${SECONDS} s: $directory"
