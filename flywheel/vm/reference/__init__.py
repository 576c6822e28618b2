"""The reference VM: what a program means, in torch. Importing this package imports torch."""

from flywheel.vm.reference.machine import BoundProgram, ReferenceVM

__all__ = ["BoundProgram", "ReferenceVM"]
