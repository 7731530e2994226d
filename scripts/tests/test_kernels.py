"""What `scripts/kernels` makes again and what it keeps, and what it refuses, without NVRTC. Standard library only."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent.parent
spec = importlib.util.spec_from_file_location("kernels_build", ROOT / "crates/cuda/kernels/build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


class Folders(unittest.TestCase):
    """Sources of two units that share a header, and a compiler that is told what to give."""

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.out = self.folder / "out"
        self.out.mkdir()
        for name, text in {
            "prim/shared.cuh": "// shared\n",
            "prim/deeper.cuh": "// deeper\n",
            "gemv/one.cu": '#include "prim/shared.cuh"\n',
            "gemv/two.cu": "// alone\n",
            "nvrtc.json": (ROOT / "crates/cuda/kernels/nvrtc.json").read_text(),
        }.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(text)

    def head(self, unit, architecture=90, more=()):
        return build.head(unit, architecture, build.sources(unit, self.folder), more)

    def path(self, unit, architecture=90):
        return str(self.out / build.object_name(unit, architecture))

    def make(self, unit, architecture=90):
        content = self.head(unit, architecture) + "ptx 1\ncode 0\n\nx"
        build.write_whole(self.path(unit, architecture), content.encode())

    def fresh(self):
        return [unit for unit in build.units(self.folder) if build.is_fresh(self.path(unit), self.head(unit))]


class CacheTest(Folders):
    def test_units_are_the_cu_files_of_folders(self):
        self.assertEqual(build.units(self.folder), ["gemv/one", "gemv/two"])

    def test_nothing_is_fresh_before_it_is_made(self):
        self.assertEqual(self.fresh(), [])

    def test_what_was_made_from_the_same_sources_is_kept(self):
        self.make("gemv/one")
        self.make("gemv/two")
        self.assertEqual(self.fresh(), ["gemv/one", "gemv/two"])

    def test_a_header_concerns_only_the_units_that_include_it(self):
        self.make("gemv/one")
        self.make("gemv/two")
        (self.folder / "prim/shared.cuh").write_text("// changed\n")
        self.assertEqual(self.fresh(), ["gemv/two"])

    def test_a_header_of_a_header_counts(self):
        (self.folder / "prim/shared.cuh").write_text('#include "prim/deeper.cuh"\n')
        self.make("gemv/one")
        self.assertEqual(self.fresh(), ["gemv/one"])
        (self.folder / "prim/deeper.cuh").write_text("// changed\n")
        self.assertEqual(self.fresh(), [])

    def test_options_and_the_compilers_version_concern_everything(self):
        self.make("gemv/one")
        settings = self.folder / "nvrtc.json"
        settings.write_text(settings.read_text().replace("12.4.127", "12.4.131"))
        self.assertEqual(self.fresh(), [])

    def test_another_architecture_and_other_options_are_other_objects(self):
        self.make("gemv/one")
        self.assertFalse(build.is_fresh(self.path("gemv/one", 80), self.head("gemv/one", 80)))
        self.assertFalse(build.is_fresh(self.path("gemv/one"), self.head("gemv/one", more=["-DSTAMPS"])))

    def test_a_header_that_is_missing_is_named(self):
        (self.folder / "gemv/two.cu").write_text('#include "prim/none.cuh"\n')
        with self.assertRaisesRegex(build.Failure, "gemv/two.cu includes prim/none.cuh, which is not there"):
            build.sources("gemv/two", self.folder)

    def test_an_object_is_written_whole_or_not_at_all(self):
        with mock.patch.object(build.os, "replace", side_effect=OSError(28, "No space left on device")):
            with self.assertRaises(OSError):
                self.make("gemv/one")
        self.assertEqual(os.listdir(self.out), [])


class ChecksTest(unittest.TestCase):
    def test_arithmetic_that_is_not_exact_is_refused(self):
        for line in ["div.full.f32 %f1, %f2, %f3;", "sqrt.approx.f32 %f1, %f2;", "add.ftz.f32 %f1, %f2, %f3;", "mul.f32 %f1, %f2, %f3;", "red.global.add.f32 [%rd1], %f1;", "atom.add.f32 %f1, [%rd1], %f2;"]:
            with self.assertRaisesRegex(build.Failure, "not exact arithmetic"):
                build.check_ptx("gemv/one", f".entry x\n\t{line}\n".encode())

    def test_arithmetic_that_is_exact_is_taken(self):
        for line in ["add.rn.f32 %f1, %f2, %f3;", "fma.rn.ftz.f32 %f1, %f2, %f3, %f4;", "atom.global.inc.u32 %r1, [%rd1], %r2;", "atom.shared.add.u32 %r1, [%r2], 1;", "red.shared.or.b32 [%r1], %r2;"]:
            build.check_ptx("gemv/one", f".entry x\n\t{line}\n".encode())

    def test_static_shared_memory_stays_under_its_limit(self):
        limits = build.shared_limits("# comment\nmost 100\ngemv_\nattention_prefill 50\n")
        self.assertEqual(limits, [("gemv_", 100), ("attention_prefill", 50)])
        for kernel, bytes_, fits in [("gemv_x", 100, True), ("gemv_x", 101, False), ("attention_prefill_128", 51, False), ("quantize", 9999, True)]:
            with mock.patch.object(build, "static_shared", return_value={kernel: bytes_}):
                if fits:
                    build.check_shared("x", b"", limits)
                else:
                    with self.assertRaisesRegex(build.Failure, f"{kernel} has {bytes_} bytes"):
                        build.check_shared("x", b"", limits)

    def test_each_device_gets_the_newest_architecture_that_it_takes(self):
        known = [75, 80, 90]
        for found, chosen in [([75], [75]), ([86, 89], [80]), ([90], [90]), ([120], [90]), ([75, 90, 60], [75, 90])]:
            self.assertEqual(build.for_capabilities(found, known), chosen)
        with self.assertRaisesRegex(build.Failure, "compute capability 7.5 is needed"):
            build.for_capabilities([61], known)


class CommandTest(unittest.TestCase):
    def run_it(self, *arguments):
        call = [sys.executable, "-B", str(ROOT / "crates/cuda/kernels/build.py"), *arguments]
        return subprocess.run(call, capture_output=True, text=True, env={**os.environ, "PATH": ""})

    @unittest.skipIf(os.path.exists("/dev/nvidia0"), "there is a GPU")
    def test_where_there_is_no_gpu_nothing_is_made_for_one(self):
        done = self.run_it("--if-gpu")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_a_unit_that_is_not_there_is_named(self):
        done = self.run_it("--unit", "gemv/none")
        self.assertEqual(done.returncode, 1)
        self.assertTrue(done.stderr.startswith("kernels: there is no unit gemv/none: there are "), done.stderr)


if __name__ == "__main__":
    unittest.main()
