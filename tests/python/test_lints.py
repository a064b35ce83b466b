"""Each lint finds what it is for in a tree that has the fault, and nothing in one that has not."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lint(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools" / "lint"), *sys.path])
    return importlib.import_module


@pytest.fixture
def write(tmp_path):
    def write_file(name, text=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    return write_file


GOOD_INCLUDES = {
    "include/onchip/onchip.h": "#include <stdint.h>\n",
    "include/onchip/onchip.hpp": "#include <onchip/onchip.h>\n#include <vector>\n",
    "src/core/status.hpp": "#include <onchip/onchip.h>\n#include <string>\n",
    "src/cpu/attention.hpp": '#include "core/status.hpp"\n',
    "src/ops/attention.hpp": '#include "cpu/attention.hpp"\n#include "core/status.hpp"\n',
    "src/api/attention.cpp": '#include "ops/attention.hpp"\n',
    "src/gpu/runtime/driver.hpp": '#include "core/status.hpp"\n',
    "src/gpu/tile/mma.cuh": '#include "gpu/tile/ptx.cuh"\n',
    "src/gpu/tile/ptx.cuh": "",
    "src/gpu/kernels/sm90/forward_plan.hpp": "",
    "src/gpu/kernels/sm90/forward.cuh": (
        '#include "gpu/kernels/sm90/forward_plan.hpp"\n#include "gpu/tile/mma.cuh"\n'
        '#include "gpu/kernels/sm90/forward_load.cuh"\n'
    ),
    "src/gpu/kernels/sm90/forward_load.cuh": '#include "gpu/kernels/sm90/forward_plan.hpp"\n',
    "src/gpu/kernels/sm90/forward_paged_plan.hpp": "",
    "src/gpu/kernels/sm90/forward_paged.cuh": "",
    "src/gpu/kernels/sm90/forward.cpp": (
        '#include "gpu/kernels/sm90/forward_plan.hpp"\n#include "gpu/runtime/driver.hpp"\n'
    ),
    "python/native.cpp": '#include "caster.hpp"\n#include <onchip/onchip.h>\n',
    "python/caster.hpp": "",
}


def test_includes_that_point_the_right_way(lint, write, tmp_path):
    for name, text in GOOD_INCLUDES.items():
        write(name, text)
    assert lint("include_direction").check(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "include"),
    [
        ("include/onchip/onchip.h", "<string.h>"),
        ("include/onchip/onchip.h", "<onchip/onchip.hpp>"),
        ("include/onchip/onchip.hpp", "<onchip/detail.hpp>"),
        ("src/core/a.cpp", '"ops/attention.hpp"'),
        ("src/core/a.cpp", '"gpu/runtime/driver.hpp"'),
        ("src/core/a.cpp", "<onchip/onchip.hpp>"),
        ("src/core/a.cpp", '"status.hpp"'),
        ("src/cpu/a.cpp", '"ops/attention.hpp"'),
        ("src/cpu/a.cpp", '"../core/status.hpp"'),
        ("src/reference/a.cpp", '"cpu/attention.hpp"'),
        ("src/ops/a.cpp", '"gpu/runtime/driver.hpp"'),
        ("src/api/a.cpp", '"cpu/attention.hpp"'),
        ("src/gpu/runtime/a.cpp", '"gpu/kernels/sm90/forward_plan.hpp"'),
        ("src/gpu/kernels/sm90/a.cpp", '"gpu/kernels/sm90/forward.cuh"'),
        ("src/gpu/kernels/sm90/a_plan.hpp", '"core/status.hpp"'),
        ("src/gpu/kernels/sm90/a.cuh", '"gpu/kernels/sm90/forward_plan.hpp"'),
        ("src/gpu/kernels/sm90/a.cuh", '"core/status.hpp"'),
        ("src/gpu/kernels/sm90/a.cuh", "<cstdint>"),
        ("src/gpu/kernels/sm90/a.cuh", '"gpu/kernels/sm90/forward_load.cuh"'),
        ("src/gpu/kernels/sm90/forward_b.cuh", '"gpu/kernels/sm90/forward.cuh"'),
        ("src/gpu/kernels/sm90/forward_b.cuh", '"gpu/kernels/sm90/forward_paged.cuh"'),
        ("src/gpu/kernels/sm90/forward_paged_b.cuh", '"gpu/kernels/sm90/forward_plan.hpp"'),
        ("src/gpu/kernels/sm80/forward_b.cuh", '"gpu/kernels/sm90/forward_plan.hpp"'),
        ("src/gpu/tile/a.cuh", '"gpu/kernels/sm90/forward_plan.hpp"'),
        ("src/other/a.cpp", '"core/status.hpp"'),
        ("python/a.cpp", '"core/status.hpp"'),
    ],
)
def test_includes_that_point_the_wrong_way(lint, write, tmp_path, name, include):
    for good_name, text in GOOD_INCLUDES.items():
        write(good_name, text)
    write(name, f"// one line\n#include {include}\n")
    [finding] = lint("include_direction").check(tmp_path)
    assert finding.startswith(f"{name}:2: includes {include[1:-1]}: ")


def test_paths_in_documents(lint, write, tmp_path):
    write("src/core/a.cpp")
    write("tools/setup")
    write("docs/b.md")
    write(
        "docs/a.md",
        "`src/core/a.cpp:12` `tools/setup --with-torch` `src/{core,core/a.cpp}` `src/*/a.cpp`\n"
        "`src/<layer>/x.cpp` `a/b` `src/gone.cpp` (planned) [b](b.md#part) [web](https://x.y/z)\n"
        "```\n`src/in/a/block.cpp`\n```\n",
    )
    check = lint("stale_paths").check
    assert check(tmp_path) == []
    write(
        "README.md",
        "\n`src/gone.cpp`, [c](docs/c.md)\n`src/{core,gone}`\n`src/*/b.cpp`\n"
        "`src/core` (planned)\n",
    )
    assert check(tmp_path) == [
        "README.md:2: src/gone.cpp does not exist",
        "README.md:3: src/{core,gone} does not exist",
        "README.md:4: src/*/b.cpp does not exist",
        "README.md:5: src/core is there: remove '(planned)'",
        "README.md:2: link to docs/c.md, which does not exist",
    ]


def test_sizes(lint, write, tmp_path):
    check = lint("sizes").check
    write("src/core/a.cpp", "x" * 100 + "\n")
    write("src/gpu/kernels/sm90/a.cuh", "\n" * 700)
    write("src/gpu/kernels/sm90/a.md", "\n" * 150)
    write("src/gpu/tile/a.cuh", "\n" * 1500)
    write("src/gpu/tile/wgmma.cuh", "// Generated by a tool.\n" + "x" * 101 + "\n" * 5000)
    assert check(tmp_path) == []
    write("src/core/a.cpp", "\n" + "x" * 101 + "\n")
    write("src/gpu/kernels/sm90/a.cuh", "\n" * 701)
    write("src/gpu/kernels/sm90/a.md", "\n" * 151)
    write("src/gpu/tile/b.cuh", "\n")
    for index in range(20):
        write(f"src/gpu/kernels/sm80/{index}.cuh")
    findings = check(tmp_path)
    assert [finding.split(":")[0] for finding in findings] == [
        "src/core/a.cpp",
        "src/gpu/kernels/sm90/a.cuh",
        "src/gpu/kernels",
        "src/gpu/kernels/sm90/a.md",
        "src/gpu/tile",
    ]


def test_settings_page(lint, write, tmp_path):
    check = lint("settings_page").check
    write("src/core/settings.cpp", 'std::getenv("HOME"); read("ONCHIP_A"); "ONCHIP_B: got"')
    write("docs/settings.md", "| `ONCHIP_A` | x |\n| `HOME` | y |\n")
    write("src/core/other.cpp", "// getenv() is for settings.cpp\n")
    assert check(tmp_path) == []
    write("docs/settings.md", "| `ONCHIP_C` | x |\n| `HOME` | y |\n")
    write("src/core/other.cpp", 'std::getenv("ONCHIP_A");\n')
    assert check(tmp_path) == [
        "docs/settings.md: ONCHIP_A, which src/core/settings.cpp reads, has no row",
        "docs/settings.md: ONCHIP_C has a row, but src/core/settings.cpp does not read it",
        "src/core/other.cpp: getenv: only src/core/settings.cpp reads the environment",
    ]
