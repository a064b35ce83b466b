"""What a compiled kernel takes and how its main loops look, read off NVRTC's log and the cubin.
Needs no GPU."""

import collections
import glob
import os
import re
import subprocess
import sys
import tempfile

_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


def warnings(log):
    """Lines of ptxas about lost performance, C7500 to C7599."""
    return [line for line in log.splitlines() if re.search(r"\(C75\d\d\)", line)]


def usage(log):
    spills = _SPILLS.search(log)
    return {
        "registers": int(_USED.search(log)[1]),
        "spill_store_bytes": int(spills[1]),
        "spill_load_bytes": int(spills[2]),
    }


def disassembler():
    for folder in sys.path:
        found = glob.glob(os.path.join(folder, "nvidia", "*", "bin", "nvdisasm"))
        if found:
            return found[0]
    return "nvdisasm"


class Listing:
    """Opcodes of a cubin's one kernel, in order, and its labels."""

    def __init__(self, cubin):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            text = subprocess.run(
                [disassembler(), "-c", file.name], check=True, capture_output=True, text=True
            ).stdout
        self.opcodes, self._labels, jumps = [], {}, []
        for line in text.splitlines():
            if label := _LABEL.match(line.strip()):
                self._labels[label[1]] = len(self.opcodes)
            elif instruction := _INSTRUCTION.match(line):
                words = instruction[1].split()
                opcode = words[1] if words[0].startswith("@") else words[0]
                if opcode.startswith("BRA") and (target := _TARGET.search(line)):
                    jumps.append((len(self.opcodes), target[1]))
                self.opcodes.append(opcode)
        self._jumps = jumps

    def count(self, name, begin=0, end=None):
        return sum(o.split(".")[0] == name for o in self.opcodes[begin:end])

    def mma_role(self):
        """(first, last) instruction of the warpgroups that raise their register number."""
        begin = [i for i, o in enumerate(self.opcodes) if o.startswith("USETMAXREG.TRY_ALLOC")]
        end = [i for i, o in enumerate(self.opcodes) if o.startswith("USETMAXREG.DEALLOC")]
        if len(begin) != 1 or len(end) != 1:
            raise ValueError(f"setmaxnreg: {len(begin)} raises, {len(end)} drops")
        return begin[0], end[0] if end[0] > begin[0] else len(self.opcodes)

    def main_loops(self):
        """Opcodes of each innermost loop that multiplies."""
        first, last = self.mma_role()
        loops = {
            (self._labels[target], at)
            for at, target in self._jumps
            if first <= self._labels[target] <= at < last
            and self.count("HGMMA", self._labels[target], at) > 0
        }
        inner = [
            x
            for x in sorted(loops)
            if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)
        ]
        return [self.opcodes[begin : end + 1] for begin, end in inner]


def counts(opcodes):
    return collections.Counter(o.split(".")[0] for o in opcodes)


def early_exponentials(loop):
    """Of the softmax of one block: those before the wait for the second product in flight."""
    waits = [i for i, o in enumerate(loop) if o.startswith("WARPGROUP.DEPBAR")]
    return counts(loop[waits[0] : waits[1]])["MUFU"] if len(waits) == 2 else None
