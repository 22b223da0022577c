"""The version, which a release has from its tag."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gapped")
except PackageNotFoundError:  # a folder of sources that was never installed
    __version__ = "0+unknown"
