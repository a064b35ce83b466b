"""Every registered kernel spec, compiled for sm_90a and looked at.

python tests/resources/kernels.py --write   rewrites the snapshot of the installed NVRTC
"""

import concurrent.futures
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools/gpu"))

import attention_plan
import nvrtc
import resources


def snapshot_path():
    return Path(__file__).parent / f"snapshot-nvrtc-{nvrtc.version()}.json"


def inspect(spec):
    """JSON-able facts about one spec."""
    cubin, log = nvrtc.compile_text(attention_plan.kernel_text(), spec.name, [spec.define])
    if cubin is None:
        return {"error": log}
    listing = resources.Listing(cubin)
    first, last = listing.mma_role()
    return {
        **resources.usage(log),
        "shared_bytes": spec.block[2],
        "warnings": resources.warnings(log),
        "products_outside_mma_role": listing.count("HGMMA") - listing.count("HGMMA", first, last),
        "mma_role_local_accesses": listing.count("LDL", first, last)
        + listing.count("STL", first, last),
        "main_loops": [
            {
                "instructions": len(loop),
                "early_exponentials": resources.early_exponentials(loop),
                **{k: resources.counts(loop)[k] for k in ("HGMMA", "R2UR", "LDL", "STL")},
            }
            for loop in listing.main_loops()
        ],
    }


def inspect_all():
    attention_plan.library()  # built once, before the workers want it
    specs = attention_plan.registered()
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip((s.name for s in specs), pool.map(inspect, specs), strict=True))


def main():
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    path = snapshot_path()
    path.write_text(json.dumps(inspect_all(), indent=1, sort_keys=True) + "\n")
    print(path)


if __name__ == "__main__":
    main()
