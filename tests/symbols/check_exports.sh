#!/bin/sh
# check_exports.sh <nm> <libonchip.so>: the shared library exports C functions onchip_* and nothing else.
set -eu
nm=$1
library=$2
defined=$("$nm" -D --defined-only "$library" | awk '{print $2, $3}')
foreign=$(printf '%s\n' "$defined" | awk '$1 != "T" || $2 !~ /^onchip_[a-z0-9_]+$/')
if [ -n "$foreign" ]; then
  echo "$library exports more than the C ABI:"
  printf '%s\n' "$foreign"
  exit 1
fi
count=$(printf '%s\n' "$defined" | grep -c '^T onchip_' || true)
if [ "$count" -eq 0 ]; then
  echo "$library exports no onchip_* function"
  exit 1
fi
echo "$count exported functions, all of the C ABI"
