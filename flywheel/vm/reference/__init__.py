"""The reference VM, which defines what a program computes, in torch. Importing this package imports torch."""

from flywheel.vm.reference.machine import BoundProgram, ReferenceVM

__all__ = ["BoundProgram", "ReferenceVM"]
