"""Products of integers on processors other than this one: the same bits, whatever multiplies them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.kernels.processor import cpu_features

AVX2 = "avx2,fma,f16c,bmi,bmi2"
WIDE = f"{AVX2},avx512f,avx512bw,avx512vl,avx512dq,avx512cd"
VNNI = f"{WIDE},avx512vnni"
# With the argument "avxvnni" kernels take the instructions of AVX-VNNI, in the encoding that a processor with
# AVX512-VNNI knows.
PROGRAM = """
import sys, pytest
from batchgen.kernels.cpu.compiled import int8
file, *instructions = sys.argv[1:]
if instructions == ["avxvnni"]:
    int8.cpu_features = lambda: frozenset({"avx2", "avxvnni"})
sys.exit(pytest.main(["-p", "no:cacheprovider", "-k", "to_the_bit", file]))
"""


def assert_integers_are_multiplied_as_by_the_reference(*instructions: str, **settings: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).with_name("test_quantize.py")), *instructions]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "features", "instructions"),
    [
        pytest.param("haswell", AVX2, (), id="AVX2"),
        pytest.param("skylake-avx512", WIDE, (), id="AVX-512 without VNNI"),
        pytest.param("cascadelake", VNNI, (), id="AVX-512 with VNNI"),
        pytest.param("cascadelake", VNNI, ("avxvnni",), id="AVX-VNNI"),
        pytest.param("znver4", f"{VNNI},avx512bf16", (), id="AVX-512 with VNNI and bfloat16"),
    ],
)
def test_every_instruction_set_multiplies_integers_as_the_reference_does(
    cpu: str, features: str, instructions: tuple[str, ...], tmp_path: Path
) -> None:
    if missing := set(features.split(",")) - cpu_features():
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    if features == AVX2 and not {"avx512f", "avxvnni"} & cpu_features():
        pytest.skip("this processor has no more than these: test_quantize.py runs them")
    flags = ",".join(f"+{name}" for name in features.split(","))
    settings = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": flags, "XDG_CACHE_HOME": str(tmp_path)}
    assert_integers_are_multiplied_as_by_the_reference(*instructions, **settings)


@pytest.mark.slow
def test_tiles_in_memory_multiply_integers_as_the_reference_does(tmp_path: Path) -> None:
    assert_integers_are_multiplied_as_by_the_reference(BATCHGEN_TILES="memory", XDG_CACHE_HOME=str(tmp_path))
