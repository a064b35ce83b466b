"""`python -m examples.demo [--train] [--quick] [--out FOLDER]`, from the root of the checkout."""

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path


def share_threads() -> None:
    """Every library gets as many threads as onchip takes, which respects a container's CPU quota.

    Only variables that are set before a library is loaded count.
    """
    import onchip

    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(variable, str(onchip.get_num_threads()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo")
    parser.add_argument(
        "--train",
        action="store_true",
        help="the third part alone: two language models learn and write (needs torch)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few sentences, short lengths: seconds"
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="for plot and record")
    arguments = parser.parse_args()

    start = time.perf_counter()
    share_threads()
    from rich.console import Console

    from examples.demo.show import CheckFailed

    console = Console(highlight=False)
    try:
        if arguments.train:
            if importlib.util.find_spec("torch") is None:
                print("demo: --train needs torch (tools/setup --with-torch)", file=sys.stderr)
                return 2
            from examples.demo import training

            console.rule("3. Two language models learn a text, and write")
            training.run(console, arguments.out, arguments.quick)
        else:
            from examples.demo import reading, sweep

            console.rule("1. A real encoder reads a real page")
            reading.run(console, arguments.quick)
            console.rule("2. Long sequences")
            sweep.run(console, arguments.out, arguments.quick)
    except CheckFailed as failure:
        Console(stderr=True, highlight=False).print(f"demo: FAILED: {failure}", markup=False)
        return 1
    console.print(f"Done in {time.perf_counter() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
