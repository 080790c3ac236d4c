"""What `import scout_core` costs and offers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import scout_core


def modules_after(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_importing_the_package_loads_no_torch() -> None:
    loaded = modules_after("import scout_core; scout_core.Topology; scout_core.Incident")
    assert "scout_core.decision.topology" in loaded
    assert not loaded & {"torch", "pydantic", "typer", "rich", "zmq"}


def test_the_command_and_its_help_load_no_torch() -> None:
    assert "torch" not in modules_after("import scout_core.cli.main")


def test_there_are_at_most_15_public_names() -> None:
    assert len(scout_core.__all__) <= 15
    assert scout_core.__all__ == sorted(scout_core.__all__)


@pytest.mark.parametrize("name", scout_core.__all__)
def test_each_public_name_resolves_and_is_documented(name: str) -> None:
    found = getattr(scout_core, name)
    assert found.__name__ == name
    assert found.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = scout_core.Trainer


def test_no_adapter_folder_can_shadow_its_framework() -> None:
    for framework in ("torchtitan", "megatron", "deepspeed"):
        assert importlib.util.find_spec(f"adapters.{framework}.scout_{framework}") is not None
        spec = importlib.util.find_spec(f"adapters.{framework}")
        assert spec is not None
        assert spec.origin is None, f"adapters/{framework} must have no __init__.py"
