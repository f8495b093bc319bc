"""Workers import the same, each from elsewhere, and as pytest does."""

import sys

from tests.support import imports


def test_workers_begin_apart_and_import_the_same(request):
    root = request.config.rootpath
    orders = [imports.names(root, worker, 3) for worker in range(3)]
    conftests = [name for name in orders[0] if name.endswith(".conftest")]
    assert "tests.text.conftest" in conftests
    assert [order[: len(conftests)] for order in orders] == [conftests] * 3
    modules = [order[len(conftests) :] for order in orders]
    assert len({order[0] for order in modules}) == 3
    assert all(sorted(order) == sorted(set(modules[0])) for order in modules)
    assert __name__ in modules[0]


def test_a_module_has_the_name_that_pytest_gives_it():
    assert [name for name, module in [*sys.modules.items()] if module.__dict__ is globals()] == [
        "tests.support.test_imports"
    ]


def test_what_cannot_be_imported_is_left_to_the_collection(tmp_path, monkeypatch):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_broken_here.py").write_text("import sys\nsys.seen.append('broken')\n1 / 0\n")
    (folder / "test_skipped_here.py").write_text(
        "import sys\nimport pytest\nsys.seen.append('skipped')\n"
        "pytest.skip('why not', allow_module_level=True)\n"
    )
    monkeypatch.setattr(sys, "seen", [], raising=False)
    monkeypatch.setattr(sys.modules["tests"], "__path__", [str(folder)])
    imports.import_all(tmp_path, 1, 2)
    assert sys.seen == ["skipped", "broken"]
    assert "tests.test_broken_here" not in sys.modules
