"""The contract loads without the numerical libraries, so that commands that only read a plan start at once."""

import json
import pkgutil
import subprocess
import sys

import shared.contract

MODULES = [
    shared.contract.__name__,
    *(module.name for module in pkgutil.walk_packages(shared.contract.__path__, "shared.contract.")),
]
HEAVY = ("torch", "torchvision", "numpy", "safetensors")
_PROGRAM = """
import importlib, json, sys

modules, heavy = json.loads(sys.argv[1])

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Refuse())
for module in modules:
    importlib.import_module(module)
loaded = [name for name in sys.modules if name.partition(".")[0] in heavy]
sys.exit(f"loaded: {loaded}" if loaded else 0)
"""


def test_every_module_of_the_contract_loads_without_torch_and_numpy() -> None:
    assert "shared.contract.plan" in MODULES
    program = [sys.executable, "-c", _PROGRAM, json.dumps([MODULES, HEAVY])]
    result = subprocess.run(program, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
