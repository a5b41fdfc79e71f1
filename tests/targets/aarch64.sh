#!/usr/bin/env bash
# aarch64.sh FOLDER: a Python of Debian for aarch64 with NumPy and ONNX Runtime, and the emulator that runs it.
# Nothing is installed: packages are downloaded by apt and pip, and unpacked in the folder. It prints the target.
set -euo pipefail
folder=$(realpath -m "$1")
mkdir -p "$folder"/{root,apt/lists/partial,apt/archives/partial,wheels} && cd "$folder"
touch apt/status
apt=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$folder/apt"
     -o Dir::State::status="$folder/apt/status" -o Dir::Cache="$folder/apt" -o APT::Sandbox::User=root)
apt-get "${apt[@]}" -qq update
(cd apt/archives && apt-get "${apt[@]}" -qq download libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 \
    libffi8 liblzma5 libbz2-1.0 libpython3.11-minimal libpython3.11-stdlib python3.11-minimal)
apt-get -qq download qemu-user-static
for package in apt/archives/*.deb; do dpkg -x "$package" root; done
for package in qemu-user-static*.deb; do dpkg -x "$package" emulator; done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.11 --platform manylinux_2_27_aarch64 \
    --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 -d wheels numpy onnxruntime
for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" root/usr/lib/python3.11/; done
# The emulator shows this in place of the host's, which ONNX Runtime cannot read.
mkdir -p root/proc
printf '%s\n' 'processor : 0' 'Features : fp asimd evtstrm crc32 cpuid' 'CPU implementer : 0x41' \
    'CPU architecture: 8' 'CPU variant : 0x0' 'CPU part : 0xd08' 'CPU revision : 3' '' > root/proc/cpuinfo
echo "$folder/emulator/usr/bin/qemu-aarch64-static -cpu cortex-a72 -L $folder/root $folder/root/usr/bin/python3.11"
