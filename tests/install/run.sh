#!/bin/sh
# run.sh <cmake> <build folder> <cc> <c++> <pkg-config> <version> <static built: 0 or 1> \
#   <kernel archive built: 0 or 1>
# Installs into a temporary prefix, moves the prefix, then builds and runs outside programs against it.
set -eux
cmake=$1
build=$2
cc=$3
cxx=$4
pkg_config=$5
version=$6
static=$7
archive=$8
here=$(cd "$(dirname "$0")" && pwd)
work=$build/tests/install/work

rm -rf "$work"
mkdir -p "$work"
"$cmake" --install "$build" --prefix "$work/first" >/dev/null
# What was installed must work wherever it is moved to.
mv "$work/first" "$work/moved"
prefix=$work/moved

headers=$(cd "$prefix/include" && find . -type f | sort | tr '\n' ' ')
[ "$headers" = "./onchip/onchip.h ./onchip/onchip.hpp " ]
library=$(dirname "$(find "$prefix" -name libonchip.so)")
readelf -d "$library/libonchip.so" | grep -q 'SONAME.*\[libonchip.so.0\]'
if grep -rl "$work/first" "$prefix" --include='*.cmake' --include='*.pc'; then
  echo "the files above name the prefix they were installed to"
  exit 1
fi

PKG_CONFIG_PATH=$library/pkgconfig
export PKG_CONFIG_PATH
[ "$("$pkg_config" --modversion onchip)" = "$version" ]
# shellcheck disable=SC2046  # pkg-config prints words
"$cc" -std=c11 -Wall -Wextra -Wpedantic -Werror "$here/c_consumer/main.c" -o "$work/c_by_pkg_config" \
  $("$pkg_config" --cflags --libs onchip) -lm
LD_LIBRARY_PATH=$library "$work/c_by_pkg_config"

# Every registered kernel lies beside the library, if any does: nothing else can answer here.
if [ "$archive" = 1 ]; then
  # shellcheck disable=SC2046
  "$cc" -std=c11 -Wall -Wextra -Wpedantic -Werror "$here/c_consumer/kernels.c" -o "$work/kernels" \
    $("$pkg_config" --cflags --libs onchip)
  LD_LIBRARY_PATH=$library ONCHIP_NVRTC=/nowhere ONCHIP_CACHE_DIR=off "$work/kernels"
else
  [ ! -e "$library/onchip_kernels.bin" ]
fi

configure_and_build() {
  "$cmake" -S "$here/$1" -B "$work/$1" "-DCMAKE_PREFIX_PATH=$prefix" "-DCMAKE_C_COMPILER=$cc" \
    "-DCMAKE_CXX_COMPILER=$cxx" -DCMAKE_BUILD_TYPE=Release >/dev/null
  "$cmake" --build "$work/$1" >/dev/null
}
configure_and_build c_consumer
"$work/c_consumer/c_consumer"
configure_and_build cpp_consumer
"$work/cpp_consumer/cpp_consumer_onchip"
if [ "$static" = 1 ]; then
  "$work/cpp_consumer/cpp_consumer_static"
fi
