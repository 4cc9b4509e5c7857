"""Pipeline-parallel training of decoder language models, as one SPMD program with one dtype on the wire."""

from jaxpp.executor import value_and_grad
from jaxpp.mesh import emulate_devices, make_mesh
from jaxpp.partition import Model, place, unstack
from jaxpp.precision import Precision, resolve
from jaxpp.schedules import build

__all__ = [
    "Model",
    "Precision",
    "build",
    "emulate_devices",
    "make_mesh",
    "place",
    "resolve",
    "unstack",
    "value_and_grad",
]
