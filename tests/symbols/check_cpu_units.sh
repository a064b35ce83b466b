#!/bin/sh
# check_cpu_units.sh <nm> <isa> <object>...: objects compiled for one instruction set share no symbol
# with the rest of the program except their entry points, which are in onchip::cpu::<isa>. A weak
# symbol (an inline or template function of external linkage) is refused: the linker keeps one copy
# for the whole program, and that copy could need instructions the machine does not have.
set -eu
nm=$1
isa=$2
shift 2
namespace="6onchip3cpu${#isa}${isa}"
status=0
for object in "$@"; do
  # Upper-case types are external; W, V and u are weak or unique; lower-case v and w are weak too.
  # DW.ref.* is a pointer to the exception personality: data, the same in every object.
  defined=$("$nm" --defined-only "$object" | awk '$3 !~ /^DW\.ref\./ {print $2, $3}')
  weak=$(printf '%s\n' "$defined" | awk '$1 ~ /^[WVuwv]$/ {print $2}')
  outside=$(printf '%s\n' "$defined" | awk -v ns="$namespace" \
    '$1 ~ /^[A-Z]$/ && $1 !~ /^[WV]$/ && index($2, ns) == 0 {print $2}')
  if [ -n "$weak" ]; then
    status=1
    echo "$object defines weak symbols:"
    printf '%s\n' "$weak" | c++filt
  fi
  if [ -n "$outside" ]; then
    status=1
    echo "$object defines symbols outside onchip::cpu::$isa:"
    printf '%s\n' "$outside" | c++filt
  fi
done
exit $status
