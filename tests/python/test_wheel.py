"""The wheel, built from a clean copy of the sources as `pip install .` builds it, in an environment
that holds nothing else."""

import email
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

import onchip

ROOT = Path(__file__).parents[2]
# All that a wheel is made of.
SOURCES = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml")
FOLDERS = ("cmake", "include", "python", "src")
LIMIT_BYTES = 8 << 20
PINNED = ROOT / "tools" / "requirements.txt"


def pinned(package):
    (found,) = re.findall(rf"^{package}==\S+$", PINNED.read_text(), re.MULTILINE)
    return found


def run(*command, **options):
    """Runs a command away from the checkout, with none of the caller's Python settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    options = {"cwd": "/", "env": environment} | options
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*words, **options):
    return run(sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words, **options)


def source_files():
    if (ROOT / ".git").exists():
        listed = run(
            "git", "ls-files", "-co", "--exclude-standard", *SOURCES, *FOLDERS, cwd=ROOT
        ).splitlines()
        return sorted(name for name in listed if (ROOT / name).is_file())
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted([*SOURCES, *(str(path.relative_to(ROOT)) for path in found)])


@pytest.fixture(scope="session")
def wheel():
    """Kept in build/ by what it is made of: an unchanged tree is not built again."""
    digest = hashlib.sha256(sys.version.encode())
    files = source_files()
    for name in files:
        content = (ROOT / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    kept = ROOT / "build" / "wheel_test"
    kept.mkdir(parents=True, exist_ok=True)
    folder = kept / digest.hexdigest()[:16]
    with (kept / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=kept) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test run may be at the same
        if not list(folder.glob("*.whl")):
            clean, made = Path(scratch, "sources"), Path(scratch, "made")
            for name in files:
                (clean / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, clean / name)
            # With build isolation: pyproject.toml has to name all that the build needs.
            with_archive = "--config-settings=cmake.define.ONCHIP_KERNEL_ARCHIVE=ON"
            pip(
                *("wheel", "--no-deps", "--wheel-dir", str(made), with_archive, "."),
                cwd=clean,
                env=os.environ | {"ONCHIP_NVRTC": onchip.describe()["gpu"]["nvrtc"]["path"]},
            )
            for old in kept.glob("[0-9a-f]" * 16):
                shutil.rmtree(old)
            made.rename(folder)
    wheels = list(folder.iterdir())
    assert len(wheels) == 1, wheels
    return wheels[0]


@pytest.fixture(scope="session")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="session")
def environment(wheel, tmp_path_factory):
    """The Python of a virtual environment that holds the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "-c", str(PINNED), str(wheel))
    listed = run(
        str(python),
        "-c",
        "import importlib.metadata as m; print(*(d.metadata['Name'] for d in m.distributions()))",
    )
    assert sorted(listed.split()) == ["nanobind-backend", "onchip"]
    return python


def info(unpacked, name):
    (folder,) = unpacked.glob("*.dist-info")
    return email.message_from_string((folder / name).read_text())


def test_one_wheel_for_every_python(wheel, unpacked):
    assert re.fullmatch(r"onchip-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)
    assert info(unpacked, "WHEEL")["Root-Is-Purelib"] == "false"
    assert info(unpacked, "WHEEL")["Tag"] == "-".join(wheel.stem.split("-")[2:])


def test_metadata(unpacked):
    metadata = info(unpacked, "METADATA")
    assert metadata["Version"] == onchip.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = metadata.get_all("Requires-Dist")
    always = [line for line in needed if 'extra == "cli"' not in line]
    assert [re.split("[<>]", line)[0] for line in always] == ["nanobind-backend"]
    assert always != needed


def test_only_what_belongs_there(wheel, unpacked):
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    package = {
        name.removeprefix("python/") for name in source_files() if name.startswith("python/onchip/")
    }
    assert all(name.endswith((".py", ".pyi", "/py.typed")) for name in package)
    info_folder = f"onchip-{onchip.__version__}.dist-info"
    extra = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    built = {"onchip/_native.abi3.so", "onchip/onchip_kernels.bin"}
    wanted = built | {f"{info_folder}/{name}" for name in extra}
    assert found == package | wanted
    assert wheel.stat().st_size < LIMIT_BYTES


def test_binary_needs_the_c_library_and_the_unwinder_alone(unpacked):
    binary = str(unpacked / "onchip" / "_native.abi3.so")
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", run("readelf", "-d", "--wide", binary)))
    # Exceptions pass between the module and nanobind's backend: both have to use one unwinder.
    assert {"libc.so.6", "libgcc_s.so.1"} <= needed
    allowed = re.compile(r"(libc|libgcc_s|libm|libpthread|libdl|librt|ld-linux.*)\.so\.\d+")
    assert not [name for name in needed if not allowed.fullmatch(name)]
    symbols = run("readelf", "--dyn-syms", "--wide", binary)
    assert "GLIBCXX" not in symbols and "CXXABI" not in symbols
    assert not re.search(r"\(R(UN)?PATH\)", run("readelf", "-d", "--wide", binary))
    defined = re.findall(r"(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +\d+ (\S+)$", symbols, re.MULTILINE)
    assert defined == ["PyInit__native"]


def test_import_without_anything(environment):
    out = run(
        str(environment),
        "-c",
        "import importlib.util, onchip\n"
        "assert importlib.util.find_spec('numpy') is None\n"
        "print(onchip.__version__, onchip.__file__, sep='\\n')",
    )
    version, path = out.splitlines()
    assert version == onchip.__version__
    assert Path(path).is_relative_to(environment.parents[1])


def test_commands_without_anything(environment):
    script = str(environment.parent / "onchip")
    out = run(script, "doctor")
    assert run(str(environment), "-m", "onchip", "doctor") == out
    assert re.search(r"^  numpy +not installed$", out, re.MULTILINE)
    assert re.search(r"^  typer +not installed$", out, re.MULTILINE)
    assert re.search(r"^  cpu +\S+", out, re.MULTILINE)
    out = run(script, "explain", "attention_forward", "--q", "2,1024,16,128", "--causal")
    assert re.match(r"attention_forward: \w+\n", out)


def test_kernels_without_a_compiler(environment):
    """All of them are in the archive beside the module."""
    script = str(environment.parent / "onchip")
    alone = {"ONCHIP_NVRTC": "/nowhere", "ONCHIP_CACHE_DIR": "off"}
    listed = run(script, "kernels", "list").splitlines()[1:]
    shown = run(script, "kernels", "resources", env=os.environ | alone).splitlines()[1:]
    assert [line.split()[:2] for line in shown] == [[name, "archive"] for name in listed]
    assert listed


CALL = """
import numpy as np
import onchip

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 70, 4, 32), dtype=np.float32) for _ in range(3))
o, lse = onchip.ops.attention_forward(q, k, v, causal=True)
s = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float64) / np.sqrt(32)
s[..., np.triu(np.ones((70, 70), bool), 1)] = -np.inf
e = np.exp(s - s.max(-1, keepdims=True))
np.testing.assert_allclose(lse, np.log(e.sum(-1)) + s.max(-1), atol=1e-5)
wanted = np.einsum("bhij,bjhd->bihd", e / e.sum(-1, keepdims=True), v)
np.testing.assert_allclose(o, wanted, atol=1e-5)
g = onchip.ops.attention_backward(o, q, k, v, o, lse, causal=True)
print(np.abs(g.dk.sum(1)).max() < 1e-3)
"""


def test_attention_with_numpy(wheel, environment, tmp_path):
    beside = tmp_path / "numpy"
    pip("install", "--no-deps", "--target", str(beside), pinned("numpy"))
    code = f"import sys; sys.path.append({str(beside)!r})\n{CALL}"
    assert run(str(environment), "-c", code) == "True\n"


def other_pythons():
    """Newer Pythons of this machine."""
    found = [shutil.which(f"python3.{minor}") for minor in range(12, 20)]
    return [
        path
        for path in found
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0
    ]


@pytest.mark.parametrize("python", other_pythons())
def test_other_pythons(python, unpacked, tmp_path):
    version = run(python, "-c", "import sys; print('{}.{}'.format(*sys.version_info))").strip()
    wanted = ("--python-version", version, "--only-binary=:all:", pinned("nanobind-backend"))
    pip("install", "--no-deps", "--target", str(tmp_path), *wanted)
    code = (
        f"import sys; sys.path[:0] = [{str(unpacked)!r}, {str(tmp_path)!r}]\n"
        "import onchip.cli; sys.exit(onchip.cli.main(['doctor']))"
    )
    out = run(python, "-c", code)
    assert str(unpacked) in out and re.search(r"^  reference +fp64", out, re.MULTILINE)
