#!/bin/sh
# kernel_archive_option.sh <cmake> <sources> <build folder> <c++>
# What configuring says of the kernel archive where there is no NVRTC, and where none is wanted.
set -eu
cmake=$1
sources=$2
build=$3
cxx=$4
work=$build/tests/install/archive_option
unset ONCHIP_NVRTC

rm -rf "$work"
configure() {
  "$cmake" -S "$sources" -B "$work" "-DCMAKE_CXX_COMPILER=$cxx" -DONCHIP_BUILD_TESTS=OFF \
    -DONCHIP_NVRTC_LIBRARY= "$@" 2>&1
}
# The message of a failed configure is broken into lines.
wants() {
  if ! tr -s ' \n' ' ' | tee "$work/said" | grep -q "$1"; then
    echo "wanted: $1; got:"
    cat "$work/said"
    exit 1
  fi
}

mkdir -p "$work"
configure | wants 'Kernel archive: none, no NVRTC is found (pip install nvidia-cuda-nvrtc,'
configure -DONCHIP_KERNEL_ARCHIVE=OFF | wants 'Kernel archive: none, ONCHIP_KERNEL_ARCHIVE is OFF'
if configure -DONCHIP_KERNEL_ARCHIVE=ON >"$work/refused"; then
  echo "configured with ONCHIP_KERNEL_ARCHIVE=ON and no NVRTC"
  exit 1
fi
wants 'ONCHIP_KERNEL_ARCHIVE is ON, but no NVRTC is found' <"$work/refused"
