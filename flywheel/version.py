"""The version of flywheel, which its distribution has too."""

VERSION = "0.1.0"
